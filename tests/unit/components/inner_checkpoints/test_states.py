# SPDX-License-Identifier: Apache-2.0
"""Every published key of a Mamba state is of one that was written: vLLM's scheduler, with made-up workers."""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mmcache_tools.zoo import build_cached
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import RequestStatus

from tests.support.schedulers import BLOCK, Steps, engine_config, groups, make_scheduler, take_back
from vllm_mmcache.base import settings
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.lifecycle import activation, rank_sync

pytestmark = [pytest.mark.answers, pytest.mark.usefixtures("nothing_stays_installed", "no_role")]

NUM_GROUPS = 3


class Workers:
    """What the blocks of a model's KV cache hold: for a state, the prefix that it is of."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.states: dict[int, Any] = {}  # by block
        self.tables: dict[str, list[list[int]]] = {}
        self.prefixes: dict[bytes, Any] = {}  # by block key
        self.names: dict[str, list[Any]] = {}
        self.num_cuts = 0

    def know(self, request: Any) -> None:
        """What a request's prompt shows, token by token; all that follows is the same token."""
        shown = list(request.prompt_token_ids)
        for feature in request.mm_features:
            place = feature.mm_position
            shown[place.offset : place.offset + place.length] = [feature.identifier] * place.length
        self.names[request.request_id] = shown

    def prefix(self, name: str, num_tokens: int) -> Any:
        shown = self.names[name]
        return hash(tuple([*shown, *[7] * (num_tokens - len(shown))][:num_tokens])), num_tokens

    def compute(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        starts = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        for name, new_ids, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            starts[name] = start
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for table, ids in zip(self.tables[name], new_ids, strict=True):
                    table.extend(ids)
        cuts = getattr(output, CUTS, {})
        assert cuts.keys() <= output.num_scheduled_tokens.keys()
        written: dict[int, Any] = {}
        for name, num_tokens in output.num_scheduled_tokens.items():
            start, end = starts[name], starts[name] + num_tokens
            for group in range(1, NUM_GROUPS):
                table = self.tables[name][group]
                if start:
                    block = table[-(-start // BLOCK) - 1]
                    assert self.states[block] == self.prefix(name, start), (
                        name,
                        start,
                        end,
                        "begins with another state",
                    )
                running = table[-(-end // BLOCK) - 1]
                assert running
                assert running not in written
                written[running] = self.prefix(name, end)
            for cut in cuts.get(name, ()):
                self.num_cuts += 1
                assert start < start + cut.offset < end
                assert cut.blocks.keys() == set(range(1, NUM_GROUPS))
                for block in cut.blocks.values():
                    assert block
                    assert block not in written
                    written[block] = self.prefix(name, start + cut.offset)
        self.states |= written
        for request in self.scheduler.requests.values():
            for number, key in enumerate(request.block_hashes, 1):
                self.prefixes.setdefault(bytes(key), self.prefix(request.request_id, number * BLOCK))

    def wrong(self) -> list[Any]:
        """The published keys of states that are not there."""
        found = []
        pool = self.scheduler.kv_cache_manager.block_pool
        for key, blocks in pool.cached_block_hash_to_block._cache.items():
            if get_group_id(key) == 0:
                continue
            expected = self.prefixes.get(bytes(get_block_hash(key)))
            for block in blocks.values() if isinstance(blocks, dict) else [blocks]:
                if self.states.get(block.block_id) != expected:
                    found.append((block.block_id, expected, self.states.get(block.block_id)))
        return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmConfig]:
    root = tmp_path_factory.mktemp("zoo")
    return lambda is_async, policy: engine_config(
        build_cached("qwen3.5", root),
        is_async=is_async,
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=256,
        scheduling_policy=policy,
    )


@pytest.fixture
def engine(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Steps]]:
    def start(is_async: bool, policy: str, num_blocks: int, inner: bool) -> Steps:
        given = settings.load_settings(
            {"unproven": True, "features": False, "inner_checkpoints": inner, "checkpoint_min_tokens": 16}
        )
        monkeypatch.setattr(settings, "_current", given)
        made = config(is_async, policy)
        activation.activate("engine", made)
        scheduler = make_scheduler(made, groups("mamba", NUM_GROUPS), num_blocks, with_plugin=True)
        rank_sync.of_engine(SimpleNamespace(scheduler=scheduler, model_executor=None))
        return Steps(scheduler, is_async)

    yield start
    take_back()


@pytest.mark.parametrize(
    ("inner", "is_async", "policy", "seed"),
    [
        (True, False, "fcfs", 3),
        (True, True, "fcfs", 4),
        (True, False, "priority", 6),
        (True, True, "priority", 4),
        (False, False, "priority", 4),
        (False, False, "priority", 14),
        (False, True, "priority", 1),
        (False, True, "priority", 14),
    ],
)
def test_what_is_published_is_written(engine: Any, inner: bool, is_async: bool, policy: str, seed: int) -> None:
    """Whoever is preempted or aborted, and when; with priorities also in the step that a request is scheduled for."""
    chance = random.Random(seed)
    steps = engine(is_async, policy, chance.choice([60, 80, 120]), inner)
    workers = Workers(steps.scheduler)
    requests = steps.scheduler.requests
    for _ in range(250):
        while len(requests) < 6 and chance.random() < 0.6:
            images, tokens = [], [1] * chance.randint(5, 40)
            for _ in range(chance.randint(1, 4)):
                length = BLOCK * chance.randint(1, 5) + chance.randint(0, 8)
                images.append((f"image {chance.randint(0, 3)} {length}", len(tokens), length))
                tokens += [5] * length + [chance.randint(1, 2)] * chance.randint(1, 20)
            request = steps.add(tokens, images, max_tokens=chance.randint(1, 60))
            request.priority = chance.randint(0, 5)
            workers.know(request)
        if requests and chance.random() < 0.05:
            steps.scheduler.finish_requests(chance.choice(list(requests)), RequestStatus.FINISHED_ABORTED)
        output = steps.step()
        workers.compute(output)
        assert workers.wrong() == []
    assert bool(workers.num_cuts) is inner
