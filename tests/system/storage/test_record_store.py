# SPDX-License-Identifier: Apache-2.0
"""Records over a real Valkey, in processes that fork and that end, whatever their tiers do then."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, record_tier
from vllm_mmcache.base.settings import load_settings
from vllm_mmcache.storage.frame import key
from vllm_mmcache.storage.record_store import RecordStore


def test_in_every_tier(server: Server, tmp_path: Path) -> None:
    """As the settings say; another server finds them in Valkey, and writes them to its own directory."""
    for folder, source in (("a", None), ("a", "disk"), ("b", "remote"), ("b", "disk")):
        store = f"{tmp_path / folder} {server.url}"
        records = RecordStore.of(load_settings({"store": store, "store_remote_timeout_s": TIMEOUT_S}))
        assert records.read(key("a"), bytes) == (b"value" if source else None)
        assert {tier: every["hits"] for tier, every in records.counts().items() if every["hits"]} == (
            {source: 1} if source else {}
        )
        if source is None:
            records.put(key("a"), b"value")
        assert records.close(LONG_S)


def run(code: str, *args: object, timeout_s: float = LONG_S) -> list[str]:
    """What the process printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=timeout_s
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


ENDING = """
import sys
from vllm_mmcache.base import settings
from vllm_mmcache.storage import frame, record_store
settings.use(settings.Settings(store=sys.argv[1]))
for number in range(500):
    record_store.current().put(frame.key("a", str(number)), b"value")
"""


@pytest.mark.process
def test_what_is_waiting_is_written_when_the_process_ends(tmp_path: Path) -> None:
    run(ENDING, tmp_path)
    # SQLite has let go of it: a journal is emptied when its transaction ends.
    assert len([path for path in (tmp_path / "records").iterdir() if path.stat().st_size]) == 1
    assert record_tier(tmp_path).backend.sizes()[0] == 500


SLOW = """
import sys, time
from tests.support.tiers import MemoryTier
from vllm_mmcache.base.lru import Budget
from vllm_mmcache.storage import write_behind

def write(items):
    time.sleep(float(sys.argv[1]))
    print(*(key.decode() for key in items), flush=True)

write_behind.EXIT_S = float(sys.argv[2])
waiting = write_behind.WriteBehind(MemoryTier(), write, budget=Budget(9, 9), batch=Budget(1, 1))
for key in (b"a", b"b", b"c"):
    waiting.submit(key, key)
"""


@pytest.mark.process
@pytest.mark.parametrize(("write_s", "exit_s", "written"), [(0.05, LONG_S, ["a", "b", "c"]), (1000, 0.1, [])])
def test_the_end_of_a_process_whose_tier_is_slow(write_s: float, exit_s: float, written: list[str]) -> None:
    """What waits is written first; a tier that hangs keeps no process from its end."""
    assert run(SLOW, write_s, exit_s) == written


FORKED = """
import os, sys
from vllm_mmcache.base import settings
from vllm_mmcache.storage import record_store
from vllm_mmcache.storage.frame import key
settings.use(settings.load_settings({"store": sys.argv[1], "store_remote_timeout_s": 10}))
record_store.current().put(key("a"), b"before")
assert record_store.current().flush(60)
parent = record_store.current()
child = os.fork()
if child == 0:
    assert record_store.current() is not parent
    assert record_store.current().read(key("a"), bytes) == b"before"
    for tier in parent._tiers:  # connections of its own, too
        assert tier.get(key("a"), bytes)[1] == b"before"
    record_store.current().put(key("b"), b"of the child")
    assert record_store.current().close(60)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert record_store.current() is parent
assert record_store.current().read(key("b"), bytes) == b"of the child"
record_store.current().put(key("c"), b"after")
assert record_store.current().close(60)
assert {every["errors"] for name, every in parent.counts().items() if name != "ram"} == {0}
"""


@pytest.mark.process
def test_a_fork_has_connections_of_its_own(tmp_path: Path, server: Server) -> None:
    run(FORKED, f"{tmp_path} {server.url}")
    for store in (str(tmp_path), server.url):
        records = RecordStore.of(load_settings({"store": store, "store_remote_timeout_s": TIMEOUT_S}))
        assert [records.read(key(name), bytes) for name in "abc"] == [b"before", b"of the child", b"after"]
        assert records.close(LONG_S)


FORKED_WHILE_IT_WRITES = """
import os, sys
from tests.support.tiers import MemoryTier
from vllm_mmcache.storage import frame, record_store, write_behind
write_behind.EXIT_S = 1e6
tier = MemoryTier(kind=record_store.RECORDS)
records = record_store.RecordStore(1 << 20, [tier])
tier.writing.shut()
records.put(frame.key("a"), b"value")
assert tier.writing.has_come()
child = os.fork()
if child == 0:
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
tier.writing.open()
assert records.close(60)
print(len(tier.packages))
"""


@pytest.mark.process
def test_a_forked_child_does_not_wait_for_what_its_parent_writes() -> None:
    """It has no thread that would do it."""
    assert run(FORKED_WHILE_IT_WRITES, timeout_s=60) == ["0", "1"]
