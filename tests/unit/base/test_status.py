# SPDX-License-Identifier: Apache-2.0
"""What wrappers are told: the decision of each role of a process, and what several processes come to together."""

import pytest

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.role import ROLES
from vllm_mmcache.base.status import ON, State

pytestmark = pytest.mark.usefixtures("no_role")
OFF, NOTHING = State("off", "a reason"), State("unneeded", "no images")


def test_a_component_is_on_where_all_roles_of_the_process_say_so() -> None:
    for role in ROLES:
        status.begin(role)
        status.put(role, "metrics", ON)
        assert status.is_on("metrics")
    for state in (OFF, NOTHING):
        status.put("worker", "metrics", state)
        assert not status.is_on("metrics")
        assert status.of("worker")["metrics"] == state
    status.put("worker", "metrics", ON)
    assert status.is_on("metrics")


def test_another_engine_begins_anew() -> None:
    for role in ROLES:
        status.begin(role)
        status.put(role, "metrics", OFF)
    status.begin("engine")
    assert status.roles() == ("api", "engine")
    assert status.of("api") == {"metrics": OFF}, "the role before it stays"
    assert status.of("engine") == {} == status.of("worker")


def test_a_role_that_a_process_does_not_have_is_not_asked() -> None:
    status.begin("api")
    status.put("engine", "metrics", OFF)
    assert status.roles() == ("api",)
    assert status.is_on("metrics")


def test_no_answer_is_missing_while_another_is_put() -> None:
    """Of two components that are off, one is asked for while the first is being looked at: as from another thread."""
    seen = []

    class Asking(str):
        def __eq__(self, other: object) -> bool:
            seen.append(status.is_on("metrics"))
            return super().__eq__(other)

        __hash__ = str.__hash__

    status.begin("engine")
    for component, state in (("features", State(Asking("off"))), ("metrics", OFF)):  # type: ignore[arg-type]
        status.put("engine", component, state)
    seen.clear()
    status.put("engine", "metrics", OFF)
    assert seen == [False]


def test_before_a_decision_what_is_wanted_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status.is_on("features")
    assert not status.is_on("observe")
    monkeypatch.setattr(settings, "_current", settings.Settings(features=False, observe=True))
    assert not status.is_on("features")
    assert status.is_on("observe")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], State("off", "no process has said what it is")),
        ([ON, ON], ON),
        ([ON, NOTHING], ON),
        ([NOTHING, NOTHING], NOTHING),
        ([OFF, OFF], OFF),
        ([OFF, State("off", "another")], State("off", "a reason (0); another (1)")),
        ([OFF, NOTHING], State("off", "a reason (0)")),
        ([ON, OFF, ON], State("mixed", "on in 0, 2; off: a reason (1)")),
    ],
)
def test_together(states: list[State], expected: State) -> None:
    assert status.combine((str(place), state) for place, state in enumerate(states)) == expected
    assert bool(status.why_off((str(place), state) for place, state in enumerate(states))) == (OFF in states)
