# SPDX-License-Identifier: Apache-2.0
"""Marks of turns found by probes, on the templates of the zoo and on templates that have none."""

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached

from vllm_mmcache.base import failsafe as failsafe_module
from vllm_mmcache.base import status
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.components.observe import hooks_api
from vllm_mmcache.components.observe.record.turns import Marks, find_marks

USER, YES = {"role": "user", "content": "Look at this"}, {"role": "assistant", "content": "Yes, I do"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2-vl", "qwen3-vl", "qwen3.5", "gemma3"])
def test_turns_of_a_family(family: str, root: Path) -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(build_cached(family, root))
    tokenizer = processor.tokenizer

    def render(messages: Sequence[dict[str, Any]], opens: bool) -> list[int]:
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        text = processor.apply_chat_template(parts, add_generation_prompt=opens, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    marks = find_marks(render, {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    assert marks is not None
    assert tokenizer.convert_ids_to_tokens(marks.token) in ("<|im_start|>", "<start_of_turn>")
    tokens = render([USER, YES, USER], True)
    roles = marks.roles_of(tokens, marks.find(tokens, ()))
    assert roles[-4:] == ["user", "assistant", "user", "assistant"]
    tokens = render([{"role": "system", "content": "Rules"}, USER], True)
    roles = marks.roles_of(tokens, marks.find(tokens, ()))
    assert roles == (["user", "assistant"] if family == "gemma3" else ["system", "user", "assistant"])


def test_a_template_without_marks() -> None:
    def render(messages: Sequence[dict[str, str]], opens: bool) -> list[int]:
        return [*(ord(c) for m in messages for c in m["content"]), *([1] if opens else [])]

    assert find_marks(render, {1, 2}) is None
    assert find_marks(render, set()) is None


def test_marks_inside_images_do_not_count() -> None:
    marks = Marks(7)
    prompt = [7, 1, 7, 7, 2, 7, 3]
    assert marks.find(prompt, [(2, 2, "")]) == [0, 5]
    assert marks.find(prompt, []) == [0, 2, 3, 5]
    assert marks.find([], []) == []


class Renderer:
    """As vLLM's, for templates that are the text before each message; counts what it is asked for."""

    def __init__(self) -> None:
        self.num_rendered = 0

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(all_special_ids=[1])

    def render_messages(self, messages: Sequence[dict[str, str]], params: Any) -> tuple[None, dict[str, Any]]:
        self.num_rendered += 1
        opening = [1] if params.chat_template_kwargs["add_generation_prompt"] else []
        return None, {"prompt_token_ids": [*([1, 2] * len(messages)), *opening]}


@pytest.mark.slow
def test_templates_of_clients_are_bounded() -> None:
    """However many a client brings, and however long they are: those of the last ones are known, none is held."""
    renderer: Any = Renderer()
    own, own_digest = hooks_api._marks_of(renderer, None)
    assert own is not None
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    for number in range(500):
        marks, digest = hooks_api._marks_of(renderer, f"{number} " * 20_000)
        assert (marks, digest != own_digest) == (own, True)
        assert hooks_api._marks_of(renderer, None) == (own, own_digest)  # which is in use, so it stays
    gc.collect()
    grown = sum(one.size_diff for one in tracemalloc.take_snapshot().compare_to(before, "filename"))
    tracemalloc.stop()
    assert grown < hooks_api.MOST_TEMPLATES * hooks_api.TEMPLATE_COST_BYTES + 100_000
    asked = renderer.num_rendered
    for number in range(440, 500):
        hooks_api._marks_of(renderer, f"{number} " * 20_000)
    assert renderer.num_rendered == asked, "the last ones are known"
    hooks_api._marks_of(renderer, "0 " * 20_000)
    assert renderer.num_rendered > asked, "the first ones are not"


class HangingRenderer(Renderer):
    """Renders nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_render = threading.Event()
        self.is_rendering = threading.Event()

    def render_messages(self, messages: Sequence[dict[str, str]], params: Any) -> tuple[None, dict[str, Any]]:
        self.is_rendering.set()
        self.may_render.wait(60)
        return super().render_messages(messages, params)


async def rendered(conversations: Any, chat_params: Any) -> Any:
    """As BaseRenderer.render_chat_async, of what needs no rendering."""
    return conversations, [{} for _ in conversations]


def test_a_template_that_takes_for_ever_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers with it, and goes on with others; it has no marks."""
    monkeypatch.setitem(status._is_on, "observe", True)
    monkeypatch.setattr(hooks_api, "MARKS_S", 0.1)
    monkeypatch.setattr(hooks_api, "_probing", Threads("test", 1))
    renderer = HangingRenderer()

    async def ask(template: str) -> Any:
        params = SimpleNamespace(chat_template=template, chat_template_kwargs={})
        given = {"conversations": [[USER]], "chat_params": params}
        _, (prompt,) = await hooks_api.note_chat_async(rendered, renderer, (), given)
        return prompt[hooks_api._CHAT][0]

    assert asyncio.run(ask("slow")) is None
    assert renderer.is_rendering.is_set(), "in another thread"
    assert asyncio.run(ask("slow")) is None, "it is probed once"
    monkeypatch.setattr(hooks_api, "MARKS_S", 60.0)
    renderer.may_render.set()
    assert asyncio.run(ask("fine")) is not None
    assert asyncio.run(ask("slow")) is not None, "it has come to its end"


def test_first_requests_that_come_together_all_have_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status._is_on, "observe", True)
    monkeypatch.setattr(hooks_api, "_probing", Threads("test", 1))
    renderer = HangingRenderer()

    async def ask_three() -> list[Any]:
        asked = [asyncio.create_task(hooks_api._marks_of_async(renderer, "a")) for _ in range(3)]
        await asyncio.to_thread(renderer.is_rendering.wait, 60)
        renderer.may_render.set()
        return await asyncio.gather(*asked)

    monkeypatch.setattr(hooks_api, "MARKS_S", 60.0)
    found = asyncio.run(ask_three())
    assert [marks for marks, _ in found] == [Marks(1, found[0][0].roles)] * 3


def test_templates_of_clients_that_fail_fill_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks_api, "_probing", Threads("test", 1))
    monkeypatch.setattr(failsafe_module, "_logged", set())

    class Renderer:
        def get_tokenizer(self) -> Any:
            raise RuntimeError("no tokenizer, says a test")

    renderer = Renderer()
    for template in "abc":
        assert asyncio.run(hooks_api._marks_of_async(renderer, template))[0] is None
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_a_probe_that_nobody_can_make_is_made_when_somebody_can(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Threads("test", 1)
    closed.close()
    renderer: Any = Renderer()
    monkeypatch.setattr(hooks_api, "_probing", closed)
    assert asyncio.run(hooks_api._marks_of_async(renderer, "a"))[0] is None
    monkeypatch.setattr(hooks_api, "_probing", Threads("test", 1))
    assert asyncio.run(hooks_api._marks_of_async(renderer, "a"))[0] is not None
