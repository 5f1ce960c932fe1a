# SPDX-License-Identifier: Apache-2.0
"""The templates of the zoo with their own tokenizers, and the forms in which they see contents."""

import json
from pathlib import Path

import pytest
from mmcache_tools import zoo
from mmcache_tools.lint.check import Report, check
from mmcache_tools.lint.conversations import requests_of
from mmcache_tools.lint.template import Content, load
from mmcache_tools.zoo.catalogue import BY_NAME
from mmcache_tools.zoo.tokenizer import tokenizer_json

from tests.lab.lint.test_causes import CHAT, IMAGE, causes, says

PICTURES = [
    says("system", "Be brief."),
    says("user", "Hello there."),
    says("assistant", "Hello."),
    says("user", [IMAGE, {"type": "text", "text": "What is this?"}]),
    says("assistant", "A cat."),
    says("user", [{"type": "text", "text": "And this?"}, IMAGE]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each family with what a template needs of a model: no weights."""
    root = tmp_path_factory.mktemp("models")
    for name in zoo.FAMILIES:
        family, directory = BY_NAME[name], root / name
        directory.mkdir()
        template = Path(zoo.__file__).parent / "templates" / family.template
        (directory / "chat_template.jinja").write_text(template.read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(family.tokenizer))
        (directory / "tokenizer.json").write_text(tokenizer_json(family)[0])
    return root


def lint(place: Path, messages: list[dict[str, object]], content: Content = Content.VLLM) -> Report:
    return check(load(place, content=content), [list(requests_of(1, messages, None))])


THINKING = [name for name in zoo.FAMILIES if BY_NAME[name].template == "qwen3_5.jinja"]


@pytest.mark.parametrize("family", [name for name in zoo.FAMILIES if name not in THINKING])
@pytest.mark.parametrize("content", list(Content))
def test_families_are_clean(models: Path, family: str, content: Content) -> None:
    report = lint(models / family, PICTURES, content)
    assert report.findings == []
    assert (report.requests, report.pairs, report.unit) == (3, 2, "tokens")
    assert report.prompt > 0
    assert load(models / family).reads_parts


@pytest.mark.parametrize("family", THINKING)
def test_qwen35_opens_a_thought_that_later_turns_do_not_have(models: Path, family: str) -> None:
    report = lint(models / family, CHAT)
    assert causes(report) == ["generation_prompt"]
    assert report.findings[0].lost == 2  # <think> and the newline
    thoughts = [*CHAT[:2], says("assistant", "<think>\nhm\n</think>\n\ntwo"), CHAT[3]]
    assert causes(lint(models / family, thoughts)) == ["dropped_reasoning"]


def test_gemma_begins_with_its_own_token(models: Path) -> None:
    template = load(models / "gemma3")
    prompt = template.prompt(next(requests_of(1, CHAT, None)))
    assert prompt.startswith("<bos><start_of_turn>user\nBe brief.")


@pytest.mark.parametrize("place", ["chat_template.json", "tokenizer_config.json"])
def test_templates_in_json_files(models: Path, tmp_path: Path, place: str) -> None:
    text = (models / "qwen2-vl" / "chat_template.jinja").read_text()
    (tmp_path / place).write_text(json.dumps({"chat_template": text}))
    report = lint(tmp_path, PICTURES)
    assert (report.findings, report.unit) == ([], "characters")
