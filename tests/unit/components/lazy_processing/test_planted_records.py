# SPDX-License-Identifier: Apache-2.0
"""Entries that look right and are not of their image: who finds out, and what is known afterwards.

Each control is the entry that is the image's own.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.asking import png
from tests.unit.components.lazy_media.test_hooks import component, image_io
from tests.unit.components.lazy_media.test_restarts import is_known, restart
from tests.unit.components.lazy_processing.test_vllm_item_record import file_of, kinds_of, opened, processor_of
from vllm_mmcache.base import settings
from vllm_mmcache.components.lazy_media.hooks import RecordWrong
from vllm_mmcache.components.lazy_media.lazy_image import LazyImage
from vllm_mmcache.components.lazy_media.media_info import RECORDS, MediaInfo
from vllm_mmcache.components.lazy_processing.positions import guard_positions
from vllm_mmcache.components.lazy_processing.vllm_item import defer, is_deferred, small_fields
from vllm_mmcache.components.lazy_processing.vllm_item_record import digest_of, encode
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker, Refuted
from vllm_mmcache.components.lazy_processing.vllm_processor import inputs_of, process, updates_of
from vllm_mmcache.storage import record_store

SIZE = (200, 120)
OTHER = (96, 96)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


def deferred(zoo: Path, of: tuple[int, int], content: bytes) -> Any:
    """An item with the record of an image of that size, and these bytes."""
    processor = processor_of("qwen3-vl", zoo)
    media, _ = opened(file_of(*of, "RGB"))
    record = kinds_of("qwen3-vl", zoo).describe(process(processor, "image", media, {})[0])
    assert record is not None
    small = kinds_of("qwen3-vl", zoo).restore(record)
    updates = updates_of(processor, inputs_of(processor, "image", media, None, {}, {}), small)
    _, origin = opened(file_of(*of, "RGB"))
    return defer(small, "image", replace(origin, content=lambda: content), {}, digest_of(record, updates))


def maker_of(zoo: Path) -> PixelMaker:
    processor = processor_of("qwen3-vl", zoo)
    maker = PixelMaker(processor.info.ctx.model_config)
    maker._processor = processor
    return maker


def test_pixels_that_are_not_what_the_record_says(zoo: Path) -> None:
    maker, content = maker_of(zoo), file_of(*SIZE, "RGB")
    made = maker.make(deferred(zoo, SIZE, content))
    assert not is_deferred(made)
    assert maker.complete(deferred(zoo, SIZE, content)) == (made, True)
    assert encode(small_fields(made)) != encode(
        small_fields(maker.complete(deferred(zoo, OTHER, file_of(*OTHER, "RGB")))[0])
    )
    with pytest.raises(Refuted):
        maker.make(deferred(zoo, OTHER, content))
    assert maker.complete(deferred(zoo, OTHER, content)) == (made, False)


def test_a_step_goes_on_without_pixels(zoo: Path) -> None:
    blank, is_as_recorded = maker_of(zoo).complete(deferred(zoo, SIZE, b"no image"))
    assert not is_as_recorded
    assert not is_deferred(blank)
    with pytest.raises(Exception, match="image"):
        maker_of(zoo).make(deferred(zoo, SIZE, b"no image"))


@pytest.mark.parametrize(
    ("grid", "is_used"),
    [
        ((1, 8, 8), True),
        ((1, 3, 5), None),  # which no two models round alike
        ((1, 64, 64), False),
        ((-1, 8, 8), False),
        ((1, 8, -8), False),
        ((1, 2**30, 8), False),
    ],
)
def test_positions_of_a_grid(zoo: Path, grid: tuple[int, int, int], is_used: bool | None) -> None:
    """By Qwen3-VL's own code, of an image with 16 tokens."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    config = processor_of("qwen3-vl", zoo).info.ctx.model_config
    model = Qwen3VLForConditionalGeneration.__new__(Qwen3VLForConditionalGeneration)
    torch.nn.Module.__init__(model)
    model.config = config.hf_config
    item = deferred(zoo, (128, 128), file_of(128, 128, "RGB"))
    item["image_grid_thw"] = replace(item["image_grid_thw"], data=torch.tensor(grid))
    tokens = [5, *[config.hf_config.image_token_id] * 16, 6, 7]
    feature = MultiModalFeatureSpec(
        data=item, modality="image", identifier="x", mm_position=PlaceholderRange(offset=1, length=16)
    )
    text, _ = model.get_mrope_input_positions(tokens, [])
    stock = model.get_mrope_input_positions
    guard_positions(model, config)
    positions, delta = model.get_mrope_input_positions(tokens, [feature])
    assert positions.shape == text.shape
    assert 0 <= int(positions.min()) <= int(positions.max()) < 4 * config.max_model_len
    if is_used:
        assert torch.equal(positions, stock(tokens, [feature])[0])
        assert not torch.equal(positions, text)
    elif is_used is False:
        assert torch.equal(positions, text)
        assert delta == 0


@pytest.mark.parametrize("behind", [-1, 0], ids=["the table's last position", "one behind the table"])
def test_no_position_is_behind_the_table(zoo: Path, behind: int) -> None:
    """What a model's own code makes of fields that a store kept is an index into a table of this length."""
    config = processor_of("qwen3-vl", zoo).info.ctx.model_config
    most = 4 * max(config.hf_text_config.max_position_embeddings, config.max_model_len)
    found, text = torch.full((3, 4), most + behind), torch.arange(4).expand(3, 4)

    class Model:
        def get_mrope_input_positions(self, tokens: list[int], features: list[Any]) -> tuple[torch.Tensor, int]:
            return (found if features else text), 0

    model = Model()
    guard_positions(model, config)
    item = SimpleNamespace(data=deferred(zoo, SIZE, b""))
    assert model.get_mrope_input_positions([5, 6, 7, 8], [item])[0] is (found if behind else text)


def test_a_size_that_is_not_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for pixels is told, and the next one has the right size."""
    content = png(Image.new("RGB", SIZE, "red"))
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path)))
    with component():
        assert image_io({}).load_bytes(content).size == SIZE
        (record,) = RECORDS._entries.values()
        assert record.name is not None
        planted = MediaInfo(OTHER, "RGB", record.io_config).packed()
        assert planted is not None
        record_store.current().put(record.name, planted)
        restart()
        media = image_io({}).load_bytes(content)
        assert isinstance(media.media, LazyImage)
        assert media.size == OTHER
        with pytest.raises(RecordWrong, match="ask again"):
            media.media.load()
        restart()
        assert is_known(content)
        again = image_io({}).load_bytes(content)
        assert again.size == SIZE
        again.media.load()
    restart()


def test_a_record_beyond_what_vllm_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = png(Image.new("RGB", SIZE, "red"))
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path)))
    with component():
        image_io({}).load_bytes(content)
        (record,) = RECORDS._entries.values()
        planted = MediaInfo((20_000, 20_000), "RGB", record.io_config).packed()
        assert record.name is not None
        assert planted is not None
        record_store.current().put(record.name, planted)
        restart()
        assert image_io({}).load_bytes(content).size == SIZE
    restart()


def test_what_an_engine_refuted_is_processed_anew() -> None:
    from vllm_mmcache.components.lazy_processing.vllm_cache import MAX_REFUTED, PreparedItemCache

    cache = PreparedItemCache(None)
    assert not cache.is_refuted("image")
    cache.invalidate("image")
    assert cache.is_refuted("image")
    cache.trust("image")
    assert not cache.is_refuted("image")
    for number in range(2 * MAX_REFUTED):
        cache.invalidate(str(number))
    assert len(cache._refuted) == MAX_REFUTED
