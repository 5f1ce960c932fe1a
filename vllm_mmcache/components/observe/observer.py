# SPDX-License-Identifier: Apache-2.0
"""Observes one KV cache manager: what requests found, what was evicted, when it was reset, and why requests missed.

Engine process.
"""

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.base import settings
from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.causes import GroupHit, Lookup, Lost, explain
from vllm_mmcache.components.observe.record.digests import salt_class
from vllm_mmcache.components.observe.record.history import Entry, History, HistoryMatch
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.components.observe.record.wire import Cause
from vllm_mmcache.metrics import table_sizes as sizes
from vllm_mmcache.metrics import transport

EVICTIONS = 65536  # block keys whose eviction is remembered

OBSERVER = "_mmcache_observer"
"""The attribute of a KV cache manager and of its block pool that holds its Observer."""
REQUEST_STATE = "_mmcache_request_state"
"""The attribute of a vLLM request that holds its RequestState."""


@dataclass
class RequestState:
    """What is known of one request between its lookup and its first output."""

    ticket: str
    entry: Entry
    found: HistoryMatch
    hit_tokens: int = -1
    groups: Sequence[GroupHit] = ()
    causes: list[Cause] = field(default_factory=list)
    features: dict[int, str] = field(default_factory=dict)


class Observer:
    """One engine's history, and the requests that wait for their first output."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.pool = manager.block_pool
        self.history = History(
            self.pool.hash_block_size,
            lambda: settings.current().observe_bytes,
            lambda: settings.current().observe_across_salts,
        )
        sizes.of_engine("history", self.history.size)
        self.waiting: dict[str, RequestState] = {}
        self.ended: list[str] = []
        self.reset_s = 0.0
        self._evicted: dict[bytes, float] = {}  # key with its group -> Unix time
        groups = manager.coordinator.kv_cache_config.kv_cache_groups
        self._kinds = [kind_of(group.kv_cache_spec) for group in groups]
        setattr(self.pool, OBSERVER, self)

    def look(self, request: Any, hit_tokens: int) -> None:
        """A request was looked up; while it waits, in every step anew."""
        seen: RequestState | None = getattr(request, REQUEST_STATE, None)
        if seen is None:
            seen = self._meet(request)
            setattr(request, REQUEST_STATE, seen)
            self.waiting[request.request_id] = seen
        if seen.hit_tokens != hit_tokens:
            self._explain(request, seen, hit_tokens)

    def finish(self, request: Any, seen: RequestState) -> None:
        """A request has ended, before or after its first output."""
        # An answer's last token never has KV; async scheduling may have counted its step already.
        num_computed = min(request.num_computed_tokens, request.num_tokens - bool(request.num_output_tokens))
        self.history.finish(seen.entry, request.output_token_ids, request.block_hashes, num_computed)
        if request.request_id in self.waiting:  # its first output may be on its way
            self.ended.append(request.request_id)

    def drop_ended(self) -> None:
        """Requests that ended without an output (aborted) send nothing."""
        for request_id in self.ended:
            self.waiting.pop(request_id, None)
        self.ended.clear()

    def evicted(self, key: bytes) -> None:
        """A block that was cached is used for something else; key holds its group."""
        if self.history.owner(key[:-4]) is not None:
            self._evicted.pop(key, None)  # to the end
            self._evicted[key] = time.time()
            if len(self._evicted) > EVICTIONS:
                del self._evicted[next(iter(self._evicted))]

    def note_images(self, scheduler: Any, encoder_inputs: dict[str, list[int]]) -> None:
        """These images were encoded in the step that has ended; what was noted of their sources is used up."""
        for request_id, indices in encoder_inputs.items():
            request, seen = scheduler.requests.get(request_id), self.waiting.get(request_id)
            if request is None:  # aborted during the step, which async scheduling had under way
                continue
            for index in indices:
                source = transport.take_feature_source(request.mm_features[index].identifier)
                if seen is not None:
                    seen.features[index] = source or "tower"

    def send(self, scheduler: Any, output: Any) -> None:
        """Lay the outcome of a request beside its first output."""
        seen = self.waiting.pop(output.request_id, None)
        if seen is not None:
            text = wire.pack_outcome(self.outcome(scheduler, seen, output.prefill_stats))
            output.trace_headers = wire.add(output.trace_headers, text)

    def outcome(self, scheduler: Any, seen: RequestState, stats: Any) -> wire.Outcome:
        """All that is sent of a request. The API's cached_tokens is what vLLM says, so that is what is explained."""
        reused, entry = stats.num_cached_tokens, seen.entry
        causes = _cut(seen.causes, reused, entry.prompt_tokens)
        return wire.Outcome(
            ticket=seen.ticket,
            id=entry.id,
            reused_tokens=reused,
            external_tokens=stats.num_external_cached_tokens,
            block_tokens=self.manager.coordinator.scheduler_block_size,
            engine=scheduler.vllm_config.parallel_config.data_parallel_index,
            groups=self._groups(seen, reused),
            nearest=_nearest(seen),
            features=seen.features,
            causes=causes,
        )

    def _meet(self, request: Any) -> RequestState:
        text, request.trace_headers = wire.take(request.trace_headers)
        ticket, name, notes = wire.open_notes(text) if text else ("", "", "")
        number, _, rest = request.request_id.partition("_")
        is_one_of_n = name and number.isdecimal() and rest.startswith(name)
        features = request.mm_features
        entry = Entry(
            id=f"{ticket}.{number}" if is_one_of_n else ticket,
            time_s=request.arrival_time,
            salt=salt_class(request.cache_salt),
            lora=request.lora_request.lora_name if request.lora_request else "",
            prompt_tokens=request.num_prompt_tokens,
            notes=notes,
            request=request,
        )
        if features:
            last = features[-1].mm_position
            entry.images_end = last.offset + last.length
            entry.first_images = self._first_images(features)
        prompt, keys = request.prompt_token_ids, request.block_hashes
        if not self.manager.enable_caching or prompt is None:
            return RequestState(ticket, entry, HistoryMatch(0, None, None))
        found = self.history.find(entry, prompt, keys)
        self.history.remember(entry, prompt, keys, found.num_known)
        return RequestState(ticket, entry, found)

    def _first_images(self, features: Sequence[Any]) -> tuple[str, ...]:
        within = itertools.takewhile(lambda f: f.mm_position.offset < self.pool.hash_block_size, features)
        return tuple(feature.identifier for feature in within)

    def _explain(self, request: Any, seen: RequestState, hit_tokens: int) -> None:
        seen.hit_tokens = hit_tokens
        coordinator = self.manager.coordinator
        unit = coordinator.scheduler_block_size
        if request.prompt_token_ids is None:  # embeddings: there is nothing to compare
            seen.causes = [
                Cause(Reason.UNEXPLAINED, hit_tokens, request.num_prompt_tokens - hit_tokens, hit_tokens, {})
            ]
            return
        common = seen.found.nearest.common_tokens if seen.found.nearest else 0
        held_back = 1 + (unit if coordinator.eagle_group_ids else 0)
        may_be_short = hit_tokens < min(common, request.num_prompt_tokens - held_back) // unit * unit
        seen.groups = self._group_hits(request, hit_tokens) if may_be_short else ()
        lookup = Lookup(
            hit_tokens=hit_tokens,
            hit_unit=unit,
            off=self._why_off(request),
            groups=seen.groups,
            held_back=held_back,
            lost=lambda group: self._lost(group, request.block_hashes, common),
        )
        seen.causes = explain(seen.entry, seen.found, lookup)

    def _why_off(self, request: Any) -> str:
        if not self.manager.enable_caching:
            return "server"
        if not request.skip_reading_prefix_cache:
            return ""
        sampling = request.sampling_params
        asks = sampling is not None and sampling.prompt_logprobs is not None
        return "prompt_logprobs" if asks else ("request" if sampling is not None else "pooling")

    def _group_hits(self, request: Any, hit_tokens: int) -> list[GroupHit]:
        coordinator = self.manager.coordinator
        specs = [group.kv_cache_spec for group in coordinator.kv_cache_config.kv_cache_groups]
        hits: Sequence[int] = [hit_tokens] * len(specs)
        if len(specs) > 1:
            _, hits = coordinator.find_longest_cache_hit_per_group(request.block_hashes, request.num_tokens - 1)
        sizes = coordinator.group_block_sizes
        return [
            GroupHit(index, self._kinds[index], size, is_dense(spec), hit)
            for index, (spec, size, hit) in enumerate(zip(specs, sizes, hits, strict=True))
            if spec.prefix_cacheable
        ]

    def _lost(self, group: GroupHit, keys: Sequence[bytes], common: int) -> Lost:
        """Why a group lacks what others have: a dense one its next block, a sparse one its state."""
        unit = self.pool.hash_block_size
        ends = [group.hit_tokens + group.block_tokens]
        if not group.is_dense:  # any position after its hit would have done
            ends = list(range(common // group.block_tokens * group.block_tokens, group.hit_tokens, -group.block_tokens))
        for end in ends:
            key = keys[end // unit - 1] if end // unit <= len(keys) else None
            owner = self.history.owner(key) if key is not None else None
            if key is None or owner is None:
                continue
            computed = owner.request.num_computed_tokens if owner.request is not None else owner.num_computed
            if group.is_dense and computed < end:
                return Lost(Reason.NOT_YET_COMPUTED, {"other": owner.id})
            if self.reset_s > owner.time_s:
                return Lost(Reason.EVICTED, {"how": "reset", "ago_s": round(time.time() - self.reset_s, 3)})
            gone_s = self._evicted.get(key + group.index.to_bytes(4, "big"))
            if gone_s is not None:
                return Lost(Reason.EVICTED, {"how": "evicted", "ago_s": round(time.time() - gone_s, 3)})
            if group.is_dense:
                return Lost(Reason.EVICTED, {"how": "evicted"})
        return Lost(Reason.UNEXPLAINED if group.is_dense else Reason.STATE_NOT_KEPT)

    def _groups(self, seen: RequestState, reused: int) -> list[tuple[int, str, int, int, bool]]:
        """Where nothing was amiss the groups were not asked one by one: each has the hit."""
        if seen.groups:
            best = max(group.hit_tokens for group in seen.groups)
            return [(g.index, g.kind, g.block_tokens, g.hit_tokens, g.hit_tokens < best) for g in seen.groups]
        return [
            (index, self._kinds[index], group.kv_cache_spec.block_size, reused, False)
            for index, group in enumerate(self.manager.coordinator.kv_cache_config.kv_cache_groups)
        ]


def kind_of(spec: Any) -> str:
    """SlidingWindowSpec -> sliding_window."""
    name = type(spec).__name__.removesuffix("Spec")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def is_dense(spec: Any) -> bool:
    """Whether a group keeps every block, as full attention does."""
    return any(base.__name__ == "FullAttentionSpec" for base in type(spec).__mro__)


def _nearest(seen: RequestState) -> tuple[str, float, int, bool, bool] | None:
    match = seen.found.elsewhere or seen.found.nearest
    if match is None:
        return None
    age_s = round(max(seen.entry.time_s - match.entry.time_s, 0.0), 3)
    same = match.entry.salt == seen.entry.salt, match.entry.lora == seen.entry.lora
    return match.entry.id, age_s, match.common_tokens, *same


def _cut(causes: list[Cause], reused: int, total: int) -> list[Cause]:
    """Causes for what lies behind `reused`, in case that vLLM used more or less than the lookup found."""
    if causes and causes[0].start == reused:
        return causes
    kept = []
    for cause in causes:
        end = cause.start + cause.tokens
        start = max(cause.start, reused)
        if end > start:
            kept.append(cause._replace(start=start, tokens=end - start, at=max(cause.at, reused)))
    first = kept[0].start if kept else total
    if first > reused:
        kept.insert(0, Cause(Reason.UNEXPLAINED, reused, first - reused, reused, {}))
    return kept
