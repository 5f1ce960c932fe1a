# SPDX-License-Identifier: Apache-2.0
"""A known image goes to the engine without its pixels, which are made only where the tower needs them.

Every answer is that of a cold run, and of Transformers.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.tolerances import assert_equals_answer
from mmcache_tools.zoo import FAMILIES

from tests.engine.lazy_media.test_videos import Decoded
from tests.support.asking import Asking, Work, finish_reasons, forget_processed
from tests.support.films import Part, chat, file_of, frames_of, takes_videos
from vllm_mmcache.components.features.engine.vllm_connector import Connector
from vllm_mmcache.components.lazy_media.media_info import RECORDS
from vllm_mmcache.components.lazy_media.video.video_info import VIDEOS
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker
from vllm_mmcache.exactness.conversations import assistant, filler, picture, user
from vllm_mmcache.storage import record_store

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

CONFIGS = [pytest.param(EngineConfig(family), id=family) for family in FAMILIES]
ONE = pytest.mark.parametrize("config", [pytest.param(EngineConfig("qwen3-vl"), id="qwen3-vl")])


@pytest.fixture(autouse=True)
def unknown() -> None:
    """Nothing is known of any image."""
    record_store.current().clear()


@pytest.mark.parametrize("config", CONFIGS)
def test_pixels_are_made_only_for_the_tower(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    asking = Asking(rig)
    talk = [user(filler(60), picture(730), "and", picture(731, (300, 160)), "Compare.")]
    assert asking.ask(talk) == Work(processed=2, tower=2)
    rig.forget_all_but_features()
    assert asking.ask(talk) == Work(deferred=2)
    rig.make_cold()
    assert asking.ask(talk) == Work(deferred=2, made=2, tower=2)
    talk += [assistant(asking.answers[0].text), user("And this one?", picture(732), "Well?")]
    forget_processed(rig)
    assert asking.ask(talk) == Work(deferred=2, processed=1, tower=1)
    rig.assert_exact(asking.answers)


@ONE
def test_what_is_cached_by_vllm_is_not_deferred(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    asking = Asking(rig)
    talk = [user(picture(733), "What is it?")]
    asking.ask(talk)
    assert asking.ask(talk) == Work()
    rig.forget_all_but_features()
    assert asking.ask(talk) == Work(deferred=1)
    assert asking.ask(talk) == Work()  # what vLLM has now is the deferred item
    rig.make_cold()
    asking.ask(talk)
    rig.assert_exact(asking.answers)


@ONE
def test_features_that_went_away_cost_time_alone(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = pool.get(config)
    asking = Asking(rig)
    talk = [user(picture(734), "What is it?", picture(735), "And that?")]
    asking.ask(talk)
    rig.make_cold()
    # The engine takes them for there, so that the request goes on: as if they were evicted in the same moment.
    monkeypatch.setattr(Connector, "_needs_pixels", lambda self, wanted: False)
    monkeypatch.setattr(Connector, "_is_in_ram", lambda self, wanted: True)
    assert asking.ask(talk) == Work(deferred=2, made=2, late=2, tower=2)
    rig.assert_exact(asking.answers)


@ONE
def test_kv_needs_no_pixels(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    asking = Asking(rig)
    talk = [user(filler(60), picture(736), filler(60))]
    asking.ask(talk)
    rig.features.store.ram.clear()
    forget_processed(rig)
    assert asking.ask(talk) == Work(deferred=1)
    assert asking.answers[-1].num_cached_tokens > rig.image_spans(asking.answers[-1])[0][1]
    rig.llm.reset_prefix_cache()  # the control: with neither, they are made
    forget_processed(rig)
    rig.llm.llm_engine.reset_encoder_cache()
    assert asking.ask(talk) == Work(deferred=1, made=1, tower=1)
    rig.assert_exact(asking.answers)


@ONE
def test_arguments_and_tenants_have_records_of_their_own(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    asking = Asking(rig)
    talk = [user(picture(737), "What is it?")]
    assert asking.ask(talk) == Work(processed=1, tower=1)
    forget_processed(rig)
    small: dict[str, Any] = {"mm_processor_kwargs": {"max_pixels": 48 * 48}}
    assert asking.ask(talk, **small) == Work(processed=1, tower=1)
    assert asking.ask(talk, salt="a tenant") == Work(processed=1, tower=1)
    forget_processed(rig)
    assert asking.ask(talk, salt="a tenant") == Work(deferred=1)
    assert asking.ask(talk, salt="another") == Work(processed=1, tower=1)
    rig.make_cold()
    assert asking.ask(talk, **small) == Work(deferred=1, made=1, tower=1)
    assert asking.answers[-1].token_ids == asking.answers[1].token_ids
    assert len(asking.answers[1].prompt_ids) != len(asking.answers[0].prompt_ids)


@ONE
def test_pixels_that_can_not_be_made_fail_their_request_alone(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = pool.get(config)
    asking = Asking(rig)
    talk, other = [user(picture(738), "What is it?")], [user(picture(739), "What is it?")]
    asking.ask(talk)
    rig.make_cold()

    def broken(self: PixelMaker, item: object) -> None:
        raise OSError("nothing to decode with")

    with monkeypatch.context() as patched:
        patched.setattr(PixelMaker, "make", broken)
        # Also where vLLM has set up its loggers since the test began, as it does with the first engine.
        patched.setattr(logging.getLogger("vllm.mmcache"), "handlers", [caplog.handler])
        assert finish_reasons(rig, talk, other) == ["error", "length"]
    assert "the pixels of an image can't be made: nothing to decode with" in caplog.text
    # The server forgets what it knew of the image, and processes it anew.
    assert asking.ask(talk, other) == Work(deferred=1, processed=2, tower=2)
    rig.assert_exact(asking.answers)


@ONE
def test_images_with_names_of_their_own(pool: EnginePool, config: EngineConfig) -> None:
    """A uuid is an alias: the image has one record, whatever the client calls it."""
    rig = pool.get(config)
    asking = Asking(rig)
    talk = [user(picture(740), "What is it?")]
    assert asking.ask(talk, multi_modal_uuids={"image": ["one"]}) == Work(processed=1, tower=1)
    forget_processed(rig)
    assert asking.ask(talk, multi_modal_uuids={"image": ["another"]}) == Work(deferred=1)
    forget_processed(rig)
    assert asking.ask(talk) == Work(deferred=1)
    rig.assert_exact(asking.answers)


@pytest.mark.parametrize(
    "config", [pytest.param(takes_videos(family), id=family) for family in ("qwen3-vl", "qwen3.5", "glm4v")]
)
@pytest.mark.parametrize("make", [file_of, frames_of], ids=["file", "frames"])
def test_videos(pool: EnginePool, config: EngineConfig, make: Callable[..., Part]) -> None:
    """They go without their frames, too, also after a restart; other frames are another video."""
    rig, name = pool.get(config), f"pixels of {config.family}"
    asking, decoded = Asking(rig), Decoded()
    cold = chat(rig, make(name))
    assert (asking.work(), decoded.new()) == (Work(processed=1, tower=1), 1)
    RECORDS.clear()
    VIDEOS.clear()  # as a restart does; records are kept elsewhere, too
    rig.forget_all_but_features()
    warm = chat(rig, make(name))
    assert (asking.work(), decoded.new()) == (Work(deferred=1), 0)
    rig.make_cold()
    late = chat(rig, make(name))
    assert asking.work() == Work(deferred=1, made=1, tower=1)
    for answer in (warm, late):
        assert_equals_answer(answer, cold, rig.tolerance, "the cold run")
    other = chat(rig, make(name, num_frames=4))
    assert asking.work() == Work(processed=1, tower=1)
    assert other.prompt_ids != cold.prompt_ids
