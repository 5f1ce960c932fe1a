# SPDX-License-Identifier: Apache-2.0
"""Marks of turns found by probes, on the templates of the zoo and on templates that have none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_mmcache.observe.turns import Marks, find_marks
from vllm_mmcache.zoo import build_cached

USER, YES = {"role": "user", "content": "Look at this"}, {"role": "assistant", "content": "Yes, I do"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


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
