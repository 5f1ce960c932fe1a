# SPDX-License-Identifier: Apache-2.0
"""Records and the processes that write them: ids that no two make, and what is written when one ends."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from vllm_mmcache.components.observe.record.file import read_records


@pytest.mark.process
def test_no_two_processes_make_one_id() -> None:
    program = (
        "import os\n"
        "from tests.unit.components.observe.record.test_recorder import asked\n"
        "from vllm_mmcache.components.observe.record.recorder import RECORDER\n"
        "child = os.fork()\n"
        "os.write(1, f'{RECORDER.waiting.add(asked())} '.encode())\n"
        "child and os.waitpid(child, 0)\n"
    )
    run = partial(subprocess.check_output, [sys.executable, "-c", program], cwd=Path(__file__).parents[5], text=True)
    names = [*run().split(), *run().split()]
    assert len(set(names)) == 4
    assert all(re.fullmatch("[0-9a-f]{8}-1", name) for name in names)


@pytest.mark.process
def test_the_last_records_reach_the_file_when_the_process_ends(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    program = (
        "from tests.unit.components.observe.record.test_recorder import asked, outcome\n"
        "from vllm_mmcache.components.observe.record.recorder import RECORDER\n"
        "for name in 'ab':\n"
        "    request = asked(name)\n"
        "    RECORDER.note(outcome(RECORDER.waiting.add(request), request))\n"
    )
    environ = os.environ | {"MMCACHE_OBSERVE_FILE": str(file)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, cwd=Path(__file__).parents[5])
    assert [record.request_id for record in read_records(file)] == ["a", "b"]
