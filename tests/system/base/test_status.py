# SPDX-License-Identifier: Apache-2.0
"""A process that was forked has no role of its parent's."""

import os

import pytest

from tests.unit.base.test_status import OFF
from vllm_mmcache.base import status

pytestmark = pytest.mark.usefixtures("no_role")


@pytest.mark.process
def test_a_forked_process_has_no_role() -> None:
    status.begin("api")
    status.put("api", "metrics", OFF)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, f"{status.roles()} {status.is_on('metrics')}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"() True"
    assert status.process_name() == "api"
