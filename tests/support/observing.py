# SPDX-License-Identifier: Apache-2.0
"""An engine of the pool with the group `observe` on, and the record of each request that is put to it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.role import Role
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.observe.record.recorder import RECORDER
from vllm_mmcache.components.observe.record.schema import Reason, Record, Segment
from vllm_mmcache.exactness.pictures import ellipses, png_url
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import COMPONENTS


@contextlib.contextmanager
def observed() -> Iterator[None]:
    """The component installed and on within the block, also for an engine that is there already."""
    before = settings.current()
    os.environ["MMCACHE_OBSERVE"] = "1"
    roles: tuple[Role, ...] = ("api", "engine")
    groups = {f"observe ({role})": COMPONENTS["observe"].hooks_in(role) for role in roles}
    for group, members in groups.items():
        outcome = installer.install(group, members, vllm_version())
        assert outcome.state == "on", outcome.reason
    settings.use(before.model_copy(update={"observe": True}))
    status._is_on["observe"] = True
    RECORDER.store.clear()
    try:
        yield
    finally:
        del os.environ["MMCACHE_OBSERVE"]
        for group in groups:
            installer.undo(group)
        settings.use(before)
        status._is_on["observe"] = False


@functools.cache
def drawn(name: str, size: tuple[int, int]) -> str:
    return png_url(ellipses(name, size))


def picture(name: str, size: tuple[int, int] = (224, 224)) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": drawn(name, size)}}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass
class Asked:
    """One request as vLLM answered it, and its record."""

    record: Record
    output: Any

    @property
    def text(self) -> str:
        return str(self.output.outputs[0].text)

    @property
    def cached(self) -> int:
        return int(self.output.num_cached_tokens)

    @property
    def reasons(self) -> list[Reason]:
        return [miss.reason for miss in self.record.misses]

    def segment(self, kind: str, index: int = 0) -> Segment:
        return [segment for segment in self.record.segments if segment.kind == kind][index]


class Observed:
    """Puts requests to an engine, and checks of each record what must hold for all."""

    def __init__(self, rig: ZooRig) -> None:
        self.rig = rig

    def chat(self, *messages: dict[str, Any], max_tokens: int = 4, more: Any = None, **params: Any) -> Asked:
        return self.recorded(self.put(*messages, max_tokens=max_tokens, more=more, **params))

    def put(self, *messages: dict[str, Any], max_tokens: int = 4, more: Any = None, **params: Any) -> Any:
        """vLLM's output alone."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **params)
        return self.rig.llm.chat([list(messages)], sampling, use_tqdm=False, **(more or {}))[0]

    def generate(self, *prompts: Any, max_tokens: int = 4, **params: Any) -> list[Asked]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **params)
        return [self.recorded(output) for output in self.rig.llm.generate(list(prompts), sampling, use_tqdm=False)]

    def recorded(self, output: Any) -> Asked:
        """With its record, which is checked."""
        record, *_ = RECORDER.store.named(output.request_id)
        assert_whole(record)
        assert record.reused_tokens == output.num_cached_tokens
        assert record.prompt_tokens == len(output.prompt_token_ids)
        return Asked(record, output)


def assert_whole(record: Record) -> None:
    """Segments are the prompt, their sums are right, and the misses cover exactly what was not reused."""
    assert sum(segment.reused_tokens for segment in record.segments) == record.reused_tokens
    assert sum(segment.tokens for segment in record.segments) == record.prompt_tokens
    position = 0
    for segment in record.segments:
        assert segment.start == position
        position += segment.tokens
        assert (segment.miss is None) == (segment.reused_tokens == segment.tokens)
    position = record.reused_tokens
    for miss in record.misses:
        assert miss.start == position
        assert miss.tokens > 0
        position += miss.tokens
    assert position == record.prompt_tokens


@contextlib.contextmanager
def observing(pool: EnginePool, config: EngineConfig) -> Iterator[Observed]:
    with observed():
        rig = pool.get(config)
        installer.undo("observe (engine)")  # and installed last, so called before those of metrics, as in a server
        installer.install("observe (engine)", COMPONENTS["observe"].hooks_in("engine"), vllm_version())
        yield Observed(rig)


def words(count: int, start: int = 0) -> str:
    from vllm_mmcache.exactness.conversations import filler

    return filler(count, start)
