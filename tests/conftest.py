# SPDX-License-Identifier: Apache-2.0
"""The engine pool of the tests in engine/, the size of property tests, and an order that starts each engine once.

A run is about one engine configuration (support/engine_configuration.py). On V1, vLLM's own choice here, it is all
tests; on V2 with async scheduling it is those marked `any_engine`, on V2 without it those that support/synchronous.py
lists, and with TEST_MATRIX=1 all that start an engine. `make test` runs all three, and with TEST_PARTS=1 the one on V1
leaves to V2 what is marked `any_engine`, unless it is marked `every_engine`, too. Tests marked `interpreter` run
Triton's kernels: on V2 with async scheduling all of them, on V1 none, where nothing interprets Triton.

The fast lane (`make test-fast`, -m fast) is what needs no process and no seconds: all tests but those marked `engine`,
`gpu`, `interpreter`, `process` or `slow` and those whose fixtures start a program. A fast test that starts a process or
an engine all the same fails (support/no_processes.py).

A test that fails is tried once more, and both are in the summary: processes, threads and sockets on a busy machine
have their own time. A wrong answer gets no second try: tests marked `answers`, and those that use the engine pool.

With pytest-xdist (`make test`), each worker has an engine pool of its own, and the tests of one engine configuration,
like those of one file or of a folder that shares servers, go to one worker. Engines then take one thread each: the
models are tiny. Nothing is compiled, unless all is run: torch would take seconds in each engine, at its first answer,
and numba half a minute for the ngram drafter.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engine_configuration import CHOSEN
from tests.support.left_to_matrix import is_left, is_left_on_v2
from tests.support.no_processes import no_processes
from tests.support.sizes import LARGER_FAMILIES, WHOLE, larger, scaled
from tests.support.synchronous import is_synchronous

if TYPE_CHECKING:
    from mmcache_tools.harness.engines import EnginePool

CHOSEN.apply()
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
if not WHOLE:
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "NUMBA_DISABLE_JIT": "1"}

# What starts a process or an engine: tests with these marks, and fixtures of these names.
STARTING = ("engine", "gpu", "interpreter", "process")
PROGRAMS = frozenset({"binary", "browser", "pool", "running_server"})

# The number is of the property tests that don't name their own. None is about how fast this machine is.
settings.register_profile(
    "scaled", max_examples=scaled(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("scaled")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """At most one engine alive; closed at the end of the session."""
    from mmcache_tools.harness.engines import EnginePool

    engines = EnginePool(tmp_path_factory.mktemp("zoo"), CHOSEN.check)
    yield engines
    engines.close()


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What engines keep of their trials, and what is read of it, is not the user's."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module", autouse=True)
def the_plugin_stays() -> Iterator[None]:
    """Fails a file that takes the plugin out of its process, in place of the tests of other files after it."""
    from tests.support.plugin_stays import plugin_stays

    with plugin_stays():
        yield


@pytest.fixture
def no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has taken no role on, without settings."""
    from vllm_mmcache.base.settings import Settings

    monkeypatch.setattr("vllm_mmcache.base.status._states", {})
    monkeypatch.setattr("vllm_mmcache.base.status._is_on", {})
    monkeypatch.setattr("vllm_mmcache.base.settings._current", Settings())


@pytest.fixture(scope="module")
def nothing_stays_installed() -> Iterator[None]:
    """The roles that a file has taken on end, and what they have installed is undone.

    What vLLM has had the plugin register stays, since it asks once in a process.
    """
    from vllm_mmcache.base import status
    from vllm_mmcache.hooking import installer
    from vllm_mmcache.lifecycle.registry import FIRST

    before, states = set(installer._installed), dict(status._states)
    yield
    status._states.clear()
    status._states.update(states)
    status._refresh()
    for group in reversed([group for group in installer._installed if group not in {*before, FIRST.name}]):
        installer.undo(group)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What our own logger says, each once, whether or not another test has had vLLM set up its loggers."""
    ours = logging.getLogger("vllm.mmcache")
    monkeypatch.setattr(ours, "propagate", False)
    monkeypatch.setattr(ours, "handlers", [caplog.handler])
    return caplog


def pytest_report_header() -> str:
    return f"engines: {CHOSEN}"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing to run on a second engine is no failure: `make test ARGS="-k page"` runs on both."""
    if CHOSEN.runner != 1 and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def engine_of(item: pytest.Item) -> str:
    """The engine configuration that a test takes from the pool; empty where it takes none."""
    if "pool" not in getattr(item, "fixturenames", ()):
        return ""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return str(params.get("config", item.path))


def starts(item: pytest.Item) -> bool:
    """Whether a test starts a process or an engine."""
    marked = any(item.get_closest_marker(name) is not None for name in STARTING)
    return marked or not PROGRAMS.isdisjoint(getattr(item, "fixturenames", ()))


def is_fast(item: pytest.Item) -> bool:
    """Whether a test is of the fast lane."""
    return not starts(item) and item.get_closest_marker("slow") is None


def guarded(item: pytest.Item) -> AbstractContextManager[None]:
    """For a fast test, a block that fails where it starts a process or an engine."""
    return no_processes() if item.get_closest_marker("fast") is not None else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with guarded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with guarded(item):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is fast, and say to pytest-xdist which tests go to one worker; a folder's conftest may have said so."""
    if is_fast(item):
        item.add_marker(pytest.mark.fast)
    if is_synchronous(item.nodeid):
        item.add_marker(pytest.mark.synchronous)
    engine = engine_of(item)
    if engine:
        item.add_marker(pytest.mark.xdist_group(f"engine-{zlib.crc32(engine.encode()):x}"))
    elif item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share engines come last, those of the most used configuration first; all else keeps its place.

    So two workers end at about the same time.
    """
    part = "any_engine" if CHOSEN.is_async else "synchronous"
    marker = "engine" if WHOLE else part
    left_to_v2 = os.environ.get("TEST_PARTS") == "1"

    def belongs(item: pytest.Item) -> bool:
        if item.get_closest_marker("interpreter") is not None:
            return CHOSEN.is_async
        if CHOSEN.runner == 1:
            on_both = item.get_closest_marker("every_engine") is not None or is_left_on_v2(item.nodeid)
            return not left_to_v2 or on_both or item.get_closest_marker("any_engine") is None
        if CHOSEN.is_async and not WHOLE and is_left_on_v2(item.nodeid):
            return False
        return item.get_closest_marker(marker) is not None

    config.hook.pytest_deselected(items=[item for item in items if not belongs(item)])
    items[:] = [item for item in items if belongs(item)]

    engines = Counter(map(engine_of, items))
    items.sort(key=lambda item: (bool(engine_of(item)), -engines[engine_of(item)], engine_of(item)))
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if getattr(params.get("config"), "family", "") in LARGER_FAMILIES or is_left(item.nodeid):
            item.add_marker(larger)
        if item.get_closest_marker("answers") is None and not engine_of(item):
            item.add_marker(pytest.mark.flaky(reruns=1))
