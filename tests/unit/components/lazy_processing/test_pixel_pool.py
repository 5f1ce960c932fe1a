# SPDX-License-Identifier: Apache-2.0
"""Whose pixels the engine makes, how often, and for how many images before their turn."""

import gc

import pytest

from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.components.lazy_processing import pixel_pool
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker


def test_of_many_images_that_wait_no_more_pixels_are_made_ahead() -> None:
    """As long as somebody holds them, whether they are made or still to be made; here nobody can make them."""
    pixels = pixel_pool.Pixels(model_config=None)
    try:
        waiting: list[pixel_pool.PixelFuture] = []
        while pixels.may_begin_ahead and len(waiting) < 1000:
            making = pixels.begin(None, 16, f"image-{len(waiting)}")
            assert making is not None
            waiting.append(making)
        del making
        assert len(waiting) == pixel_pool.MOST_AHEAD
        assert all(making.exception(timeout=60) for making in waiting)
        assert not pixels.may_begin_ahead
        waiting.pop()
        gc.collect()
        assert pixels.may_begin_ahead
    finally:
        pixels.close()


def test_who_asks_for_the_same_item_shares_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody has them; what nobody could make is tried again."""
    calls: list[object] = []

    def make(self: PixelMaker, item: object) -> object:
        calls.append(item)
        if item == "broken":
            raise OSError("nothing to decode with")
        return f"pixels of {item}"

    monkeypatch.setattr(PixelMaker, "make", make)
    pixels = pixel_pool.Pixels(model_config=None)
    try:
        first, second, other = (pixels.begin("item", 16, name) for name in ("a", "a", "b"))
        assert first is second
        assert [one and one.result(60) for one in (first, other)] == ["pixels of item"] * 2
        assert len(calls) == 2
        broken = pixels.begin("broken", 16, "c")
        assert broken is not None
        assert broken.exception(60)
        assert pixels.begin("broken", 16, "c") is not broken
    finally:
        pixels.close()


def test_where_nobody_has_time_it_is_to_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = pixel_pool.Pixels(model_config=None)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Threads, "submit", lambda self, job: False)
            assert pixels.begin("item", 16, "a") is None
        assert pixels.begin("item", 16, "a") is not None
    finally:
        pixels.close()
