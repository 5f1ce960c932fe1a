# SPDX-License-Identifier: Apache-2.0
"""A record says what vLLM's processor makes of an item, and the item can be made again from what is sent in its place.

Every family, over random sizes, modes and arguments. The control is an item of another size.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmcache_tools.zoo import FAMILIES, build_cached
from PIL import Image

from tests.support.asking import png
from tests.support.sizes import scaled
from vllm_mmcache.components.lazy_media.vllm_source import load, source_of
from vllm_mmcache.components.lazy_processing.vllm_item import FIELD, defer, is_deferred, small_fields, undo
from vllm_mmcache.components.lazy_processing.vllm_item_record import Kinds, digest_of, encode, num_tokens_of
from vllm_mmcache.components.lazy_processing.vllm_processor import (
    Processed,
    inputs_of,
    process,
    process_blank,
    updates_of,
)

SIDES = st.integers(min_value=33, max_value=260)
MODES = st.sampled_from(["RGB", "L", "RGBA", "P"])
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "qwen3-vl": [{"max_pixels": 64 * 64 * 4}],
    "qwen2.5-vl": [{"max_pixels": 56 * 56 * 4}],
    "gemma3": [{"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32, "pan_and_scan_max_num_crops": 4}],
}

MAX_TOKENS = 2048

processors: dict[str, Any] = {}
kinds: dict[str, Kinds] = {}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


def processor_of(family: str, zoo: Path) -> Any:
    """vLLM's processor of a model of this family."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    if family not in processors:
        config = EngineArgs(str(build_cached(family, zoo)), max_model_len=MAX_TOKENS).create_model_config()
        processors[family] = MULTIMODAL_REGISTRY.create_processor(config)
    return processors[family]


def kinds_of(family: str, zoo: Path) -> Kinds:
    """What items of such a model look like."""
    if family not in kinds:
        item, updates = process_blank(processor_of(family, zoo), "image", MAX_TOKENS)
        kinds[family] = Kinds(item, num_tokens_of(updates), MAX_TOKENS)
    return kinds[family]


@cache
def file_of(width: int, height: int, mode: str) -> bytes:
    random = torch.Generator().manual_seed(width * 1000 + height)
    pixels = torch.randint(0, 256, (height, width, 3), generator=random, dtype=torch.uint8).numpy()
    return png(Image.fromarray(pixels).convert(mode))


def opened(content: bytes) -> tuple[Any, Any]:
    """What the API server opens, and the origin that it leaves on it."""
    from vllm.multimodal.media.image import ImageMediaIO

    loader = ImageMediaIO()
    return loader.load_bytes(content), source_of(loader, lambda: content)


def assert_same(one: Processed, other: Processed) -> None:
    (item, updates), (other_item, other_updates) = one, other
    assert item == other_item  # names, data bit for bit, kinds of fields
    assert len(updates) == len(other_updates)
    for mine, its in zip(updates, other_updates, strict=True):
        assert replace(mine, content=its.content) == its
        assert mine.content.full == its.content.full
        masks = [content.is_embed and content.is_embed(content.full) for content in (mine.content, its.content)]
        assert (masks[0] is None and masks[1] is None) or torch.equal(*masks)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=scaled(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(width=SIDES, height=SIDES, mode=MODES, data=st.data())
def test_a_record_is_what_the_processor_gives(
    zoo: Path, family: str, width: int, height: int, mode: str, data: Any
) -> None:
    processor = processor_of(family, zoo)
    arguments = data.draw(st.sampled_from([{}, *ARGUMENTS.get(family, [])]))
    media, origin = opened(file_of(width, height, mode))
    item, updates = process(processor, "image", media, arguments)
    record = kinds_of(family, zoo).describe(item)
    assert record is not None
    assert len(record) < 1200
    small = kinds_of(family, zoo).restore(record)
    restored = updates_of(processor, inputs_of(processor, "image", media, None, arguments, {}), small)
    assert_same((small, restored), (small_fields(item), updates))
    assert len(small) < len(item)
    deferred = defer(small, "image", origin, arguments, digest_of(record, restored))
    assert is_deferred(deferred)
    assert not is_deferred(item)
    modality, sent, given_arguments, digest = undo(deferred)
    made = process(processor, modality, load(sent), given_arguments)
    assert_same(made, (item, updates))
    assert digest_of(encode(small_fields(made[0])), made[1]) == digest


def test_another_size_has_another_record(zoo: Path) -> None:
    processor = processor_of("qwen3-vl", zoo)
    made = [process(processor, "image", opened(file_of(*size, "RGB"))[0], {}) for size in ((64, 64), (64, 128))]
    first, second = (kinds_of("qwen3-vl", zoo).describe(item) for item, _ in made)
    assert first is not None
    assert second is not None
    assert first != second
    assert digest_of(first, made[0][1]) != digest_of(first, made[1][1]) != digest_of(second, made[1][1])
    with pytest.raises(AssertionError):
        assert_same(*made)


def test_what_can_not_be_said_has_no_record(zoo: Path) -> None:
    kinds = kinds_of("qwen3-vl", zoo)
    item, _ = process(processor_of("qwen3-vl", zoo), "image", opened(file_of(64, 64, "RGB"))[0], {})
    assert kinds.describe(item) is not None
    assert kinds.describe(small_fields(item)) is None  # nothing would be left out
    unlike = replace(item["image_grid_thw"], data=item["image_grid_thw"].data.to(torch.int32))
    assert kinds.describe(type(item)({**item, "image_grid_thw": unlike})) is None
    assert kinds.describe(type(item)({**item, "another": item["image_grid_thw"]})) is None


def test_it_travels_as_any_item(zoo: Path) -> None:
    """Through vLLM's serialisation to the engine, and its digest of sizes for its caches."""
    from vllm.multimodal.cache.base import MultiModalCache
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    processor, content = processor_of("qwen3-vl", zoo), file_of(200, 120, "RGB")
    media, origin = opened(content)
    item, _ = process(processor, "image", media, {})
    deferred = defer(small_fields(item), "image", origin, {}, b"")
    arrived = MsgpackDecoder(MultiModalKwargsItem).decode(MsgpackEncoder().encode(deferred))
    assert arrived == deferred
    assert undo(arrived)[1].content() == content
    assert MultiModalCache.get_item_size(arrived) == MultiModalCache.get_item_size(deferred)
    assert len(content) < MultiModalCache.get_item_size(deferred) < MultiModalCache.get_item_size(item)
    assert FIELD in arrived


def test_a_client_can_not_send_one(zoo: Path) -> None:
    """An item that comes ready-made has its pixels, or is refused before it reaches the engine."""
    from vllm_mmcache.components.lazy_processing.vllm_cache import PreparedItemCache

    media, origin = opened(file_of(64, 64, "RGB"))
    item, _ = process(processor_of("qwen3-vl", zoo), "image", media, {})
    cache = PreparedItemCache(None)
    cache.validate_input_item(item, "a name")
    with pytest.raises(ValueError, match="must have its pixels"):
        cache.validate_input_item(defer(small_fields(item), "image", origin, {}, b""), "a name")


def test_arguments_that_json_would_change(zoo: Path) -> None:
    media, origin = opened(file_of(64, 64, "RGB"))
    item, _ = process(processor_of("qwen3-vl", zoo), "image", media, {})
    defer(small_fields(item), "image", origin, {"max_pixels": 4096}, b"")
    wrong: tuple[Any, ...] = ({"size": (1, 2)}, {1: 2}, {"device": media})
    for arguments in wrong:
        with pytest.raises(TypeError):
            defer(small_fields(item), "image", origin, arguments, b"")
