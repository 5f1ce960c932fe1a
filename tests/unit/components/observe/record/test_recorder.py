# SPDX-License-Identifier: Apache-2.0
"""What an API server keeps of requests until their outcome comes, what a record takes, and what servers share."""

import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from pydantic import ByteSize

from tests.support.observing import assert_whole
from tests.support.page_app import RecordsMade, many
from vllm_mmcache.base import settings
from vllm_mmcache.components.observe.record import file, pending, recorder, wire
from vllm_mmcache.components.observe.record.file import BATCH_RECORDS, RecordFile, before, read_records
from vllm_mmcache.components.observe.record.pending import UNKNOWN, PendingRequests, RequestSnapshot
from vllm_mmcache.components.observe.record.recorder import (
    PART_BYTES,
    RECORD_BYTES,
    SHARED_NAME,
    Recorder,
    message_digest,
)
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.components.observe.record.summary import summary
from vllm_mmcache.metrics import counters


def asked(name: str = "r", num_answers: int = 1, turns: int = 3, images: int = 0) -> RequestSnapshot:
    spans = [(10 + 20 * index, 16, f"image {index}") for index in range(images)]
    length = 20 * (turns + images) + 20
    return RequestSnapshot(
        request_id=name, time_s=1.0, prompt_tokens=length, lora="", salt="", num_answers=num_answers,
        turns=[0, *(length - 20 * turn for turn in range(turns - 1, 0, -1))], roles=["user"] * turns,
        answers=[], spans=spans, layers=[UNKNOWN] * images,
    )  # fmt: skip


def outcome(ticket: str, request: RequestSnapshot, reused: int = 16) -> str:
    missed = request.prompt_tokens - reused
    said = wire.Outcome(
        ticket=ticket, id=ticket, reused_tokens=reused, external_tokens=0, block_tokens=16, engine=0,
        groups=[], nearest=None, features={}, causes=[wire.Cause(Reason.NEW_CONTENT, reused, missed, reused, {})],
    )  # fmt: skip
    return wire.pack_outcome(said)


def test_an_id_may_have_any_character() -> None:
    for name in ("r", "", "a b\nc", "1 [2]\n", "\u00e9\x00"):
        notes = wire.Notes([0, 5], ["user", ""], [2**64 - 1], [(1, 2, "i")], [("c", "", 3, 4)])
        ticket, request_id, text = wire.open_notes(wire.pack("a-7", name, notes))
        assert (ticket, request_id, wire.read_notes(text)) == ("a-7", name, notes)


def test_each_answer_takes_its_request_once() -> None:
    waiting = PendingRequests()
    one, two = waiting.add(asked("one")), waiting.add(asked("two", num_answers=2))
    assert [waiting.take(name) is not None for name in (one, one, two, two, two, "")] == [
        True, False, True, True, False, False,
    ]  # fmt: skip


def test_a_client_can_not_choose_the_id_of_a_record() -> None:
    """Two requests with one X-Request-Id have a record each, and no id of ours is an id that came from outside."""
    recorder = Recorder()
    for reused in (16, 32):
        request = asked("chatcmpl-mine")
        recorder.note(outcome(recorder.waiting.add(request), request, reused))
    recorder.read_notes()
    assert [record.reused_tokens for record in recorder.store.named("chatcmpl-mine")] == [32, 16]
    first = recorder.store.recent(2)[1]
    taken = asked(first.id)
    recorder.note(outcome(recorder.waiting.add(taken), taken))
    recorder.read_notes()
    assert recorder.store.named(first.id) == [first]
    assert len(recorder.store) == 3


def test_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MOST_WAITING", 3)
    waiting = PendingRequests()
    numbers = [waiting.add(asked(str(index))) for index in range(5)]
    assert [waiting.take(number) is not None for number in numbers] == [False, False, True, True, True]


def test_an_outcome_without_its_request_is_counted_only() -> None:
    recorder = Recorder()
    recorder.note(outcome("99", asked()))
    recorder.note("no outcome at all")
    number = recorder.waiting.add(asked("known"))
    recorder.note(outcome(number, asked("known")))
    assert [record.request_id for record in recorder.store.recent(9)] == ["known"]
    assert recorder.store.totals().requests == 2


def test_what_a_record_takes() -> None:
    """The store counts a record for what it takes when it was read, within a factor of two."""
    for images in (0, 20):
        recorder, request = Recorder(), asked(turns=30, images=images)
        record_id = recorder.waiting.add(request)
        recorder.note(outcome(record_id, request))
        recorder.read_notes()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        record = recorder.store.get(record_id)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert record is not None
        assert len(record.segments) >= 30
        assert 0.5 < recorder.store.size_bytes / taken < 2, (recorder.store.size_bytes, taken)
        assert recorder.store.size_bytes >= RECORD_BYTES + PART_BYTES * 30


