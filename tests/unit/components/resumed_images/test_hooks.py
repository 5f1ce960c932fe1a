# SPDX-License-Identifier: Apache-2.0
"""What a worker makes of image inputs that come along with a resumed request."""

from types import SimpleNamespace
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData

from vllm_mmcache.components.resumed_images.hooks import receive_images


def test_images_that_were_not_sent_again_stay_where_they_are() -> None:
    """A resumed request has its first image in its hit, and its second one is sent along."""
    first, second, again = (MultiModalFeatureSpec(None, "image", name, PlaceholderRange(0, 4)) for name in "abb")
    state = SimpleNamespace(mm_features=[first, second])
    step = CachedRequestData.make_empty()
    step.mmcache_images = {"request": {1: again}, "one that has ended": {0: again}}

    def update(scheduler_output: Any) -> list[Any]:
        return list(state.mm_features)

    runner, output = SimpleNamespace(requests={"request": state}), SimpleNamespace(scheduled_cached_reqs=step)
    kept, sent = receive_images(update, runner, (output,), {})
    assert kept is first
    assert sent is again
