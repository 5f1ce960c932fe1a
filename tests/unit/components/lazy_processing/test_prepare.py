# SPDX-License-Identifier: Apache-2.0
"""What the renderer makes ready of a request, without an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.components.lazy_media.test_hooks import image_io
from tests.unit.components.lazy_media.test_vllm_source import GOOD
from tests.unit.components.lazy_media.video.test_hooks import FILE, video_io, videos_component
from tests.unit.components.lazy_processing.test_vllm_item_record import processor_of
from vllm_mmcache.base import settings, status
from vllm_mmcache.components.lazy_media.video.vllm_video import KnownVideo
from vllm_mmcache.components.lazy_processing.prepare import ItemPreparer, ItemRequest, _asked, may_defer


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known, and all that items go to the engine without pixels for is on."""
    monkeypatch.setattr(status, "is_on", lambda component: True)
    monkeypatch.setattr(status, "is_on_everywhere", lambda component: True)
    with videos_component():
        yield


@pytest.fixture
def preparer(family: str, zoo: Path) -> Iterator[ItemPreparer]:
    """What the renderer of a family's model has."""
    processor = processor_of(family, zoo)
    preparer = ItemPreparer(processor, processor.info.ctx.model_config, None)
    yield preparer
    preparer.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-vl", "glm4v", "internvl", "minicpm-v", "gemma4"])
@pytest.mark.usefixtures("installed")
def test_known_videos_are_not_decoded_for_their_placeholders(preparer: ItemPreparer) -> None:
    """Some models ask for the frames, and only count and measure them."""
    seen = []
    for _ in range(2):
        video = video_io({}).load_bytes(FILE)
        assert isinstance(video, KnownVideo)
        assert preparer._make_ready(ItemRequest("video", video, None, {}, {}), preparer.cache) is not None
        seen.append((video.processor, video.frames.is_decoded))
    assert seen == [("run", True), ("deferred", False)]


ARGUMENTS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    # name -> (arguments, how many videos, which of them can be prepared)
    "none": ({}, 2, [0, 1]),
    "one for all": ({"fps": 1.0, "videos_kwargs": {"num_frames": 4}}, 2, [0, 1]),
    "another list": ({"size": [1, 2]}, 2, [0, 1]),
    "no arguments of videos": ({"videos_kwargs": [1.0, 4.0]}, 2, [0, 1]),
    "one video": ({"fps": [1.0]}, 1, [0]),
    "fps": ({"fps": [1.0, 4.0]}, 2, []),
    "num_frames": ({"num_frames": [2, 4]}, 2, []),
    "in videos_kwargs": ({"videos_kwargs": {"fps": [1.0, 4.0]}}, 2, []),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_videos_with_arguments_of_their_own_are_left_to_vllm(name: str) -> None:
    """Alone, each would be processed with those of the first one. Images of the same request are prepared."""
    arguments, num_videos, prepared = ARGUMENTS[name]
    videos = [video_io({}).load_bytes(FILE) for _ in range(num_videos)]
    image = image_io({}).load_bytes(GOOD["png"])
    data = {"video": videos, "image": [image]}
    found = [one.media for one in _asked({"mm_data": data, "mm_processor_kwargs": arguments})]
    assert found == [*(videos[index] for index in prepared), image]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("chosen", "is_kept"),
    [
        ({}, True),
        ({"feature_ram_bytes": 0}, False),
        ({"feature_ram_bytes": 0, "store": "/features"}, True),
        ({"feature_ram_bytes": 0, "store": "/features", "store_disk_bytes": 0}, False),
        ({"feature_ram_bytes": 0, "store": "redis://cache:6379"}, True),
        ({"feature_ram_bytes": 0, "store": "/features redis://cache:6379", "store_disk_bytes": 0}, True),
    ],
    ids=str,
)
def test_pixels_are_left_out_only_where_features_are_kept(
    chosen: dict[str, Any], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(**chosen))
    assert may_defer() == is_kept
