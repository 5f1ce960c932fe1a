# SPDX-License-Identifier: Apache-2.0
"""The audit on real engines: right engines match, planted faults are found, and users notice nothing.

The engine is in this process, so the tests do what its loop does: they say when work arrives and when there is none.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from tests.support.planted_faults import FAULTS, plant
from tests.support.sizes import larger
from tests.support.towers import ask_about, question, slots, spoil
from vllm_mmcache.audit import hooks
from vllm_mmcache.audit.auditor import Auditor
from vllm_mmcache.base import settings, status, uses
from vllm_mmcache.base.status import State
from vllm_mmcache.exactness.conversations import filler, one, picture, user
from vllm_mmcache.metrics import counters
from vllm_mmcache.prove import workers
from vllm_mmcache.prove.checks import words_before

pytestmark = pytest.mark.engine

FAMILIES = ("qwen3-vl", "gemma3")
NUM_REQUESTS = 100
MOST_STEPS = 6
"""Of an audit that finds a match: two questions, and what a step needs to end."""


class Audited:
    """An engine of the pool with an audit of all its requests."""

    def __init__(self, rig: ZooRig, counted: Counter[tuple[str, str]]) -> None:
        self.rig = rig
        self.core = rig.llm.llm_engine.engine_core.engine_core
        self.auditor: Auditor = hooks.attach(self.core)
        self.counted = counted

    def idle(self) -> int:
        """What the engine's loop does until there is nothing to do. Returns the number of steps."""
        steps = 0
        for _ in range(100):
            while self.core._idle_state_callbacks:
                self.core._idle_state_callbacks.pop()(self.core)
            if not self.core.scheduler.has_requests() and not self.core.batch_queue:
                return steps
            while self.core.scheduler.has_requests() or self.core.batch_queue:
                outputs, is_executed = self.core.step_fn()
                self.core.post_step(is_executed)
                assert not any(one.outputs for one in (outputs or {}).values()), "a client sees the audit's answers"
                steps += 1
        raise AssertionError("it never ends")

    def ask(self, *conversations: Any) -> list[Any]:
        """Requests of users, one after the other, each audited when the engine has nothing to do."""
        answers = []
        for messages in conversations:
            self.auditor.on_work()
            answers.append(one(self.rig, *messages))
            self.idle()
        return answers

    def of(self, result: str) -> int:
        """Results of this kind so far, of all components."""
        return sum(number for (_, found), number in self.counted.items() if found == result)


@pytest.fixture
def audited(alone: EnginePool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Audited]:
    """Starts an engine of a family, with an audit of all its requests."""
    for name, value in {"AUDIT": "1", "AUDIT_TIME": "100"}.items():
        monkeypatch.setenv(f"MMCACHE_{name}", value)
    monkeypatch.setattr(settings, "_current", settings.load_settings())
    monkeypatch.setattr(uses, "_is_wanted", False)
    counted: Counter[tuple[str, str]] = Counter()
    monkeypatch.setattr(counters.AUDIT, "add", lambda n, *labels: counted.update({labels: n}))

    def start(family: str) -> Audited:
        return Audited(alone.get(EngineConfig(family)), counted)

    return start


