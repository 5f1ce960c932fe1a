# SPDX-License-Identifier: Apache-2.0
"""How many images of requests that wait have their pixels made before their turn."""

import gc

from vllm_mmcache.components.lazy_processing import pixel_pool


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
