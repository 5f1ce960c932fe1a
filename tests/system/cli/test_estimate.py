# SPDX-License-Identifier: Apache-2.0
"""`mmcache estimate` of what is piped in, which can be read once only."""

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.unit.traffic.logs import chat, image, text, user

pytestmark = pytest.mark.process

REQUESTS = [chat(user(image(n), text(f"Question {n}"))) for n in range(3)]


@pytest.mark.parametrize("is_compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("by", ["-", "/dev/stdin", "a fifo"])
def test_what_is_piped_in(by: str, is_compressed: bool, tmp_path: Path) -> None:
    content = "".join(json.dumps(one) + "\n" for one in REQUESTS).encode()
    content = gzip.compress(content) if is_compressed else content
    path = tmp_path / "fifo" if by == "a fifo" else Path(by)
    if by == "a fifo":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(content,)).start()
    command = [sys.executable, "-m", "vllm_mmcache.cli", "estimate", "--json", str(path)]
    done = subprocess.run(command, input=b"" if by == "a fifo" else content, capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert (found["seen"]["requests"], found["unused"]) == (len(REQUESTS), {})
