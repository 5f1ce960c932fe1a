# SPDX-License-Identifier: Apache-2.0
"""What a step can hold, at every limit and one below it; and whose turn it is. Pure."""

import pytest

from vllm_mmcache.components.image_spans.limits import Item, Limit, Limits, why_never
from vllm_mmcache.components.image_spans.waiting import FIRST_PATIENCE, LAST_PATIENCE, Waiting

pytestmark = pytest.mark.answers

IMAGES = [Item(8, 68, 64, "a"), Item(75, 68, 64, "b")]  # the second range begins on the last token of the first
SPANS = [(10, 73), (77, 140)]
WIDE = Limit("max_num_batched_tokens", 4096)


@pytest.mark.parametrize("setting", ["max_num_batched_tokens", "max_num_scheduled_tokens"])
@pytest.mark.parametrize("reserved", [0, 3])
def test_each_limit_of_a_step(setting: str, reserved: int) -> None:
    needed = 64 + reserved
    for value in (needed, needed + 1):
        assert why_never(SPANS, IMAGES, Limits((WIDE, Limit(setting, value, reserved)), 4096)) == ""
    reason = why_never(SPANS, IMAGES, Limits((WIDE, Limit(setting, needed - 1, reserved)), 4096))
    assert reason == (
        f"image 1 of 2 has 64 tokens that must be computed in one step: {setting} is {needed - 1}, needed are {needed}"
    )


def test_all_settings_that_are_too_small_are_named() -> None:
    spans = [(10, 13), (77, 140)]
    reason = why_never(spans, IMAGES, Limits((Limit("a", 63), WIDE, Limit("c", 4)), 4096))
    assert reason.startswith("image 2 of 2 has 64 tokens")
    assert reason.endswith("a is 63, needed are 64; c is 4, needed are 64")


def test_a_request_without_images_always_fits() -> None:
    assert why_never([], [], Limits((Limit("a", 1),), 0, 2, 2)) == ""


def test_items_of_one_span_share_the_encoder_cache() -> None:
    """Each alone has room; a span over both, as where the whole prompt attends both ways, needs both at once."""
    assert why_never(SPANS, IMAGES, Limits((WIDE,), 64)) == ""
    assert why_never([(8, 200)], IMAGES, Limits((WIDE,), 128)) == ""
    assert "128 embeddings together" in why_never([(8, 200)], IMAGES, Limits((WIDE,), 127))
    again = [IMAGES[0], Item(75, 68, 64, "a")]
    assert why_never([(8, 200)], again, Limits((WIDE,), 64)) == ""


def test_a_drafter_that_reads_ahead_into_the_next_item() -> None:
    assert why_never(SPANS, IMAGES, Limits((WIDE,), 64, lookahead=1)) == ""  # a token of text lies between
    assert "encoder cache" in why_never(SPANS, IMAGES, Limits((WIDE,), 64, lookahead=2))


def test_whole_items() -> None:
    for extra in (0, 1):
        assert why_never(SPANS, IMAGES, Limits((Limit("a", 68 + extra),), 4096, whole_items=extra)) == ""
        reason = why_never(SPANS, IMAGES, Limits((Limit("a", 67 + extra),), 4096, whole_items=extra))
        assert reason.startswith("image 1 of 2 has 68 tokens with the text in its placeholder, which disable_chunked")
    assert why_never(SPANS, IMAGES, Limits((Limit("a", 67),), 4096)) == ""


def test_the_sliding_window_bounds_spans_and_not_the_item_that_they_are_in() -> None:
    """A video is one item with a span for each frame, and text between these."""
    spans = [(78 * frame + 8, 78 * frame + 77) for frame in range(32)]
    video = [Item(0, 32 * 78, 32 * 70, "v")]
    for window, fits in (70, True), (69, False):
        steps = Limit("a", 8192), Limit("window", window, is_of_spans=True)
        assert (why_never(spans, video, Limits(steps, 8192, 1, 1)) == "") is fits


def blocked(waiting: Waiting, request_id: str, steps: int) -> None:
    for _ in range(steps):
        assert not waiting.is_due()
        waiting.stepped(request_id, {"decode"})


def test_a_turn_comes_after_a_few_steps() -> None:
    waiting = Waiting()
    waiting.stepped(None, {"decode"})
    blocked(waiting, "image", FIRST_PATIENCE)
    assert waiting.is_due()
    waiting.stepped(None, {"image"})
    assert waiting.request_id == ""
    blocked(waiting, "image", FIRST_PATIENCE)
    assert waiting.is_due()


def test_patience_grows_where_a_turn_does_not_help() -> None:
    waiting, patience = Waiting(), FIRST_PATIENCE
    waiting.stepped("image", ())
    blocked(waiting, "image", patience - 1)
    for _ in range(8):
        assert waiting.is_due()
        patience = min(2 * patience, LAST_PATIENCE)
        waiting.stepped("image", ())
        blocked(waiting, "image", patience - 1)
    assert patience == LAST_PATIENCE


def test_another_request_starts_anew() -> None:
    waiting = Waiting()
    blocked(waiting, "image", FIRST_PATIENCE)
    waiting.stepped("other", ())
    blocked(waiting, "other", FIRST_PATIENCE - 1)
    assert waiting.is_due()


def test_a_step_that_did_not_try_changes_nothing() -> None:
    waiting = Waiting()
    blocked(waiting, "image", FIRST_PATIENCE - 1)
    waiting.stepped(None, {"decode"})
    assert not waiting.is_due()
    waiting.stepped("image", ())
    assert waiting.is_due()
