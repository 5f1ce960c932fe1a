# SPDX-License-Identifier: Apache-2.0
"""What `mmcache serve` reads in vLLM's arguments. As a command: tests/system/cli/test_commands.py."""

import json
import os
import socket
from pathlib import Path

import pytest

from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.cli import serve


@pytest.mark.parametrize(
    "arguments",
    [
        ["--additional-config", '{"mmcache": {"store": "/a"}, "other": 1}'],
        ["--additional_config={}", '--additional_config={"mmcache": {"store": "/a"}}'],
        ["--additional-config.mmcache", '{"store": "/a=b"}', "--additional_config.mmcache.features=false"],
        ["--additional-config.mmcache.store=/a", "--additional-config.mmcache.store", "/b"],
        ["--additional-config.mmcache.media_records=64k", "--additional-config.mmcache.image_aliases=2K"],
        ["--additional-config.mmcache.feature_ram_bytes=1.5g", "--additional-config.mmcache.store_disk_bytes=9GiB"],
        ["--additional-config.mmcache.observe_listen=127.0.0.1:9", "--additional-config.mmcache.audit", "0.5"],
        ["--additional-config.mmcache.store=/a", "--additional-config", '{"mmcache": {"features": false}}'],
        ["--additional-config", '{"mmcache": {"store": "/a"}}', "--additional-config.other.x", "1"],
        ["--config", "FILE"],
        ["--config", "FILE", "--additional-config.mmcache.features", "false"],
    ],
)
def test_our_settings_are_read_as_vllm_reads_them(arguments: list[str], tmp_path: Path) -> None:
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"additional_config": {"mmcache": {"store": "/in/a/file"}}}))
    given = [str(path) if argument == "FILE" else argument for argument in arguments]
    parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(["some/model", *given])
    *_, (_, found) = serve.additional_configs(given)
    assert found == parsed.additional_config.get("mmcache")


def test_a_headless_node_has_no_port_and_no_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM starts engines there, and no API server."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MMCACHE_ADMIN_KEY", "MMCACHE_ADMIN_KEY_FILE"):
        monkeypatch.setenv(name, "")  # set first, so that what the command sets is taken back
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(serve, "DEFAULT_PORT", taken.getsockname()[1])
        with pytest.raises(EnvironmentProblem, match="can't listen"):
            serve.check_port([])
        serve.check_port(["--headless"])
    assert serve.provide_admin_key(["--headless"]) == ""
    assert not os.environ["MMCACHE_ADMIN_KEY_FILE"]
    assert not list(tmp_path.iterdir())
