# SPDX-License-Identifier: Apache-2.0
"""The zoo's models: same bytes from the same seed, errors that say what to do, and pictures that matter.

A model that ignores its pictures would pass every exactness test of the caches, so here Transformers alone
measures that each picture, its place, its order and its size move the output.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.zoo import BY_NAME, FAMILIES, FIRST_FAMILIES, FORMAT_VERSION, ZooOptions, build, build_cached
from PIL import Image, ImageChops

from tests.support.sizes import WHOLE, larger
from vllm_mmcache.base.errors import ZooError
from vllm_mmcache.exactness.pictures import ellipses

MANY = [pytest.param(family, marks=() if family in FIRST_FAMILIES else larger) for family in FAMILIES]
MOVED = 0.05  # log-probability; fifty times the tolerance of the exactness tests


def picture(number: int, size: tuple[int, int] = (224, 224)) -> Image.Image:
    """The picture of a number."""
    return ellipses(str(number), size)


def file_digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def zoo_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The families of MANY that are run, each in a folder of its name, as one process with another hash seed writes."""
    root = tmp_path_factory.mktemp("elsewhere")
    folders = [str(root / family) for family in (FAMILIES if WHOLE else FIRST_FAMILIES)]
    code = (
        "import os, sys; from mmcache_tools.zoo import build; [build(os.path.basename(to), to) for to in sys.argv[1:]]"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", code, *folders], check=True, env=environment)
    return root


@functools.lru_cache(maxsize=1)
def load(directory: Path) -> tuple[Any, Any, dict[str, Any]]:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, info = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    return AutoProcessor.from_pretrained(directory), model.eval(), info


def continue_greedily(directory: Path, images: Sequence[Image.Image], max_tokens: int = 6) -> tuple[list[int], Any]:
    """Greedy token ids and the log-probabilities (max_tokens, vocab) float32, by Transformers."""
    import torch

    processor, model, _ = load(directory)
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": "What is in this picture?"}]
    messages = [{"role": "user", "content": content}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=prompt, images=list(images), return_tensors="pt", add_special_tokens=False)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        result = model.generate(
            **inputs, max_new_tokens=max_tokens, output_scores=True, return_dict_in_generate=True, do_sample=False
        )
    start = inputs["input_ids"].shape[1]
    return result.sequences[0, start:].tolist(), torch.stack(result.scores)[:, 0].log_softmax(-1)


def difference(one: Any, other: Any) -> float:
    """Largest change of any token's log-probability at the first generated position."""
    return float((one[1][0] - other[1][0]).abs().max())


@pytest.mark.process
@pytest.mark.parametrize("family", MANY)
def test_same_seed_same_bytes(family: str, tmp_path: Path, elsewhere: Path) -> None:
    """Another process, with another hash seed, writes the same files; another seed writes other weights."""
    here = file_digests(build(family, tmp_path / "here"))
    assert file_digests(elsewhere / family) == here
    other = file_digests(build(family, tmp_path / "other", seed=1))
    assert {name for name in here if other[name] != here[name]} == {"model.safetensors", "zoo.json"}


@pytest.mark.slow
@pytest.mark.parametrize("family", MANY)
def test_pictures_move_the_output(family: str, zoo_root: Path) -> None:
    directory = build_cached(family, zoo_root)
    _, _, info = load(directory)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    each = [continue_greedily(directory, [picture(i)]) for i in range(10)]
    assert len({tuple(tokens) for tokens, _ in each}) >= 8

    again = continue_greedily(directory, [picture(0)])
    assert difference(again, each[0]) <= 1e-5  # the measure itself is quiet
    moved = continue_greedily(directory, [ImageChops.offset(picture(0), 60, 0)])
    assert difference(moved, each[0]) > MOVED
    resized = continue_greedily(directory, [picture(0).resize((300, 160))])
    assert difference(resized, each[0]) > MOVED
    ordered = continue_greedily(directory, [picture(1), picture(2)])
    swapped = continue_greedily(directory, [picture(2), picture(1)])
    assert difference(swapped, ordered) > MOVED


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_continuation_has_no_special_tokens(family: str, zoo_root: Path) -> None:
    """What the model writes can be sent back on the next turn: readable text, no placeholders."""
    directory = build_cached(family, zoo_root)
    processor, _, _ = load(directory)
    tokens, _ = continue_greedily(directory, [picture(3)], max_tokens=24)
    text = processor.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.isascii()
    assert not set(tokens) & set(processor.tokenizer.all_special_ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name.endswith("-moe")])
