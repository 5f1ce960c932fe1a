# SPDX-License-Identifier: Apache-2.0
"""The user's own scheduler stays what it is, on a real engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
ENGINE = """
import os
from pathlib import Path
from tests.support.engine_configuration import CHOSEN
CHOSEN.apply()
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.scenarios import same_again
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

class Own(AsyncScheduler if CHOSEN.is_async else Scheduler):
    steps = 0
    def schedule(self, *args, **kwargs):
        Own.steps += 1
        return super().schedule(*args, **kwargs)

if __name__ == "__main__":
    import sys
    pool = EnginePool(Path(sys.argv[1]), CHOSEN.check)
    rig = pool.get(EngineConfig("gemma3", more=(("scheduler_cls", Own),)))
    rig.assert_exact(same_again(rig))
    scheduler = rig.llm.llm_engine.engine_core.engine_core.scheduler
    from vllm_mmcache.hooking.subclasses import SchedulerMixin
    assert [one.__name__ for one in type(scheduler).__mro__[:3]] == ["Own", "SchedulerMixin", "Own"], type(scheduler)
    assert Own.steps > 0
    pool.close()
    print("own scheduler, own steps")
"""


@pytest.mark.engine
@pytest.mark.any_engine
def test_the_users_own_scheduler_stays(tmp_path: Path) -> None:
    """An engine whose configuration names a class already: its methods run, below ours, and answers are exact."""
    (tmp_path / "own.py").write_text(ENGINE)
    path = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "own.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=600, cwd=REPO, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    assert "own scheduler, own steps" in done.stdout, done.stderr[-3000:]
