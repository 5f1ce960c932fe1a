# SPDX-License-Identifier: Apache-2.0
"""Where an API server's records end up: the store in memory, counters on /metrics, and a file. API server process.

With several API servers on a machine, each writes its records to one file that all of them read, so that the page of
any of them shows every request. That file lies in the folder that vLLM makes for them (PROMETHEUS_MULTIPROC_DIR).
"""

import os
import socket
from functools import cached_property, partial
from pathlib import Path

from vllm_mmcache import events, settings
from vllm_mmcache.bounded import Budget
from vllm_mmcache.observe import wire
from vllm_mmcache.observe.describe import describe
from vllm_mmcache.observe.file import Follower, RecordFile
from vllm_mmcache.observe.schema import Record
from vllm_mmcache.observe.store import RecordStore

RECORD_BYTES_PER_CHAR = 8  # a record that was read takes about eight times its text; measured in tests/observe
SHARED_NAME = "mmcache-records.jsonl"


def _budget() -> Budget:
    return Budget(settings.current().observe_records, settings.current().observe_bytes)


class Recorder:
    """This process's records."""

    def __init__(self) -> None:
        self.model = ""
        self.store = RecordStore(_budget, self._read_others)

    @property
    def server(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}"

    def note(self, text: str) -> None:
        """An engine's outcome has arrived with a request's first output."""
        outcome = wire.unpack_outcome(text)
        missed: dict[str, int] = {}
        for reason, _, tokens, _, _ in outcome.causes:
            missed[reason] = missed.get(reason, 0) + tokens
        images: dict[str, int] = {}
        for image in outcome.images:
            images[image[-1]] = images.get(image[-1], 0) + 1
        events.PROMPT_TOKENS.add(outcome.reused_tokens, "reused", "")
        for reason, tokens in missed.items():
            events.PROMPT_TOKENS.add(tokens, "computed", reason)
        for source, count in images.items():
            events.PROMPT_IMAGES.add(count, source)
        self.store.count(outcome.prompt_tokens, outcome.reused_tokens, missed, images)
        recipe = partial(self._describe, text)
        self.store.add(outcome.id, RECORD_BYTES_PER_CHAR * len(text), recipe)
        for file in self._files:
            file.hand(recipe)

    def flush(self) -> None:
        """Wait until all records are in the files."""
        for file in self._files:
            file.flush()

    def _describe(self, text: str) -> Record:
        return describe(wire.unpack_outcome(text), self.server, self.model)

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
                missed: dict[str, int] = {}
                for miss in record.misses:
                    missed[miss.reason] = missed.get(miss.reason, 0) + miss.tokens
                images: dict[str, int] = {}
                for segment in record.segments:
                    if segment.image is not None:
                        images[segment.image.features] = images.get(segment.image.features, 0) + 1
                self.store.count(record.prompt_tokens, record.reused_tokens, missed, images)
                self.store.add(record.id, RECORD_BYTES_PER_CHAR * 1024, record)


RECORDER = Recorder()
STORE = RECORDER.store
