# SPDX-License-Identifier: Apache-2.0
"""`make test-fast` has the tests that it should, and its guard sees each way to start a process or an engine."""

import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from tests import conftest
from tests.support.no_processes import no_processes
from tests.unit import conftest as unit

TRUE = [sys.executable, "-c", ""]
refused = pytest.raises(pytest.fail.Exception, match="a test that may start nothing starts a")


def start_and_catch() -> None:
    with contextlib.suppress(BaseException):
        subprocess.run(TRUE, check=True)


def start_in_asyncio() -> None:
    with contextlib.suppress(BaseException):
        asyncio.run(asyncio.create_subprocess_exec(*TRUE))


def in_thread(function: Callable[[], None]) -> None:
    """Call it in a thread of its own, where no event loop runs: a test with a browser leaves one in the main thread."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


WAYS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run(TRUE, check=True),
    "asyncio": lambda: in_thread(start_in_asyncio),
    "system": lambda: os.system("true"),
    "fork": os.fork,
    "posix_spawn": lambda: os.posix_spawn(sys.executable, TRUE, {}),
    "multiprocessing": multiprocessing.get_context("spawn").Process(target=print).start,
    "multiprocessing by fork": multiprocessing.get_context("fork").Process(target=print).start,
    "in a thread": lambda: in_thread(start_and_catch),
    "caught": start_and_catch,
    "an engine": lambda: torch.distributed.init_process_group("gloo", rank=0, world_size=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_refused(way: str) -> None:
    with refused, no_processes():
        WAYS[way]()


def test_what_starts_nothing_passes() -> None:
    """The control; and a block within a block has its own."""
    with no_processes():
        Path("/proc/self/stat").read_text()
        with refused, no_processes():
            os.system("true")
    assert not torch.distributed.is_initialized()


@pytest.fixture
def started() -> None:
    subprocess.run(TRUE, check=True)


@pytest.mark.xfail(raises=pytest.fail.Exception, reason="the guard sees it", strict=True)
def test_the_lane_fails_a_test_that_starts_a_process() -> None:
    """Negative control: this test is fast, so the guard is up."""
    subprocess.run(TRUE, check=True)


@pytest.mark.usefixtures("started")
@pytest.mark.xfail(raises=pytest.fail.Exception, reason="the guard sees it", strict=True)
def test_the_lane_fails_a_test_whose_fixture_starts_a_process() -> None:
    """Negative control: this test is fast, so the guard is up."""


@pytest.mark.parametrize(
    ("marks", "fixtures", "expected"),
    [
        ([], ["tmp_path"], True),
        (["any_engine"], [], True),
        (["engine"], [], False),
        (["process"], [], False),
        (["slow"], [], False),
        (["interpreter"], [], False),
        ([], ["pool"], False),
        ([], ["tmp_path", "running_server"], False),
    ],
)
def test_what_is_fast(marks: list[str], fixtures: list[str], expected: bool) -> None:
    item: Any = SimpleNamespace(fixturenames=fixtures, get_closest_marker=lambda name: name in marks or None)
    assert conftest.is_fast(item) == expected


def test_every_name_is_of_a_fixture() -> None:
    """A fixture that has another name now would let its tests into the lane."""
    tests = Path(__file__).parents[1]
    places = (*tests.rglob("conftest.py"), tests / "support" / "store_server.py")
    defined = "".join(path.read_text() for path in places)
    assert [name for name in conftest.PROGRAMS if f"\ndef {name}(" not in defined] == []


def test_unit_has_no_test_that_starts_something() -> None:
    """Neither by a mark nor by a fixture; what hides its start is for the guard."""
    for marks, fixtures in (["process"], []), (["engine"], []), ([], ["pool"]):
        item: Any = SimpleNamespace(
            fixturenames=fixtures, nodeid="test", get_closest_marker=lambda n, m=marks: n in m or None
        )
        with pytest.raises(pytest.UsageError, match="test starts a process or an engine"):
            unit.pytest_itemcollected(item)
    allowed: Any = SimpleNamespace(
        fixturenames=["tmp_path"], nodeid="test", get_closest_marker=lambda n: n == "slow" or None
    )
    unit.pytest_itemcollected(allowed)
