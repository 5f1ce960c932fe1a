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
    place, num_calls = Access("reading", 0.5), 8 * access.THREADS
    start = time.monotonic()
    assert asked(place, is_async, *[lambda: time.sleep(0.15) or 7] * num_calls) == [7] * num_calls  # type: ignore[func-returns-value]
    assert time.monotonic() - start > 2 * 0.5


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
def test_errors_of_a_call_are_its_own(is_async: bool) -> None:
    def fail() -> None:
        raise TimeoutError("of the call")

    place = Access("reading", 5)
    (error,) = asked(place, is_async, fail)
    assert str(error) == "of the call"
    assert asked(place, is_async, lambda: 7) == [7]


def test_threads_that_hang_end_with_the_process() -> None:
    """The interpreter waits for no thread of a place."""
    place, ends = Access("reading", 0.1), threading.Event()
    asked(place, False, lambda: ends.wait(30))
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("mmcache-files-reading"))
    ends.set()
