# SPDX-License-Identifier: Apache-2.0
"""What checkpoints cost and bring on vLLM's own scheduler with Mamba groups, by counts of steps, runs and tokens.

Each workload is also put to stock's scheduler, which has the same steps but for those that checkpoints add.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from tests.support.schedulers import BLOCK, Steps
from vllm_mmcache.components.image_checkpoints.expected_value import FORGOTTEN_AFTER, TRIED
from vllm_mmcache.components.image_checkpoints.positions import START
from vllm_mmcache.components.image_checkpoints.vllm_planner import Checkpoints

pytestmark = [pytest.mark.answers, pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_installed", "no_role")]

SYSTEM = [3] * 10
IMAGE_TOKENS = 1200
QUESTION_TOKENS = 40
END = (len(SYSTEM) + IMAGE_TOKENS) // BLOCK * BLOCK

Ask = tuple[int, int]
"""The number of an image and of a question about it."""


@dataclass
class Counted:
    """By request: steps, images of each run of the tower, and tokens of the prefix hit."""

    steps: list[int] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


def put(engine: Steps, asks: Iterable[Ask], salt: str | None = None) -> Counted:
    found = Counted()
    for image, question in asks:
        tokens = [*SYSTEM, *[9] * IMAGE_TOKENS, *[1000 * question + image + 50] * QUESTION_TOKENS]
        request = engine.add(tokens, [(f"image {image}", len(SYSTEM), IMAGE_TOKENS)], max_tokens=1, salt=salt)
        outputs = engine.finish()
        found.steps.append(len(outputs))
        found.runs.append([len(output.scheduled_encoder_inputs.get(request.request_id, [])) for output in outputs])
        found.cached.append(outputs[0].scheduled_new_reqs[0].num_computed_tokens)
    return found


def unique(number: int, first: int = 1000) -> list[Ask]:
    return [(first + image, 0) for image in range(number)]


def extra(ours: Counted, stock: Counted) -> list[int]:
    return [one - other for one, other in zip(ours.steps, stock.steps, strict=True)]


Engine = Callable[..., Steps]


def test_unique_pictures_pay_no_more_than_a_probe_however_large_the_cache(engine: Engine) -> None:
    stock = put(engine("mamba", with_plugin=False), unique(150))
    found = [put(engine("mamba", num_blocks=blocks), unique(150)) for blocks in (20_000, 200_000)]
    more = extra(found[0], stock)
    print(more)
    assert sum(more) <= FORGOTTEN_AFTER
    assert not any(more[FORGOTTEN_AFTER:])
    assert found[0] == found[1], "ten times the cache"


@pytest.mark.parametrize("order", ["by image", "by question"])
def test_the_second_question_is_a_hit_from_the_start(engine: Engine, order: str) -> None:
    asks = [(image, question) for image in range(20) for question in range(2)]
    asks = sorted(asks, key=lambda ask: ask[order == "by question"])
    ours = put(engine("mamba"), asks)
    best = [END * (question > 0) for _, question in asks]
    assert ours.cached == best
    stock = put(engine("mamba", with_plugin=False), asks)
    assert sum(stock.cached) == 0, "the control"
    assert sum(ours.steps) <= sum(stock.steps) + 20


def test_phases_switch_in_both_directions(engine: Engine) -> None:
    running = engine("mamba")
    put(running, unique(100))
    twice = [(image, question) for image in range(40) for question in range(2)]
    found = put(running, twice)
    assert found.cached[41::2] == [END] * 20, "reused again, after 40 requests"
    assert found.cached[1] == 0, "the control: the first one was not made"
    stock = put(engine("mamba", with_plugin=False), unique(100, 5000))
    running = engine("mamba")
    put(running, twice)
    more = extra(put(running, unique(100, 5000)), stock)
    assert not any(more[40:])
    assert any(more), "the control"


def test_where_states_are_kept_inside_a_chunk_no_step_is_added(engine: Engine) -> None:
    """From the first request on, and however many have shown that nothing comes again."""
    stock = put(engine("mamba", with_plugin=False), unique(100))
    running = engine("mamba", inner=True)
    assert not any(extra(put(running, unique(100)), stock))
    checkpoints: Checkpoints = running.scheduler._mmcache_checkpoints
    assert len(checkpoints.tracked) >= 100, "one for each image all the same"


def tower_runs(running: Steps) -> list[list[int]]:
    """Images of each run of the tower, for requests about four unique images each."""
    found = []
    for request in range(12):
        images = [(f"image {request} {number}", 100 + 950 * number, 850) for number in range(4)]
        running.add([100 + request] * 100 + ([9] * 850 + [5] * 100) * 4, images)
        steps = [sum(map(len, output.scheduled_encoder_inputs.values())) for output in running.finish()]
        found.append([run for run in steps if run])
    return found


def test_runs_of_the_tower_become_those_of_stock(engine: Engine) -> None:
    """Where chunks end: a stop before the last image is tried a few times, then left out."""
    ours, stock = tower_runs(engine("mamba")), tower_runs(engine("mamba", with_plugin=False))
    assert ours[TRIED[START] :] == stock[TRIED[START] :]
    assert ours[0] != stock[0], "the control"


def test_runs_of_the_tower_are_those_of_stock_where_states_are_kept_inside_a_chunk(engine: Engine) -> None:
    """From the first request on."""
    assert tower_runs(engine("mamba", inner=True)) == tower_runs(engine("mamba", with_plugin=False))