@pytest.mark.parametrize("across_salts", [True, False])
def test_metrics_tell_no_reason_that_comes_from_other_salts(
    across_salts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More read /metrics than have the admin key; where records are compared across salts, a reason is about others."""
    told = []
    monkeypatch.setattr(settings, "_current", settings.Settings(observe_across_salts=across_salts))
    monkeypatch.setattr(counters.PROMPT_TOKENS, "add", lambda *values: told.append(values))
    recorder, request = Recorder(), asked()
    causes = [wire.Cause(Reason.OTHER_SALT, 16, 20, 16, {}), wire.Cause(Reason.TEXT_DIFFERS, 36, 44, 36, {})]
    packed = wire.unpack_outcome(outcome(recorder.waiting.add(request), request))
    recorder._record(wire.pack_outcome(msgspec.structs.replace(packed, causes=causes)))
    reasons = (
        [(64, "computed", "")] if across_salts else [(20, "computed", "other_salt"), (44, "computed", "text_differs")]
    )
    assert told == [(16, "reused", ""), *reasons]
    assert recorder.store.totals().missed_tokens == {Reason.OTHER_SALT: 20, Reason.TEXT_DIFFERS: 44}, "behind the key"


def test_the_record_and_all_sums_say_the_same_of_a_rewritten_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two causes of one reason, with what is new between them; the engine can't know that the answer came back."""
    told = []
    monkeypatch.setattr(counters.PROMPT_TOKENS, "add", lambda *values: told.append(values))
    for echo in (True, False):
        recorder = Recorder()
        recorder.note_answer("", "Given." if echo else "Something else.")
        request = RequestSnapshot(
            request_id="r", time_s=1.0, prompt_tokens=1000, lora="", salt="", num_answers=1,
            turns=[0, 100, 200, 900], roles=["user", "assistant", "user", "assistant"],
            answers=[message_digest("assistant", "Given.")], spans=[(300, 500, "image")], layers=[UNKNOWN],
        )  # fmt: skip
        answer = {"turn": 1, "answer": True}
        causes = [
            wire.Cause(Reason.TEXT_DIFFERS, 104, 4, 104, answer),
            wire.Cause(Reason.NEW_CONTENT, 108, 2, 108, {}),
            wire.Cause(Reason.TEXT_DIFFERS, 110, 40, 104, answer),
            wire.Cause(Reason.NEW_CONTENT, 150, 850, 150, {}),
        ]
        name = recorder.waiting.add(request)
        given = wire.unpack_outcome(outcome(name, request))
        near = ("old", 1.0, 104, True, True)
        recorder.note(wire.pack_outcome(msgspec.structs.replace(given, reused_tokens=104, causes=causes, nearest=near)))
        recorder.read_notes()
        record = recorder.store.get(name)
        assert record is not None
        reason = Reason.TEMPLATE_REWROTE if echo else Reason.TEXT_DIFFERS
        sums = {reason: 44, Reason.NEW_CONTENT: 852}
        assert [(miss.reason, miss.start, miss.tokens) for miss in record.misses] == [
            (reason, 104, 4), (Reason.NEW_CONTENT, 108, 2), (reason, 110, 40), (Reason.NEW_CONTENT, 150, 850),
        ]  # fmt: skip
        assert_whole(record)
        first, new, again, rest = record.misses
        assert (first.segment, first.token) == (again.segment, again.token) == (1, 4), "the cause of both lies there"
        assert first.text == again.text
        assert new.text == "New from token 8 of turn 1 (assistant) on: old has no such content there."
        assert rest.segment == 1
        assert record.segments[3].kind == "image"
        assert record.misses[record.segments[3].miss or 0].reason is Reason.NEW_CONTENT
        assert recorder.store.totals().missed_tokens == sums
        assert summary(record)["missed_tokens"] == sums
        assert summary(record)["reason"] == Reason.NEW_CONTENT, "not the answer, though it is what differs first"
        assert told == [(104, "reused", ""), *((tokens, "computed", str(name)) for name, tokens in sums.items())]
        told.clear()


def test_what_many_causes_take() -> None:
    """They are counted as segments are."""
    recorder, request = Recorder(), asked(turns=2)
    name = recorder.waiting.add(request)
    causes = [wire.Cause(Reason.NEW_CONTENT, 16 + n, 1, 16 + n, {}) for n in range(request.prompt_tokens - 16)]
    given = wire.unpack_outcome(outcome(name, request))
    recorder.note(wire.pack_outcome(msgspec.structs.replace(given, causes=causes)))
    recorder.read_notes()
    assert recorder.store.size_bytes >= RECORD_BYTES + PART_BYTES * len(causes)


def test_what_servers_share_has_a_bound_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's file may have gigabytes; the shared one lies in a folder for temporary files."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(recorder, "SHARED_BYTES", 20_000)
    chosen, shared = tmp_path / "chosen.jsonl", tmp_path / SHARED_NAME
    chosen_settings = settings.Settings(observe_file=str(chosen), observe_file_bytes=ByteSize(1 << 30))
    monkeypatch.setattr(settings, "_current", chosen_settings)
    server = Recorder()
    for _ in range(50):
        request = asked(turns=9)
        server.note(outcome(server.waiting.add(request), request))
    server.flush()
    line = chosen.stat().st_size // 50
    assert len(list(read_records(chosen))) == 50
    assert shared.stat().st_size + before(shared).stat().st_size < 20_000 + 2 * line
    assert list(read_records(shared))[-1] == list(read_records(chosen))[-1]
    assert [oct(path.stat().st_mode)[-3:] for path in (shared, before(shared))] == ["600", "600"]


def test_a_first_look_holds_no_more_than_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other servers may have written for hours before somebody looks at the page of this one."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(settings, "_current", settings.Settings(observe_records=5))
    written = RecordFile(tmp_path / SHARED_NAME, lambda: 1 << 40)
    records = many(4 * BATCH_RECORDS)
    for record in records:
        written.write(record)
        if record.id == records[len(records) // 2].id:
            os.replace(written.path, before(written.path))
    made = RecordsMade()
    monkeypatch.setattr(file, "from_json", made.read)
    server = Recorder()
    assert server.store.totals().requests == len(made) == len(records)
    assert [record.id for record in server.store.recent(9)] == [record.id for record in records[:-6:-1]]
    assert made.most <= 2 * BATCH_RECORDS + 5
