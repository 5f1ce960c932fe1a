# SPDX-License-Identifier: Apache-2.0
"""What checkpoints cost where the KV cache is full, on vLLM's own scheduler: they must not push out what is reused."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.support.schedulers import Steps
from vllm_mmcache.components.image_checkpoints.vllm_planner import Checkpoints

pytestmark = [pytest.mark.answers, pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_installed", "no_role")]

IMAGE = [9] * 100
Prompt = tuple[list[int], list[tuple[str, int, int]]]
Engine = Callable[..., Steps]


def growing() -> Iterator[Prompt]:
    """Three conversations in turn, each with one more image in each of eight turns; never the end of an image twice."""
    talks: list[Prompt] = [([5 + talk] * 200, []) for talk in range(3)]
    for turn in range(8):
        for talk, (tokens, images) in enumerate(talks):
            tokens += [50 + turn] * 20
            images.append((f"{talk} {turn}", len(tokens), len(IMAGE)))
            tokens += [*IMAGE, 3, 3, 3, 3]
            yield tokens, images
            tokens += [70 + turn] * 20


def documents() -> Iterator[Prompt]:
    """Ten documents of five pages, with three questions in turn about each."""
    for document in range(10):
        pages = [(f"{document} {page}", 10 + len(IMAGE) * page, len(IMAGE)) for page in range(5)]
        for question in range(3):
            yield [3] * 10 + IMAGE * len(pages) + [100 + question] * 40, pages


def reused(engine: Steps, prompts: Iterable[Prompt]) -> int:
    """Tokens that the requests of these prompts take from the KV cache."""
    found = 0
    for tokens, images in prompts:
        engine.add(tokens, images)
        found += engine.finish()[0].scheduled_new_reqs[0].num_computed_tokens
    return found


@pytest.mark.parametrize("blocks", [150, 200, 250])
def test_growing_conversations_reuse_what_they_do_on_stock(
    engine: Engine, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that is too small for them. The control: as if a checkpoint's memory cost nothing."""
    stock = reused(engine("mamba", with_plugin=False, num_blocks=blocks), growing())
    running = engine("mamba", inner=True, num_blocks=blocks)
    assert reused(running, growing()) >= stock > 0
    monkeypatch.setattr(Checkpoints, "cost_tokens", costs_nothing)
    assert reused(engine("mamba", inner=True, num_blocks=blocks), growing()) < stock


def costs_nothing(*_: Any) -> float:
    return 0.0


@pytest.mark.parametrize(("kind", "blocks"), [("mamba", 100), ("mamba", 20_000), ("windows", 300)])
def test_what_is_asked_again_is_kept_in_a_full_cache_too(engine: Engine, kind: str, blocks: int) -> None:
    """Each document once in the cache, and hardly more: its second question resumes behind its last page."""
    end = (10 + 5 * len(IMAGE)) // 16 * 16
    assert reused(engine(kind, inner=kind == "mamba", num_blocks=blocks), documents()) == 10 * 2 * end
