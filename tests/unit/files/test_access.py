# SPDX-License-Identifier: Apache-2.0
"""Calls of a place of files that end, that are late, and that wait for others."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.files import access
from vllm_mmcache.files.access import Access


def asked(place: Access, is_async: bool, *calls: Callable[[], Any]) -> list[Any]:
    """What calls give that are made at once, or their errors."""
    if is_async:

        async def ask() -> list[Any]:
            return await asyncio.gather(*map(place.wait_for_async, calls), return_exceptions=True)

        return asyncio.run(ask())
    found: list[Any] = [None] * len(calls)

    def wait(number: int) -> None:
        try:
            found[number] = place.wait_for(calls[number])
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_wait_for_each_other_for_as_long_as_it_takes(is_async: bool) -> None:
    """Only the time of a call itself counts."""
    place, num_calls = Access("reading", 2), 9 * access.THREADS
    start = time.monotonic()
    assert asked(place, is_async, *[lambda: time.sleep(0.3) or 7] * num_calls) == [7] * num_calls
    assert time.monotonic() - start > 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_is_late(is_async: bool) -> None:
    """It fails, as do those that wait for its thread; then nobody asks for a while, and nobody waits."""
    place, ends = Access("reading", 0.2), threading.Event()
    start = time.monotonic()
    found = asked(place, is_async, *[lambda: ends.wait(30)] * (2 * access.THREADS))
    assert {type(one) for one in found} == {FilesUnusable}
    assert time.monotonic() - start < 5
    called: list[int] = []
    (error,) = asked(place, is_async, lambda: called.append(1))
    assert isinstance(error, FilesUnusable)
    assert not called
    ends.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_that_wait_when_the_place_has_rested(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not left waiting for threads that hang, although nobody fails any more."""
    monkeypatch.setattr(access, "REST_S", (0.05, 0.05))
    monkeypatch.setattr(access, "POLL_S", 0.3)
    place, ends, is_late = Access("reading", 0.5), threading.Event(), threading.Event()
    first = threading.Thread(target=asked, args=(place, is_async, *[lambda: ends.wait(30)] * access.THREADS))
    first.start()
    threading.Timer(0.3, is_late.set).start()
    is_late.wait()
    start = time.monotonic()
    found = asked(place, is_async, *[lambda: ends.wait(30)] * 3)
    assert {type(one) for one in found} == {FilesUnusable}
    assert time.monotonic() - start < 5
    ends.set()
    first.join(10)


def test_long_calls_that_take_all_threads_are_the_places_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for as long as they may, and the log says what is wrong."""
    place, ends = Access("writing", 0.1), threading.Event()

    async def ask() -> None:
        hang = [
            asyncio.ensure_future(place.wait_for_async(lambda: ends.wait(30), longest_s=0.4))
            for _ in range(access.THREADS)
        ]
        await asyncio.sleep(0.2)
        start = time.monotonic()
        with pytest.raises(FilesUnusable):
            await place.wait_for_async(lambda: 7)
        assert time.monotonic() - start < 5
        assert {type(one) for one in await asyncio.gather(*hang, return_exceptions=True)} == {FilesUnusable}

    asyncio.run(ask())
    assert "all threads wait for it" in caplog.text
    ends.set()


def test_a_long_call_that_is_late_is_not_the_places_failure() -> None:
    place, ends = Access("writing", 1), threading.Event()

    async def ask() -> None:
        with pytest.raises(FilesUnusable):
            await place.wait_for_async(lambda: ends.wait(30), longest_s=0.3)
        assert await place.wait_for_async(lambda: time.sleep(1.2) or 7, longest_s=20) == 7
        assert await place.wait_for_async(lambda: 8) == 8
        with pytest.raises(FilesUnusable):
            await place.wait_for_async(lambda: ends.wait(30))
        with pytest.raises(FilesUnusable):
            await place.wait_for_async(lambda: 8)

    asyncio.run(ask())
    ends.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_errors_of_a_call_are_its_own(is_async: bool) -> None:
    def fail() -> None:
        raise TimeoutError("of the call")

    place = Access("reading", 5)
    (error,) = asked(place, is_async, fail)
    assert str(error) == "of the call"
    assert asked(place, is_async, lambda: 7) == [7]
