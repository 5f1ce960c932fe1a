# SPDX-License-Identifier: Apache-2.0
"""A process ends although a thread that reads for it hangs."""

import subprocess
import sys

import pytest

from tests.support.tiers import LONG_S

EXIT = """
import sys, threading, time
{start}
hanging = threading.Event()
def hang():
    hanging.set()
    while True:
        time.sleep(1)
submit(hang)
hanging.wait()
print("ends", flush=True)
"""
OURS = "from vllm_mmcache.base.worker_threads import Threads; submit = Threads('exit', 2).submit"
POOL = "from concurrent.futures import ThreadPoolExecutor; submit = ThreadPoolExecutor(2).submit"


@pytest.mark.process
@pytest.mark.parametrize(("start", "ends"), [(OURS, True), (POOL, False)], ids=["ours", "a pool"])
def test_the_process_ends_although_a_job_hangs(start: str, ends: bool) -> None:
    """The control: a pool's threads are joined."""
    process = subprocess.Popen([sys.executable, "-c", EXIT.format(start=start)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ends\n"
        if ends:
            assert process.wait(LONG_S) == 0
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
    finally:
        process.kill()
        process.communicate()
