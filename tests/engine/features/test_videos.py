# SPDX-License-Identifier: Apache-2.0
"""The vision tower runs once per video on real engines, and every answer is that of a cold run and of stock.

Negative controls: spoiled features spoil the answer, and a changed frame, fps or number of frames runs the tower.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mmcache_tools.harness import videos
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.tolerances import assert_equals_answer
from mmcache_tools.zoo import FIRST_FAMILIES, MORE_FAMILIES

from tests.support.films import Part, assert_as_cold, chat, file_of, frames_of, part, takes_videos, that_take_videos
from tests.support.sizes import larger
from tests.support.store_server import Put
from tests.support.tiers import LONG_S
from tests.support.towers import Runs, features_by_image, spoil
from vllm_mmcache.exactness.answers import Inexact
from vllm_mmcache.exactness.conversations import picture

pytestmark = pytest.mark.engine

ON_EVERY_ENGINE = ("qwen3-vl", "qwen3.5")
IN_CI = (*ON_EVERY_ENGINE, "qwen2.5-vl", "glm4v")


def engines(*families: str) -> list[Any]:
    def marks(name: str) -> list[Any]:
        return [pytest.mark.any_engine] * (name in ON_EVERY_ENGINE) + [larger] * (name not in IN_CI)

    return [pytest.param(takes_videos(name), id=name, marks=marks(name)) for name in families]


QWEN = engines("qwen3-vl")
TWO = engines(*ON_EVERY_ENGINE)
FIRST = engines(*that_take_videos(FIRST_FAMILIES))
ALL = engines(*that_take_videos([*FIRST_FAMILIES, *MORE_FAMILIES]))


@pytest.mark.parametrize("config", ALL)
def test_the_tower_runs_once_per_video(pool: EnginePool, config: EngineConfig, put: Put) -> None:
    """A file and frames; the second question finds the features, and both answers are those of stock."""
    rig, runs = pool.get(config), Runs()
    films = file_of("video 1"), frames_of("video 2")
    answers = []
    for film in films:
        answers.append(chat(rig, film))
        assert runs.new() == 1
        rig.forget_all_but_features()
        second = chat(rig, film, question="And at its end?")
        assert runs.new() == 0
        assert second.num_cached_tokens == 0
        assert_as_cold(rig, second, film, question="And at its end?")
        runs.new()
    put(features=False, lazy_media=False)
    for film, answer in zip(films, answers, strict=True):
        assert_as_cold(rig, answer, film)
        assert runs.new() == 1


@pytest.mark.parametrize("config", TWO)
def test_spoiled_features_are_noticed(pool: EnginePool, config: EngineConfig) -> None:
    """Negative control: features that are not those of the video give another answer."""
    rig, film = pool.get(config), file_of("video 3")
    chat(rig, film)
    assert spoil(rig) == 1
    rig.forget_all_but_features()
    wrong = chat(rig, film)
    with pytest.raises(Inexact):
        assert_as_cold(rig, wrong, film)


def changed_frame(rig: ZooRig, patched: pytest.MonkeyPatch) -> Part:
    frames = videos.frames("video 4", 6)
    return part("video/jpeg", videos.jpegs([*frames[:3], frames[0], *frames[4:]]))


def loading(**options: Any) -> Callable[[ZooRig, pytest.MonkeyPatch], Part]:
    """As with other --media-io-kwargs, or those of a request: the bytes are the same."""

    def change(rig: ZooRig, patched: pytest.MonkeyPatch) -> Part:
        patched.setattr(rig.vllm_config.model_config.multimodal_config, "media_io_kwargs", {"video": options})
        return frames_of("video 4")

    return change


@pytest.mark.parametrize(
    "change", [changed_frame, loading(num_frames=4), loading(fps=3)], ids=["a frame", "num_frames", "fps"]
)
@pytest.mark.parametrize("config", TWO)
def test_another_video_runs_the_tower(
    pool: EnginePool,
    config: EngineConfig,
    change: Callable[[ZooRig, pytest.MonkeyPatch], Part],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, runs, film = pool.get(config), Runs(), frames_of("video 4")
    first = chat(rig, film)
    assert runs.new() == 1
    with monkeypatch.context() as patched:
        other = change(rig, patched)
        second = chat(rig, other)
        assert runs.new() == 1
        assert_as_cold(rig, second, other)
    assert_as_cold(rig, first, film)


@pytest.mark.parametrize("options", [{"num_frames": 5, "fps": 1}, {"fps": 4, "num_frames": 12}], ids=str)
@pytest.mark.parametrize("config", QWEN)
def test_other_frames_of_the_same_file_run_the_tower(
    pool: EnginePool, config: EngineConfig, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, runs, film = pool.get(config), Runs(), file_of("video 5", 32, 8.0)
    chat(rig, film)
    assert runs.new() == 1
    monkeypatch.setattr(rig.vllm_config.model_config.multimodal_config, "media_io_kwargs", {"video": options})
    second = chat(rig, film)
    assert runs.new() == 1
    assert_as_cold(rig, second, film)


@pytest.mark.parametrize("config", FIRST)
def test_images_and_videos_in_one_batch(pool: EnginePool, config: EngineConfig) -> None:
    """Of one request, some known and some not; a picture beside a video is not mistaken for one."""
    rig, runs = pool.get(config), Runs()
    image: Part = {"type": "image_pil", "image_pil": picture(560)}
    films = [file_of("video 6"), frames_of("video 7")]
    chat(rig, films[0])
    rig.forget_all_but_features()
    runs.new()
    first = chat(rig, image, *films)
    assert runs.new() == 2
    rig.forget_all_but_features()
    second = chat(rig, *films, image)
    assert runs.new() == 0
    assert_as_cold(rig, first, image, *films)
    assert_as_cold(rig, second, *films, image)


@pytest.mark.parametrize("config", TWO)
def test_a_hit_that_ends_inside_the_video(pool: EnginePool, config: EngineConfig) -> None:
    """Its placeholder holds text between the frames: what is taken of the features must follow."""
    rig, runs, film = pool.get(config), Runs(), file_of("video 8", 32, 8.0, (224, 224))
    first = chat(rig, film)
    assert runs.new() == 1
    rig.llm.llm_engine.reset_encoder_cache()
    assert rig.features.wait_until_known(60)
    second = chat(rig, film, question="And who is it?")
    assert runs.new() == 0
    if rig.keeps_all_kv:
        assert second.num_cached_tokens > 0
    assert_as_cold(rig, first, film)
    assert_as_cold(rig, second, film, question="And who is it?")


@pytest.mark.parametrize("family", ON_EVERY_ENGINE)
def test_a_restart_with_a_filled_disk(alone: EnginePool, put: Put, tmp_path: Path, family: str) -> None:
    put(store=str(tmp_path))
    config, film = takes_videos(family), file_of("video 9")
    first = alone.get(config)
    before = chat(first, film)
    saved = features_by_image(first)
    assert first.features.flush(LONG_S)
    alone.close()
    second, runs = alone.get(config), Runs()
    after = chat(second, film)
    assert runs.new() == 0
    found = features_by_image(second)
    assert found.keys() == saved.keys()
    assert all(torch.equal(features, saved[name]) for name, features in found.items())
    assert_equals_answer(after, before, second.tolerance, "before")
    assert_as_cold(second, after, film)
