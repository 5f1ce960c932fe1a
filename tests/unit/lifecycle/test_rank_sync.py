# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its ranks of each other, in one process that is one of them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.metrics.stats import SchedulerStats

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.content import image_namer
from vllm_mmcache.lifecycle import activation, rank_sync, trial_hooks
from vllm_mmcache.metrics import hooks as metrics_hooks
from vllm_mmcache.metrics import transport

pytestmark = pytest.mark.usefixtures("no_role")

OFF, NOTHING = State("off", "a reason"), State("unneeded", "no images")


def test_a_rank_is_told_what_is_off_in_another_one() -> None:
    """This process is rank 0. Rank 1 is a process without the component."""
    for role in ("engine", "worker"):
        status.begin(role)
        status.put(role, "metrics", ON)
        status.put(role, "features", NOTHING)
    asked = []

    class Executor:
        def collective_rpc(self, question: Any) -> list[Any]:
            asked.append(question)
            other = rank_sync.as_plain_data({"metrics": OFF, "features": NOTHING})
            return [question(SimpleNamespace(rank=0)), (1, other)]

    found, _ = rank_sync._settle(Executor(), rank_sync.NOT_YET)
    assert len(asked) == 2
    told = State("off", "a reason (worker 1)")
    assert status.of("worker")["metrics"] == told == status.of("engine")["metrics"] == found[0]["metrics"]
    assert status.of("worker")["features"] == NOTHING


SOME, OTHER = "two images could not be tried", "no memory is shared"


@pytest.mark.parametrize(
    ("engine", "rank_0", "rank_1", "said"),
    [
        (ON, State("off", SOME), None, SOME),
        (ON, State("off", SOME), State("off", SOME), SOME),
        (ON, ON, State("off", SOME), f"{SOME} (worker 1)"),
        (ON, State("off", SOME), State("off", OTHER), f"{SOME} (worker 0); {OTHER} (worker 1)"),
        (State("off", OTHER), ON, ON, OTHER),
        (State("off", OTHER), State("off", SOME), ON, f"{SOME} (worker 0); {OTHER} (engine)"),
    ],
    ids=["one worker", "all workers", "one of two", "different reasons", "the engine", "both"],
)
@pytest.mark.parametrize("is_told", [True, False], ids=["ranks with us", "ranks that can't be told"])
def test_the_report_says_a_reason_once(
    engine: State, rank_0: State, rank_1: State | None, said: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was asked again. The control: before they agree, the processes are not alike."""
    ranks = {rank: state for rank, state in enumerate([rank_0, rank_1]) if state is not None}
    status.begin("engine")
    status.put("engine", "features", engine)

    def ask(executor: Any, off: dict[str, str], trial: Any) -> tuple[dict[int, dict[str, State]], list[Any]]:
        for rank in [rank for rank, state in ranks.items() if "features" in off and (is_told or state == ON)]:
            ranks[rank] = State("off", off["features"])
        return {rank: {"features": state} for rank, state in ranks.items()}, []

    def reported(found: dict[int, dict[str, State]]) -> State:
        places = [(f"worker {rank} of engine 0", states["features"]) for rank, states in found.items()]
        return status.combine([("engine 0", status.of("engine")["features"]), *places])

    monkeypatch.setattr(rank_sync, "_ask", ask)
    assert reported(ask(None, {}, rank_sync.NOT_YET)[0]).state == "mixed"
    for _ in range(3):
        found, _ = rank_sync._settle(None, rank_sync.NOT_YET)
        assert reported(found) == State("off", said)


def test_the_report_can_tell_a_rank_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    status.begin("engine")
    status.put("engine", "features", ON)
    without = State("off", rank_sync.NO_MMCACHE)
    answers = {0: {"features": ON}, 1: {"features": without}}
    monkeypatch.setattr(rank_sync, "_ask", lambda *_: (answers, []))
    found, _ = rank_sync._settle(None, rank_sync.NOT_YET)
    assert found == {0: {"features": State("off", f"{without.reason} (worker 1)")}, 1: {"features": without}}


def test_what_is_on_without_a_trial_stays_so_when_the_engine_says_more_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs of the user that have gone since make no component untried; the control: before the engine is ready."""
    ended: list[Any] = []
    monkeypatch.setattr(trial_hooks, "end", ended.append)
    monkeypatch.setattr(status, "is_on", lambda component: False)
    engine = SimpleNamespace(vllm_config=None, scheduler=None, model_executor=None)
    to_try: list[str] = []
    monkeypatch.setattr(activation, "on_trial", lambda vllm_config: to_try)
    status.begin("engine")
    rank_sync.of_ready_engine(engine)
    to_try.append("block_keys")
    rank_sync.of_engine(engine)
    assert not ended
    rank_sync.of_ready_engine(engine)
    assert ended == [engine]


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "on_trial", lambda vllm_config: [])
    monkeypatch.setattr(transport, "_is_heard", True)
    monkeypatch.setattr(transport, "_counted", {"tower_images": 1.0})
    monkeypatch.setattr(status, "is_on", {"metrics": True}.get)


def tell_of_servers(*addresses: str) -> None:
    """The engine is ready, and has API servers at these addresses."""
    engine = SimpleNamespace(
        addresses=SimpleNamespace(outputs=addresses), vllm_config=None, scheduler=None, model_executor=None
    )
    rank_sync.send_report(dict, engine, (), {})


@pytest.mark.parametrize("address", ["ipc:///tmp/a", "tcp://10.0.0.1:5000"])
def test_an_engine_sends_nothing_to_far_servers_before_one_of_them_has_marked_a_request(
    listening: None, address: str
) -> None:
    """Of two, the second one being without mmcache: vLLM's log of statistics would end its output there."""
    tell_of_servers("ipc:///tmp/b", address)
    request: Any = SimpleNamespace(
        sampling_params=SamplingParams(), pooling_params=None, mm_features=["an image"], request_id="a"
    )

    def sent() -> bool:
        return bool((metrics_hooks.send(SchedulerStats, None, (), {}).ec_connector_stats or {}).get(transport.KEY))

    def add(request: Any) -> None:
        rank_sync.note_listener(lambda request: None, None, (request,), {})

    add(request)
    assert sent() == address.startswith("ipc")
    image_namer.mark(request, None)
    add(request)
    transport.count("tower_images", 1.0)
    assert sent()


def test_with_identity_off_no_request_is_marked_and_nothing_is_waited_for(
    listening: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(identity=False))
    tell_of_servers("tcp://10.0.0.1:5000")
    assert transport.is_heard()
