# SPDX-License-Identifier: Apache-2.0
"""Every cause on a small template that has it, and the same conversation on one that has not."""

from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.lint.causes import CAUSES
from mmcache_tools.lint.check import Report, check
from mmcache_tools.lint.conversations import requests_of
from mmcache_tools.lint.template import Content, Template

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "draw")]
HEAD = "{%- if messages[0].role == 'system' %}[S]{{ messages[0].content }}{% endif -%}"
LOOP = "{%- for m in messages -%}[{{ m.role }}]"
END = "{%- endfor -%}{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
PLAIN = LOOP + "{{ m.content }}|" + END
PARTS = (
    LOOP
    + "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for p in m.content -%}{%- if p.type == 'text' -%}"
    + "{{ p.text }}{%- else -%}<i>{%- endif -%}{%- endfor -%}{%- endif -%}|"
    + END
)
THINKS = (
    "{%- set last = namespace(user=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    + LOOP
    + "{%- if m.reasoning_content and (loop.index0 > last.user or (preserve_thinking is defined and preserve_thinking))"
    + " -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}{{ m.content }}|"
    + END
)


def says(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def lint(
    template: str, *lines: list[dict[str, Any]], tools: Any = (), as_requests: bool = False, **options: Any
) -> Report:
    """A report on conversations; tools: one list for each line."""
    given = list(tools) or [None] * len(lines)
    conversations = [list(requests_of(n, m, t)) for n, (m, t) in enumerate(zip(lines, given, strict=True), 1)]
    return check(Template(template, **options), conversations, as_requests)


def causes(report: Report) -> list[str]:
    return [finding.cause for finding in report.findings]


CHAT = [says("system", "Be brief."), says("user", "one"), says("assistant", "two"), says("user", "three")]


def test_a_plain_template_is_clean() -> None:
    report = lint(PLAIN, CHAT, [*CHAT, says("assistant", "four"), says("user", "five")])
    assert causes(report) == []
    assert (report.requests, report.pairs, report.lost) == (5, 3, 0)


def test_the_first_image_drops_the_system_text() -> None:
    guarded = (
        "{%- set ns = namespace(images=false) -%}{%- for m in messages -%}{%- if m.content is not string -%}"
        "{%- for p in m.content -%}{%- if p.type == 'image' -%}{%- set ns.images = true -%}{%- endif -%}{%- endfor -%}"
        "{%- endif -%}{%- endfor -%}{%- if not ns.images -%}[date][tools]{%- endif -%}" + PARTS
    )
    picture = [*CHAT[:3], says("user", [IMAGE, {"type": "text", "text": "three"}])]
    report = lint(guarded, picture)
    assert causes(report) == ["first_image"]
    assert report.findings[0].position == 1  # behind the first bracket
    assert causes(lint(guarded, CHAT)) == []  # no image comes
    assert causes(lint(PARTS, picture)) == []  # a template that does not care


def test_strings_become_lists_with_the_first_image() -> None:
    """What oMLX 637 found: the same text, rendered in another way once contents are lists."""
    differs = PARTS.replace("{{ p.text }}", "{{ p.text }}.")
    picture = [*CHAT[:3], says("user", [IMAGE, {"type": "text", "text": "three"}])]
    assert causes(lint(differs, picture, content=Content.SWITCH)) == ["string_or_list"]
    assert causes(lint(differs, CHAT, content=Content.SWITCH)) == []
    assert causes(lint(PARTS, picture, content=Content.SWITCH)) == []
    assert causes(lint(differs, picture)) == []  # vLLM hands over lists always


def test_reasoning_of_earlier_turns_is_dropped() -> None:
    loop = [
        says("user", "look"),
        says("assistant", "", reasoning="hm", tool_calls=[{"function": {"name": "look", "arguments": "{}"}}]),
        says("tool", "a cat"),
        says("assistant", "A cat."),
        says("user", "and now?"),
    ]
    report = lint(THINKS, loop)
    assert causes(report) == ["dropped_reasoning"]
    found = report.findings[0]
    assert (found.turn, found.next_turn, found.message) == (2, 3, 1)
    assert found.was.startswith("<think>hm</think>")
    assert found.fix is not None
    assert '{"preserve_thinking": true}' in found.fix
    assert causes(lint(THINKS, loop, kwargs={"preserve_thinking": True})) == []
    assert causes(lint(THINKS, [{k: v for k, v in m.items() if k != "reasoning"} for m in loop])) == []


def test_the_generation_prompt_is_not_rendered_again() -> None:
    opens = PLAIN.replace("[assistant]", "[assistant]<think>")
    report = lint(opens, CHAT)
    assert causes(report) == ["generation_prompt"]
    assert report.findings[0].lost == len("<think>")
    assert causes(lint(PLAIN, CHAT)) == []


def test_a_clock_in_the_template() -> None:
    daily = "{{ strftime_now('%d %B %Y') }}" + PLAIN
    minutes = "{{ strftime_now('%H:%M') }}" + PLAIN
    assert "once a day" in lint(daily, CHAT).findings[0].why
    assert "every minute" in lint(minutes, CHAT).findings[0].why
    assert causes(lint(daily, CHAT)) == causes(lint(minutes, CHAT)) == ["clock"]
    assert causes(lint("{{ date_string or '1 March' }}" + PLAIN, CHAT)) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Today is 2026-03-04.", "Today is 2026-03-05."),
        ("It is Monday, 4 March, 09:15 AM.", "It is Tuesday, 5 March, 10:20 PM."),
        ("Now: 1790000000", "Now: 1790000009"),
    ],
)
def test_a_date_in_the_system_text(first: str, second: str) -> None:
    lines = [[says("system", text), *CHAT[1:]] for text in (first, second)]
    assert causes(lint(PLAIN, *lines)) == ["date_in_system"]
    assert causes(lint(PLAIN, lines[0], lines[0])) == []
    in_order = [lines[0][:2], lines[1]]
    assert causes(lint(PLAIN, *in_order, as_requests=True)) == ["date_in_system"]
    other = [says("system", "Something else."), *CHAT[1:]]
    assert causes(lint(PLAIN, lines[0], other)) == []  # another application
    assert causes(lint(PLAIN, lines[0][:2], other, as_requests=True)) == ["system_changed"]


