# SPDX-License-Identifier: Apache-2.0
"""Where an API server's records end up: the store in memory, counters on /metrics, and a file. API server process.

With several API servers on a machine, each writes its records to one file that all of them read, so that the page of
any of them shows every request. That file lies in the folder that vLLM makes for them (PROMETHEUS_MULTIPROC_DIR).
"""

import os
import socket
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path

from vllm_mmcache import events, settings
from vllm_mmcache.bounded import Bounded, Budget
from vllm_mmcache.observe import wire
from vllm_mmcache.observe.asked import Waiting
from vllm_mmcache.observe.describe import Told, describe
from vllm_mmcache.observe.file import Follower, RecordFile
from vllm_mmcache.observe.store import RecordStore

RECORD_BYTES, SEGMENT_BYTES = 4096, 1024  # what a record that was read takes; tests/observe measures
_ANSWER_COST_BYTES = 200
SHARED_NAME = "mmcache-records.jsonl"


def _budget() -> Budget:
    return Budget(settings.current().observe_records, settings.current().observe_bytes)


class Recorder:
    """This process's records."""

    def __init__(self) -> None:
        self.model = ""
        self.store = RecordStore(_budget, self._read_others)
        self.waiting = Waiting()

    @cached_property
    def server(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}"

    def note(self, text: str) -> None:
        """An engine's outcome has arrived with a request's first output."""
        outcome = wire.unpack_outcome(text)
        asked = self.waiting.take(outcome.ticket)
        told = Told(asked, outcome, ANSWERS) if asked else None
        missed = _sums((cause[0], cause[2]) for cause in outcome.causes)
        images = told.images_by_source() if told else {}
        events.PROMPT_TOKENS.add(outcome.reused_tokens, "reused", "")
        for reason, tokens in missed.items():
            events.PROMPT_TOKENS.add(tokens, "computed", reason)
        for source, count in images.items():
            events.PROMPT_IMAGES.add(count, source)
        self.store.count(outcome.reused_tokens + sum(missed.values()), outcome.reused_tokens, missed, images)
        if told is not None:
            recipe = partial(describe, told, self.server, self.model)
            self.store.add(outcome.id, _size_bytes(told.num_segments), recipe)
            for file in self._files:
                file.hand(recipe)

    def flush(self) -> None:
        """Wait until all records are in the files."""
        for file in self._files:
            file.flush()

    @cached_property
    def _shared(self) -> Path | None:
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        return Path(folder) / SHARED_NAME if folder else None

    @cached_property
    def _follower(self) -> Follower | None:
        return Follower(self._shared) if self._shared else None

    @cached_property
    def _files(self) -> list[RecordFile]:
        chosen = settings.current().observe_file
        paths = [self._shared] if self._shared else []
        paths += [Path(chosen).expanduser()] if chosen else []
        return [RecordFile(path, lambda: settings.current().observe_file_bytes) for path in paths]

    def _read_others(self) -> None:
        if self._follower is None:
            return
        with events.guarded("observe"):
            for record in self._follower.read_new():
                if record.server == self.server:
                    continue
                missed = _sums((miss.reason.value, miss.tokens) for miss in record.misses)
                images = _sums((segment.image.features, 1) for segment in record.segments if segment.image)
                self.store.count(record.prompt_tokens, record.reused_tokens, missed, images)
                self.store.add(record.id, _size_bytes(len(record.segments)), record)


def _size_bytes(num_segments: int) -> int:
    return RECORD_BYTES + SEGMENT_BYTES * num_segments


def _sums(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, amount in amounts:
        found[name] = found.get(name, 0) + amount
    return found


ANSWERS: Bounded[int, bool] = Bounded(lambda: Budget(65536, 16 << 20), _ANSWER_COST_BYTES)
"""Digests of the answers that this process gave."""
RECORDER = Recorder()
STORE = RECORDER.store