def steps_of(on: Audited, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps that the engine has begun from now on, in a list of one."""
    schedule, steps = on.core.scheduler.schedule, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return schedule(*args, **kwargs)

    monkeypatch.setattr(on.core.scheduler, "schedule", counting)
    return steps


def kept(on: Audited) -> dict[str, Any]:
    """All that the engine keeps for later requests."""
    scheduler = on.core.scheduler
    pool, encoder = scheduler.kv_cache_manager.block_pool, scheduler.encoder_cache_manager
    return {
        "requests": dict(scheduler.requests),
        "blocks": set(pool.cached_block_hash_to_block._cache),
        "free": pool.get_num_free_blocks(),
        "encoder": dict(encoder.num_embeds_by_hash),
        "encoder room": encoder.num_free_slots,
        "features": set(slots(on.rig)),
        "step": scheduler.max_num_scheduled_tokens,
        "set": {"allocate_slots", "cache_blocks"} & vars(scheduler.kv_cache_manager).keys(),
    }


@pytest.mark.any_engine
def test_nothing_is_kept_on_any_engine(audited: Callable[..., Audited]) -> None:
    """As below, shortly: async scheduling has a way of its own to put blocks into the cache."""
    on = audited("qwen3-vl")
    on.rig.make_cold()
    words = filler(words_before(on.rig))
    for number in range(3):
        on.auditor.on_work()
        one(on.rig, user(words, picture(0), "What is it?" + filler(20 + number)))
        before = kept(on)
        on.idle()
        assert kept(on) == before
    assert {result for _, result in on.counted} == {"match"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_engine_matches_and_nothing_is_kept(audited: Callable[..., Audited], family: str) -> None:
    on = audited(family)
    on.rig.make_cold()
    asked: list[tuple[str, Any]] = []
    add = on.core.add_request
    on.core.add_request = lambda request, *args: (asked.append((uses.run_of(request), request)), add(request, *args))[1]
    answers = []
    for number in range(36):
        if number % 3 == 0:
            on.rig.forget_all_but_features()
        words = filler(words_before(on.rig))
        on.auditor.on_work()
        answers.append(one(on.rig, user(words, picture(number // 3 % 4), "What is it?" + filler(20 + number))))
        before = kept(on)
        on.idle()
        assert kept(on) == before
    print(family, dict(on.counted))
    assert {result for _, result in on.counted} == {"match"}
    audits = sum(run == "warm" for run, _ in asked)
    assert audits >= 30
    assert len(on.auditor._samples) == 0
    on.rig.assert_exact(answers[:4])
    users = {feature.identifier for run, request in asked if not run for feature in request.mm_features}
    salts = [request.cache_salt for run, request in asked if run == "cold"]
    assert len(set(salts)) == len(salts) >= audits
    for run, request in asked:
        names = {feature.identifier for feature in request.mm_features}
        assert names.isdisjoint(users) if run == "cold" else names <= users
        assert request.cache_salt is None or run == "cold"


@pytest.mark.parametrize("family", FAMILIES)
def test_spoiled_features_are_found_and_switched_off(
    audited: Callable[..., Audited], request: pytest.FixtureRequest, family: str
) -> None:
    on = audited(family)
    log: pytest.LogCaptureFixture = request.getfixturevalue("log")  # the process's first engine takes handlers away
    for number in range(3):
        assert status.is_on("features")
        on.ask([question(number)])
        assert spoil(on.rig) == 1
        on.rig.forget_all_but_features()
        on.ask([question(number)])
        on.rig.forget_features()
        on.rig.forget_all_but_features()
    assert on.counted["features", "mismatch"] == 3
    assert sum(number for (_, result), number in on.counted.items() if result == "mismatch") == 3
    reason = "3 answers in the audit were not those of cold runs"
    assert status.in_force()["features"] == State("off", reason)
    assert f"features is switched off: {reason}" in log.text
    assert log.text.count("the audit found an answer") == 3
    on.rig.assert_exact(ask_about(on.rig, 0, 1, 2))


@pytest.mark.parametrize(
    ("family", "component"),
    [("qwen3-vl", "block_keys"), ("gemma3", "image_checkpoints")],
)
def test_spoiled_kv_is_found(audited: Callable[..., Audited], family: str, component: str) -> None:
    on = audited(family)
    for number in range(3):
        assert status.is_on(component)
        words = filler(words_before(on.rig))
        on.ask([user(words, picture(number, (448, 448)), "What is it?" + filler(200))])
        assert all(on.rig.in_workers(workers.spoil_kv))
        on.ask([user(words, picture(number, (448, 448)), "And what is at its edge?" + filler(210))])
        on.rig.make_cold()
    assert on.counted[component, "mismatch"] == 3
    assert status.in_force()[component].state == "off"


SEEN = [
    pytest.param(family, name, marks=() if (family, name) == ("gemma3", "keys_forget_the_second_image") else larger)
    for name, fault in FAULTS.items()
    for family in (*FAMILIES, "gemma4")
    if family in fault.families and fault.component != "image_spans"  # a cold run has that fault, too
]


@pytest.mark.parametrize(("family", "name"), SEEN)
def test_a_planted_fault_is_seen(
    audited: Callable[..., Audited], family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of ten rounds, one question reuses what the fault has spoilt. Prints the results of all audits."""
    monkeypatch.setenv("MMCACHE_AUDIT_MISMATCHES", "1000000")
    monkeypatch.setattr(settings, "_current", settings.load_settings())
    on = audited(family)
    fault = FAULTS[name]
    plant(name, monkeypatch.setattr)
    words, size = filler(words_before(on.rig)), (448, 448)
    for number in range(10):
        one_of, other, third = (picture(3 * number + place, size) for place in range(3))
        for second, length in ((other, 200), (other, 210), (third, 220)):
            on.ask([user(words, one_of, "and", second, "What are they?" + filler(length))])
        on.rig.forget_all_but_features()
        on.ask([user("Once more: " + words, one_of, "and", other, "What are they?" + filler(200))])
        on.rig.make_cold()
    results = {result: count for (component, result), count in on.counted.items() if component == fault.component}
    print(f"{family}, {name}: {results}; all: {dict(on.counted)}")
    assert results["mismatch"] == 10
    blamed = {component for (component, result) in on.counted if result == "mismatch"}
    of_kv = {"block_keys", "image_checkpoints", "image_spans"}  # it can't be told which of these made KV wrong
    assert blamed == (of_kv if fault.component == "image_checkpoints" else {fault.component})


def test_users_notice_nothing(audited: Callable[..., Audited], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, hits and steps with the audit and without; a request that arrives ends the audit's."""
    on = audited("qwen3-vl")
    steps = steps_of(on, monkeypatch)

    def talk(*, is_audited: bool, is_cut: bool) -> list[Any]:
        found = []
        on.rig.make_cold()
        for number in range(12):
            if is_audited:
                on.auditor.on_work()
                assert not on.core.scheduler.requests
            before = steps[0]
            (answer,) = ask_about(on.rig, number % 3)
            found.append((steps[0] - before, answer.num_cached_tokens, answer.token_ids, answer.logprobs))
            if is_audited and is_cut and number > 2:
                while on.core._idle_state_callbacks:
                    on.core._idle_state_callbacks.pop()(on.core)
                assert on.auditor.is_asking
                for _ in range(number % 2):
                    on.core.step_fn()
            elif is_audited:
                on.idle()
        return found

    cut = talk(is_audited=True, is_cut=True)
    assert on.auditor.num_cut >= 8
    on.auditor.on_work()
    on.idle()
    with_audit = talk(is_audited=True, is_cut=False)
    assert on.of("match") >= 9
    for owner in (on.core, on.core.scheduler):
        delattr(owner, hooks.AUDITOR)
    on.core._idle_state_callbacks.clear()
    without = talk(is_audited=False, is_cut=False)
    assert with_audit == without
    assert [one[1:] for one in cut] == [one[1:] for one in without]
    # A step that only tells the workers that the audit's request has ended may come before.
    assert all(abs(one[0] - other[0]) <= 1 for one, other in zip(cut, without, strict=True))


@larger
def test_what_a_share_costs_in_steps(audited: Callable[..., Audited], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 requests a share of 0.01 has one audited, and one of 0.1 ten; no user's request takes a step more.

    An audit's steps do not depend on the share: 0.001 has one in 1,000 requests.
    """
    on = audited("qwen3-vl")
    steps = steps_of(on, monkeypatch)
    asked: Counter[str] = Counter()
    ask = on.auditor._engine.ask
    monkeypatch.setattr(
        on.auditor._engine, "ask", lambda sample, run, **how: (asked.update([run]), ask(sample, run, **how))[1]
    )
    ask_about(on.rig, 0, 1, 2)

    def talk(share: float, num_requests: int) -> tuple[set[int], int]:
        """The steps of a user's request, all that there are; and how many came while no user asked."""
        monkeypatch.setenv("MMCACHE_AUDIT", f"{share}")
        monkeypatch.setattr(settings, "_current", settings.load_settings())
        monkeypatch.setattr(on.auditor, "_draw", (number / num_requests for number in range(num_requests)).__next__)
        of_users, while_idle = set(), 0
        for number in range(num_requests):
            on.auditor.on_work()
            before = steps[0]
            one(on.rig, question(number % 3), max_tokens=1)
            of_users.add(steps[0] - before)
            while_idle += on.idle()
        return of_users, while_idle

    # A request that has ended takes as many steps on each engine, which tell the workers of it.
    talk(0.0, 3)
    without, to_end = talk(0.0, NUM_REQUESTS)
    assert (to_end % NUM_REQUESTS, asked) == (0, {})
    assert to_end <= 2 * NUM_REQUESTS
    for share, num_audits in {0.01: 1, 0.1: 10}.items():
        asked.clear()
        of_users, while_idle = talk(share, NUM_REQUESTS)
        of_audit = while_idle - to_end
        print(f"share {share}: a user's request {of_users} steps, audit {dict(asked)} questions, {of_audit} steps")
        assert of_users == without
        assert asked == {"warm": num_audits, "cold": num_audits}
        assert 0 < of_audit <= MOST_STEPS * num_audits
