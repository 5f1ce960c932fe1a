# SPDX-License-Identifier: Apache-2.0
"""Where an API server's records end up: the store in memory, counters on /metrics, and a file. API server process.

With several API servers on a machine, each writes its records to one file that all of them read, so that the page of
any of them shows every request. That file lies in the folder that vLLM makes for them (PROMETHEUS_MULTIPROC_DIR), and
has a budget of its own.
"""

import multiprocessing.util
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path

import xxhash

from vllm_mmcache.base import settings
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.describe import Facts, describe
from vllm_mmcache.components.observe.record.file import FOLLOWED_BYTES, Follower, RecordFile
from vllm_mmcache.components.observe.record.pending import PendingRequests
from vllm_mmcache.components.observe.record.schema import Record
from vllm_mmcache.components.observe.record.store import RecordStore
from vllm_mmcache.metrics import counters, table_sizes

RECORD_BYTES, PART_BYTES = 4096, 1024  # what a record that was read takes; test_recorder.py measures it
LAG_S = 0.1  # from the first output to the record, unless somebody asks for it
MOST_ARRIVED = 1024
_ANSWER_COST_BYTES = 250
_REASONING_END = "</think>"
SHARED_NAME = "mmcache-records.jsonl"
SHARED_BYTES = FOLLOWED_BYTES  # the budget of that file and the one before it, whatever observe_file_bytes is


def _budget() -> Budget:
    return Budget(settings.current().observe_records, settings.current().observe_bytes)


class Recorder:
    """This process's records."""

    def __init__(self) -> None:
        self.model = ""
        self.store = RecordStore(_budget, self._refresh)
        self.waiting = PendingRequests()
        self._answers: LruTable[tuple[str, int], bool] = LruTable(lambda: Budget(65536, 16 << 20), _ANSWER_COST_BYTES)
        table_sizes.of_server("observed", self.store.size)
        table_sizes.of_server("answers", self._answers.size)
        self._arrived: deque[tuple[Callable[[str], None], str]] = deque()
        self._has_news = threading.Event()
        self._reading = threading.Lock()
        self._following = threading.Lock()
        self._thread: threading.Thread | None = None

    @cached_property
    def server(self) -> str:
        """The name of this process in its records: host and process id."""
        return f"{socket.gethostname()}:{os.getpid()}"

    def note(self, outcome: str) -> None:
        """An engine's outcome has arrived with a request's first output; read soon, in a thread."""
        self._put(self._record, outcome)

    def note_answer(self, salt: str, text: str) -> None:
        """An answer has ended; kept as a digest, to be known again when it is sent back under the same salt's class."""
        self._put(partial(self._remember, salt), text)

    def read_notes(self) -> None:
        """Read what has arrived. Notes are read in the order in which they came."""
        with self._reading:
            while self._arrived:
                read, note = self._arrived.popleft()
                with failsafe("observe"):
                    read(note)

    def flush(self) -> None:
        """Wait until all records are in the files."""
        self.read_notes()
        for file in self._files:
            file.flush()

    def _put(self, read: Callable[[str], None], note: str) -> None:
        self._arrived.append((read, note))
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_on, name="mmcache-recorder", daemon=True)
            self._thread.start()
            multiprocessing.util.Finalize(None, self.flush, exitpriority=1)
        if len(self._arrived) > MOST_ARRIVED:
            self.read_notes()
        elif not self._has_news.is_set():
            self._has_news.set()

    def _read_on(self) -> None:
        while self._has_news.wait():
            time.sleep(LAG_S)  # many are read at once, when no request waits for it
            self._has_news.clear()
            self.read_notes()

    def _record(self, text: str) -> None:
        outcome = wire.unpack_outcome(text)
        asked = self.waiting.take(outcome.ticket)
        facts = Facts(asked, outcome, self._answers) if asked else None
        missed = _sums((cause.reason.value, cause.tokens) for cause in (facts or outcome).causes)
        images = facts.images_by_source() if facts else {}
        counters.PROMPT_TOKENS.add(outcome.reused_tokens, "reused", "")
        # Compared across salts, a reason says what others sent, and more read /metrics than have the admin key.
        shown = {"": sum(missed.values())} if settings.current().observe_across_salts else missed
        for reason, tokens in shown.items():
            counters.PROMPT_TOKENS.add(tokens, "computed", reason)
        for source, count in images.items():
            counters.PROMPT_IMAGES.add(count, source)
        self.store.count(outcome.reused_tokens + sum(missed.values()), outcome.reused_tokens, missed, images)
        if facts is not None:
            recipe = partial(describe, facts, self.server, self.model)
            self.store.add(outcome.id, _size_bytes(facts.num_parts), recipe, facts.asked.request_id)
            for file in self._files:
                file.hand(recipe)

    def _remember(self, salt: str, text: str) -> None:
        for answer in {text, text.rpartition(_REASONING_END)[2]}:
            for sent in {answer, answer.strip()}:
                self._answers.admit((salt, message_digest("assistant", sent)), True)

    @cached_property
    def _shared(self) -> Path | None:
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        return Path(folder) / SHARED_NAME if folder else None

    @cached_property
    def _follower(self) -> Follower | None:
        return Follower(self._shared) if self._shared else None

    @cached_property
    def _files(self) -> list[RecordFile]:
        files = [RecordFile(self._shared, lambda: SHARED_BYTES)] if self._shared else []
        if chosen := settings.current().observe_file:
            files.append(RecordFile(Path(chosen).expanduser(), lambda: settings.current().observe_file_bytes))
        return files

    def _refresh(self) -> None:
        self.read_notes()
        if self._follower is None:
            return
        with self._following, failsafe("observe"):
            for records in iter(self._follower.read_new, []):
                for record in records:
                    self._take(record)

    def _take(self, record: Record) -> None:
        """A record out of the shared file."""
        if record.server == self.server:
            return
        missed = _sums((miss.reason.value, miss.tokens) for miss in record.misses)
        images = _sums((segment.image.features, 1) for segment in record.segments if segment.image)
        self.store.count(record.prompt_tokens, record.reused_tokens, missed, images)
        self.store.add(record.id, _size_bytes(len(record.segments) + len(record.misses)), record, record.request_id)


def message_digest(role: str, text: str) -> int:
    """Digest of a message, by which it is known again; the same in all processes."""
    try:
        return xxhash.xxh3_64_intdigest(f"{role}\0{text}")
    except UnicodeEncodeError:  # a lone half of a surrogate pair
        return xxhash.xxh3_64_intdigest(f"{role}\0{text}".encode(errors="replace"))


def _size_bytes(num_parts: int) -> int:
    return RECORD_BYTES + PART_BYTES * num_parts


def _sums(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, amount in amounts:
        found[name] = found.get(name, 0) + amount
    return found


RECORDER = Recorder()
