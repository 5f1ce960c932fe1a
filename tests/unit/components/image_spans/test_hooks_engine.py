# SPDX-License-Identifier: Apache-2.0
"""What the scheduler makes of images, by vLLM's own functions on vLLM's own encoder cache."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.utils import get_mm_features_in_window as stock_window
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_mmcache.base import status
from vllm_mmcache.components.image_spans.hooks_engine import (
    BLOCKED,
    free_after_last_embedding,
    never_split_spans,
    skip_computed_images,
)
from vllm_mmcache.components.image_spans.spans import last_embedding


def test_an_image_is_left_out_of_a_window_only_when_its_last_embedding_is_computed(no_role: None) -> None:
    """Its range has text behind its embeddings; vLLM's own answer is the control."""
    is_embed = torch.tensor([False, True, True, True, False, False])
    features = [SimpleNamespace(mm_position=PlaceholderRange(offset=10, length=6, is_embed=is_embed))]
    last = last_embedding(features[0])
    assert last == 13
    found = {start: skip_computed_images(stock_window, None, (features, start, 20), {}) for start in range(9, 17)}
    assert [start for start, (lo, hi) in found.items() if lo < hi] == [9, 10, 11, 12, 13]
    assert stock_window(features, last + 1, 20) == (0, 1)


NUM_TOKENS = 64  # of an image, as in Gemma 3: two tokens of text before it and two behind


class Prefill:
    """One request with adjacent images, each of which begins on the last token of the one before; chunk by chunk."""

    def __init__(self, num_images: int, cache_size: int, lookahead: int, *, whole_items: bool) -> None:
        is_embed = torch.tensor([False] * 2 + [True] * NUM_TOKENS + [False] * 2)
        starts = [10 + number * (len(is_embed) - 1) for number in range(num_images)]
        self.num_tokens = starts[-1] + len(is_embed) + 20
        features = [
            SimpleNamespace(
                modality="image",
                identifier=f"image-{start}",
                mm_position=PlaceholderRange(offset=start, length=len(is_embed), is_embed=is_embed),
            )
            for start in starts
        ]
        self.request: Any = SimpleNamespace(
            request_id="request",
            mm_features=features,
            has_encoder_inputs=True,
            num_computed_tokens=0,
            num_output_placeholders=0,
            get_num_encoder_embeds=lambda index: NUM_TOKENS,
        )
        self.cache_size = cache_size
        self.scheduler: Any = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True)),
            is_encoder_decoder=False,
            ec_connector=None,
            num_prefill_lookahead=lookahead,
            scheduler_config=SimpleNamespace(disable_chunked_mm_input=whole_items),
            encoder_cache_manager=EncoderCacheManager(cache_size),
            encoder_cache_mismatch_reqs=set(),
        )
        for name in ("_free_encoder_input", "_allocate_encoder_inputs", "_reject_on_encoder_cache_embed_mismatch"):
            setattr(self.scheduler, name, partial(getattr(Scheduler, name), self.scheduler))

    def step(self, budget: int) -> int:
        """Compute what a step of so many tokens holds; how many these are."""

        def schedule(
            request: Any,
            num_computed_tokens: int,
            num_new_tokens: int,
            encoder_compute_budget: int,
            shift_computed_tokens: int = 0,
        ) -> Any:
            given = request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
            return Scheduler._try_schedule_encoder_inputs(self.scheduler, *given)

        setattr(self.scheduler, BLOCKED, None)
        request = self.request
        asked = min(budget, self.num_tokens - request.num_computed_tokens)
        shift = {"shift_computed_tokens": self.scheduler.num_prefill_lookahead}
        given = request, request.num_computed_tokens, asked, self.cache_size
        images, num_new_tokens, _, _, duplicates = never_split_spans(schedule, self.scheduler, given, shift)
        if num_new_tokens:
            self.scheduler._allocate_encoder_inputs(request, images, duplicates)
            request.num_computed_tokens += num_new_tokens
            free = partial(Scheduler._free_encoder_inputs, self.scheduler)
            free_after_last_embedding(lambda request: free(request), self.scheduler, (request,), {})
        return int(num_new_tokens)

    def steps(self, budgets: Sequence[int]) -> list[int]:
        """The tokens of several steps, up to the end of the prompt."""
        found = []
        for budget in budgets:
            if self.request.num_computed_tokens < self.num_tokens:
                found.append(self.step(budget))
        return found


@pytest.fixture
def spans_on(no_role: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status._is_on, "image_spans", True)
    window = partial(skip_computed_images, stock_window, None)
    monkeypatch.setattr(vllm_scheduler, "get_mm_features_in_window", lambda *args, **kwargs: window(args, kwargs))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("whole_items", [False, True])
def test_adjacent_images_in_an_encoder_cache_of_one_and_a_half(
    spans_on: None, lookahead: int, whole_items: bool
) -> None:
    """With a drafter that reads one token ahead, too: a chunk ends a token before the image that has no room."""
    prefill = Prefill(4, NUM_TOKENS * 3 // 2, lookahead, whole_items=whole_items)
    prefill.steps([256] * 12)
    assert prefill.request.num_computed_tokens == prefill.num_tokens


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("whole_items", [False, True])
def test_an_image_that_a_step_has_no_room_for_is_blocked(spans_on: None, lookahead: int, whole_items: bool) -> None:
    """A few tokens of text before it fit, and vLLM leaves these for the step with the image, too."""
    prefill = Prefill(1, NUM_TOKENS, lookahead, whole_items=whole_items)
    num_tokens = prefill.steps([10, 20, 20, 20])
    assert num_tokens[-1] == 0
    assert getattr(prefill.scheduler, BLOCKED) == "request"
    assert prefill.step(256) > NUM_TOKENS
    assert getattr(prefill.scheduler, BLOCKED) is None
