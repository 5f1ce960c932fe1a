# SPDX-License-Identifier: Apache-2.0
"""The RAM tier keeps what was used last, within its budget."""

import threading

from tests.features.packages import identity, package
from vllm_mmcache.features.ram import RamTier

SIZE = package().num_bytes


def test_the_one_used_longest_ago_goes_first() -> None:
    tier = RamTier(3 * SIZE)
    for number in range(3):
        tier.save(identity(number), package(number))
    kept = tier.load(identity(0))
    tier.save(identity(3), package(3))
    assert [tier.has(identity(number)) for number in range(4)] == [True, False, True, True]
    assert tier.load(identity(0)) is kept
    counts = tier.counters.snapshot()
    assert (counts["evictions"], counts["held_bytes"], counts["hits"]) == (1, 3 * SIZE, 2)


def test_larger_than_the_budget_is_not_kept() -> None:
    tier = RamTier(SIZE)
    tier.save(identity(0), package())
    tier.save(identity(1), package(num_tokens=64))
    assert tier.has(identity(0))
    assert not tier.has(identity(1))
    assert tier.counters.snapshot()["dropped"] == 1
    none = RamTier(0)
    none.save(identity(), package())
    assert none.load(identity()) is None


def test_saving_again_does_not_count_twice() -> None:
    tier = RamTier(3 * SIZE)
    for _ in range(10):
        tier.save(identity(), package())
    assert tier.counters.snapshot()["held_bytes"] == SIZE
    tier.clear()
    assert tier.counters.snapshot()["held_bytes"] == 0
    assert tier.load(identity()) is None


def test_threads() -> None:
    tier = RamTier(5 * SIZE)
    packages = [package(number) for number in range(20)]
    wrong: list[int] = []

    def work(start: int) -> None:
        for step in range(2000):
            number = (start + step * 7) % 20
            found = tier.load(identity(number))
            if found is None:
                tier.save(identity(number), packages[number])
            elif found is not packages[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = tier.counters.snapshot()
    assert not wrong
    assert counts["hits"] + counts["misses"] == 8000
    assert counts["held_bytes"] == 5 * SIZE