def test_tools() -> None:
    lists = "{%- for t in tools or [] -%}<{{ t | tojson }}>{%- endfor -%}" + PLAIN
    swapped = list(reversed(TOOLS))
    keys = [dict(reversed(list(tool.items()))) for tool in TOOLS]
    assert causes(lint(lists, CHAT, CHAT, tools=[TOOLS, swapped])) == ["tools_reordered"]
    assert causes(lint(lists, CHAT, CHAT, tools=[TOOLS, keys])) == ["tools_reordered"]
    assert causes(lint(lists, CHAT[:2], CHAT, tools=[TOOLS, swapped], as_requests=True)) == ["tools_reordered"]
    assert causes(lint(lists, CHAT[:2], CHAT, tools=[TOOLS, TOOLS[:1]], as_requests=True)) == ["tools_changed"]
    assert causes(lint(lists, CHAT[:2], CHAT, tools=[TOOLS, TOOLS], as_requests=True)) == []
    assert causes(lint(PLAIN, CHAT[:2], CHAT, tools=[TOOLS, swapped], as_requests=True)) == []  # not rendered


def test_tools_and_system_text_that_move_with_the_last_message() -> None:
    tools = LOOP + "{% if loop.last and tools %}<{{ tools | tojson }}>{% endif %}{{ m.content }}|" + END
    assert causes(lint(tools, CHAT, tools=[TOOLS])) == ["tools_moved"]
    assert causes(lint(tools, CHAT)) == []
    system = (
        "{%- for m in messages if m.role != 'system' -%}[{{ m.role }}]{% if loop.last and messages[0].role == 'system' "
        "%}{{ messages[0].content }}{% endif %}{{ m.content }}|" + END
    )
    assert causes(lint(system, CHAT)) == ["system_moved"]
    assert causes(lint(system, CHAT[1:])) == []


def test_white_space_of_the_last_message() -> None:
    strips = LOOP + "{{ m.content if loop.last else m.content | trim }}|" + END
    spaced = [says("user", "one "), *CHAT[2:]]
    assert causes(lint(strips, spaced)) == ["whitespace"]
    assert causes(lint(strips, CHAT)) == []
    assert causes(lint(PLAIN, spaced)) == []


def test_what_the_client_did_to_earlier_messages() -> None:
    def pair(second: list[dict[str, Any]]) -> list[str]:
        first = [says("user", "one "), says("assistant", "two", reasoning="hm"), says("user", "three")]
        template = THINKS.replace("loop.index0 > last.user", "true")
        return causes(lint(template, first, [*second, says("assistant", "4"), says("user", "5")], as_requests=True))

    one, two, three = says("user", "one "), says("assistant", "two", reasoning="hm"), says("user", "three")
    assert pair([one, two, three]) == []
    assert pair([says("user", "one"), two, three]) == ["whitespace"]
    assert pair([one, says("assistant", "two"), three]) == ["dropped_reasoning"]
    assert pair([one, says("assistant", "too", reasoning="hm"), three]) == ["message_changed"]
    assert pair([three]) == ["message_dropped"]


def test_anything_else_is_the_templates() -> None:
    counts = LOOP + "{{ loop.revindex }}{{ m.content }}|" + END
    report = lint(counts, CHAT)
    assert causes(report) == ["template"]
    assert report.findings[0].fix is None


def test_tokens_merge_across_the_boundary() -> None:
    def tokens(text: str) -> list[int]:
        return [1000 if pair == "]t" else ord(pair[0]) for pair in map("".join, zip(text, text[1:] + " ", strict=True))]

    assert causes(lint(PLAIN, CHAT, tokens=tokens)) == ["token_boundary"]
    assert causes(lint(PLAIN, CHAT, tokens=lambda text: [ord(c) for c in text])) == []


def test_a_template_that_refuses() -> None:
    refuses = "{%- if messages | length > 2 -%}{{ raise_exception('too long') }}{%- endif -%}" + PLAIN
    report = lint(refuses, CHAT)
    assert causes(report) == ["refused"]
    assert "too long" in report.findings[0].why
    assert causes(lint(refuses, CHAT[:2])) == []


def test_images_that_are_lost_are_counted() -> None:
    counts = PARTS.replace("[{{ m.role }}]", "[{{ m.role }}{{ loop.revindex if loop.index0 == 1 }}]")
    image = says("user", [IMAGE, IMAGE, {"type": "text", "text": "which?"}])
    report = lint(counts, [says("system", "Be brief."), image, says("assistant", "this"), says("user", "why?")])
    assert [finding.images_lost for finding in report.findings] == [2]
    late = PARTS.replace("[{{ m.role }}]", "[{{ m.role }}{{ loop.revindex if loop.index0 == 3 }}]")
    turns = [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d"), says("user", "e")]
    report = lint(late, [image, *turns[1:3], says("assistant", "d"), *turns[2:]])
    assert {finding.images_lost for finding in report.findings} == {0}


def test_every_cause_has_a_case_here() -> None:
    text = Path(__file__).read_text()
    assert not [name for name in CAUSES if f'"{name}"' not in text]