def test_experts_move_the_output(family: str, zoo_root: Path) -> None:
    """Each expert is asked, none is the only one, and the choice matters: a router turned round changes the output."""
    directory = build_cached(family, zoo_root)
    _, model, _ = load(directory)
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    used: list[int] = []
    hooks = [
        router.register_forward_hook(lambda *call: used.extend(call[-1][2].flatten().tolist())) for router in routers
    ]
    right = continue_greedily(directory, [picture(4)])
    for hook in hooks:
        hook.remove()
    shares = [used.count(expert) / len(used) for expert in range(routers[0].num_experts)]
    assert len(shares) == 8
    assert min(shares) > 0.02
    assert max(shares) < 0.5
    for router in routers:
        router.weight.data.neg_()
    try:
        wrong = continue_greedily(directory, [picture(4)])
    finally:
        for router in routers:  # the model is another test's, too
            router.weight.data.neg_()
    assert difference(wrong, right) > 20 * MOVED


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_chat_template_keeps_the_prefix(family: str, zoo_root: Path) -> None:
    """A turn more only adds text, so a server can reuse what it has; roles and pictures appear in order."""
    processor, _, _ = load(build_cached(family, zoo_root))
    question = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is this?"}]}
    turns = [question, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "Sure?"}]
    first = processor.apply_chat_template(turns[:1], tokenize=False)
    third = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert third.startswith(first)
    assert third.index("What is this?") < third.index("a cat") < third.index("Sure?")
    marker = "<start_of_image>" if family == "gemma3" else BY_NAME[family].image_token
    assert third.count(marker) == 1


@pytest.mark.slow
def test_options_are_written(tmp_path: Path) -> None:
    import json

    options = ZooOptions(max_pixels=320 * 320, sliding_window=64, mm_tokens_per_image=16)
    gemma = build("gemma3", tmp_path / "gemma", options=options)
    config = json.loads((gemma / "config.json").read_text())
    assert (config["text_config"]["sliding_window"], config["mm_tokens_per_image"]) == (64, 16)
    qwen = build("qwen3-vl", tmp_path / "qwen", options=options)
    assert json.loads((qwen / "preprocessor_config.json").read_text())["size"]["longest_edge"] == 320 * 320
    assert build_cached("gemma3", tmp_path, options=options) != build_cached("gemma3", tmp_path)


def test_four_large_pictures_fit(zoo_root: Path) -> None:
    """Four 1280x720 pictures take less than 8192 tokens in the most expensive family (14-pixel patches)."""
    processor, _, _ = load(build_cached("qwen2-vl", zoo_root))
    pictures = [picture(i, (1280, 720)) for i in range(4)]
    text = "<|vision_start|><|image_pad|><|vision_end|>" * 4
    num_tokens = processor(text=text, images=pictures, return_tensors="pt")["input_ids"].shape[1]
    assert 4 * 900 < num_tokens < 8192


def test_unknown_family_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"'qwen9'.*qwen2-vl.*gemma3"):
        build("qwen9", tmp_path)
    with pytest.raises(ZooError, match="qwen9"):
        build_cached("qwen9", tmp_path)


def test_unwritable_directory_says_so(tmp_path: Path) -> None:
    """A file stands where the directory should be (works for root, whom permissions don't stop)."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ZooError, match=r"can't write .*file"):
        build("qwen2-vl", tmp_path / "file" / "model")
    with pytest.raises(ZooError, match=r"can't write below .*file"):
        build_cached("qwen2-vl", tmp_path / "file" / "zoo")


def test_cached_model_is_built_once(tmp_path: Path) -> None:
    first = build_cached("qwen2-vl", tmp_path)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert build_cached("qwen2-vl", tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert f"format{FORMAT_VERSION}" in first.name
    assert [p.name for p in tmp_path.iterdir()] == [first.name]  # no scratch directory stays


@pytest.mark.slow
def test_incomplete_directory_is_refused(tmp_path: Path) -> None:
    final = build_cached("qwen2-vl", tmp_path)
    (final / "zoo.json").unlink()
    with pytest.raises(ZooError, match="not a complete zoo model"):
        build_cached("qwen2-vl", tmp_path)


@pytest.mark.process
def test_import_is_cheap() -> None:
    code = "import sys, mmcache_tools.zoo; print(sorted({'torch', 'transformers', 'numpy', 'vllm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
