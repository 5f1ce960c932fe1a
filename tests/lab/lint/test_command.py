# SPDX-License-Identifier: Apache-2.0
"""`mmcache lint` as users run it: exit statuses, and one line for whatever can't be read."""

import json
from pathlib import Path

import pytest

from tests.lab.lint.test_causes import CHAT, PLAIN
from tests.system.cli.test_commands import assert_one_line, mmcache

OPENS = PLAIN.replace("[assistant]", "[assistant]<think>")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "plain.jinja").write_text(PLAIN)
    (tmp_path / "opens.jinja").write_text(OPENS)
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.")
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(CHAT)}\n\n{json.dumps({'messages': CHAT, 'tools': []})}\n")
    return tmp_path


@pytest.mark.process
def test_clean_and_findings(files: Path) -> None:
    clean = mmcache("lint", "plain.jinja", "chat.jsonl", cwd=files)
    assert (clean.returncode, clean.stderr) == (0, "")
    assert "no findings: 4 requests, 2 of them with an earlier turn" in clean.stdout
    found = mmcache("lint", "opens.jinja", "chat.jsonl", cwd=files, COLUMNS="200")
    assert found.returncode == 1
    assert "generation_prompt" in found.stdout
    assert "14 characters" in found.stdout
    as_json = mmcache("lint", "opens.jinja", "chat.jsonl", "--json", cwd=files)
    assert as_json.returncode == 1
    report = json.loads(as_json.stdout)
    assert [finding["line"] for finding in report["findings"]] == [1, 3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', "chat.jsonl:2: malformed JSON at column"),
        ('{"messages": 3}', "chat.jsonl:2: expected a list of messages"),
        ('"text"', "chat.jsonl:2: expected a list of messages"),
        ("[]", "chat.jsonl:2: expected a list of messages"),
        ('[{"content": "x"}]', 'chat.jsonl:2: message 0: expected an object with a "role"'),
        ('[{"role": "user", "content": 3}]', "chat.jsonl:2: message 0"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', 'no "text"'),
        ('{"messages": [{"role": "user"}], "tools": "look"}', '"tools" is no list of objects'),
    ],
)
def test_bad_lines(files: Path, line: str, said: str) -> None:
    from mmcache_tools.lint.conversations import read

    from vllm_mmcache.base.errors import LintError

    (files / "chat.jsonl").write_text(f"{json.dumps(CHAT)}\n{line}\n")
    with pytest.raises(LintError, match=r"chat\.jsonl:2") as caught:
        read(files / "chat.jsonl")
    assert said in str(caught.value)


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["plain.jinja", "none.jsonl"], "none.jsonl: No such file"),
        (["none.jinja", "chat.jsonl"], "none.jinja: No such file"),
        (["broken.jinja", "chat.jsonl"], "does not compile: line 2"),
        ([".", "chat.jsonl"], "no chat template in it"),
        (["plain.jinja", "chat.jsonl", "--tokenizer", "none"], "no such tokenizer"),
        (["plain.jinja", "chat.jsonl", "--tokenizer", "chat.jsonl"], "no tokenizer"),
        (["plain.jinja", "chat.jsonl", "--content", "odd"], "--content odd"),
        (["plain.jinja", "chat.jsonl", "--kwargs", "{"], "--kwargs {: expected a JSON object"),
        (["plain.jinja", "broken.jinja"], "broken.jinja:1: malformed JSON"),
    ],
)
def test_mistakes(files: Path, args: list[str], said: str) -> None:
    assert_one_line(mmcache("lint", *args, cwd=files), said)
