# SPDX-License-Identifier: Apache-2.0
"""`mmcache explain` against the page's JSON and against a file, and what is told without an admin key."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.page_app import EXAMPLES, IN_FORCE, KEY, Server, add, filled
from tests.system.cli.test_commands import COMMAND, assert_one_line, mmcache
from tests.unit.components.observe.page.test_web import DATA, body, get, server
from vllm_mmcache.components.observe.record.schema import from_json, to_json

__all__ = ["server"]


@pytest.mark.process
@pytest.mark.parametrize("path", DATA)
def test_without_an_admin_key_nothing_is_told(path: str) -> None:
    """Nobody's request is told to the clients of a server, also not where the server asks them for no key."""
    serving = Server(filled(EXAMPLES), None)
    for key in (None, KEY, "None", ""):
        answer = get(serving, path, key)
        assert answer.status_code == 403
        assert "MMCACHE_ADMIN_KEY" in answer.json()["error"]
    assert get(serving, "", None).status_code == 200
    assert_one_line(mmcache("explain", "--url", serving.url), "no admin key is set", "MMCACHE_ADMIN_KEY")
    serving.stop()


@pytest.mark.process
def test_by_an_id_that_a_client_chose() -> None:
    """All requests that carry it, newest first; a record's own id is found before."""
    same = [EXAMPLES[n].model_copy(update={"request_id": "chatcmpl-mine"}) for n in range(3)]
    taken = EXAMPLES[3].model_copy(update={"request_id": same[0].id})
    serving = Server(filled([*same, taken]))
    found = body(serving, "/records?id=chatcmpl-mine")["records"]
    assert [record["id"] for record in found] == [record.id for record in reversed(same)]
    assert [record["request_id"] for record in found] == ["chatcmpl-mine"] * 3
    assert body(serving, "/records?id=none") == {"records": []}
    assert [record["id"] for record in body(serving, f"/records?id={same[0].id}")["records"]] == [same[0].id]
    assert get(serving, "/records/chatcmpl-mine").status_code == 404
    told = mmcache("explain", "chatcmpl-mine", "--url", serving.url, MMCACHE_ADMIN_KEY=KEY)
    assert [line.split()[-2:] for line in told.stdout.splitlines()[1:]] == [
        [record.id, "chatcmpl-mine"] for record in reversed(same)
    ]
    serving.stop()


@pytest.mark.process
def test_nothing_is_recorded() -> None:
    serving = Server(None)
    assert body(serving, "/components") == IN_FORCE
    assert get(serving, "/totals").status_code == 503
    assert get(serving, "/records").status_code == 503
    said = get(serving, "/records").json()["error"]
    assert "--observe" in said
    assert IN_FORCE["components"]["observe"]["reason"] in said
    assert_one_line(mmcache("explain", "--url", serving.url, MMCACHE_ADMIN_KEY=KEY), "nothing is recorded")
    assert get(serving, "/records", "wrong").status_code == 401
    serving.stop()


@pytest.fixture(scope="module")
def record_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    path.write_text("".join(json.dumps(to_json(record)) + "\n" for record in EXAMPLES))
    return path


def key_file(folder: Path, key: str = KEY) -> str:
    path = folder / "admin-key"
    path.touch(0o600)
    path.write_text(f"{key}\n")
    return str(path)


@pytest.mark.process
def test_explain(server: Server, record_file: Path, tmp_path: Path) -> None:
    record = EXAMPLES[3]
    from_server = ["--url", f"{server.url}/v1", "--admin-key-file", key_file(tmp_path)]
    for source in (from_server, ["--file", str(record_file)]):
        listed = mmcache("explain", *source, "--last", "3")
        assert (listed.returncode, listed.stderr) == (0, "")
        assert [line.split()[-2] for line in listed.stdout.splitlines()[1:]] == [r.id for r in EXAMPLES[-3:]]
        as_json = mmcache("explain", *source, "--json")
        assert [from_json(json.loads(line)) for line in as_json.stdout.splitlines()] == EXAMPLES
        one = mmcache("explain", record.id, *source)
        assert one.returncode == 0
        assert mmcache("explain", record.request_id, *source).stdout == one.stdout
        assert f"{record.reused_tokens} of {record.prompt_tokens} prompt tokens reused" in one.stdout
        assert all(miss.text in one.stdout for miss in record.misses)
        assert from_json(json.loads(mmcache("explain", record.id, *source, "--json").stdout)) == record


def heed_interrupts() -> None:
    """A shell's background job, which the tests may be, ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["server", "file"])
def test_explain_follows(kind: str, tmp_path: Path) -> None:
    serving = Server(filled(EXAMPLES[:2]))
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(to_json(record)) + "\n" for record in EXAMPLES[:2]))
    from_server = ["--url", serving.url, "--admin-key-file", key_file(tmp_path)]
    source = from_server if kind == "server" else ["--file", str(path)]
    with subprocess.Popen(
        [*COMMAND, "explain", "-f", *source],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    ) as following:
        assert following.stdout is not None
        lines = [following.stdout.readline().split()[-2] for _ in range(3)]
        assert lines[1:] == [record.id for record in EXAMPLES[:2]]
        assert serving.store is not None
        add(serving.store, EXAMPLES[2])
        with path.open("a") as file:
            file.write(json.dumps(to_json(EXAMPLES[2])) + "\n")
        assert following.stdout.readline().split()[-2] == EXAMPLES[2].id
        os.kill(following.pid, signal.SIGINT)
        assert following.wait(60) == 130
    serving.stop()


@pytest.mark.process
def test_explain_says_what_is_wrong(server: Server, record_file: Path, tmp_path: Path) -> None:
    url = ["--url", server.url]
    assert_one_line(mmcache("explain", *url), "the admin key is missing", "MMCACHE_ADMIN_KEY")
    assert_one_line(mmcache("explain", *url, VLLM_API_KEY=KEY), "the admin key is missing")
    assert_one_line(
        mmcache("explain", *url, MMCACHE_ADMIN_KEY="not-the-one-of-this-server"), "the admin key is not the server's"
    )
    assert_one_line(mmcache("explain", "none", *url, MMCACHE_ADMIN_KEY=KEY), "no record 'none'")
    assert_one_line(mmcache("explain", "none", "--file", str(record_file)), "no record 'none'")
    assert_one_line(mmcache("explain", "--admin-key", KEY), "--admin-key")  # no command line has a key
    path = key_file(tmp_path)
    assert mmcache("explain", *url, MMCACHE_ADMIN_KEY_FILE=path).returncode == 0
    key_file(tmp_path, "short")
    assert_one_line(mmcache("explain", *url, MMCACHE_ADMIN_KEY_FILE=path), "admin_key_file", "16 printable")
    Path(path).unlink()
    assert_one_line(mmcache("explain", *url, MMCACHE_ADMIN_KEY_FILE=path), "No such file")
    assert_one_line(mmcache("explain", "--url", "http://127.0.0.1:9"), "no answer from http://127.0.0.1:9", "--url")
    assert_one_line(mmcache("explain", "--url", "no address"), "no answer from")
    assert_one_line(mmcache("explain", "--url", f"{server.url}/elsewhere"), "has no /mmcache", "--observe")
    assert_one_line(mmcache("explain", *url, "--file", "x"), "one of the two")
    assert_one_line(mmcache("explain", "x", "-f", *url), "leave out the id")
    assert_one_line(mmcache("explain", "--file", str(tmp_path / "none")), "No such file", "MMCACHE_OBSERVE_FILE")
    broken = tmp_path / "broken.jsonl"
    for line in ("{", '{"id": 3}', "[]", json.dumps(to_json(EXAMPLES[0]) | {"format": 2})):
        broken.write_text(f"{line}\n")
        assert_one_line(mmcache("explain", "--file", str(broken)), "broken.jsonl, line 1: not a record")
    broken.write_text(f"{{\n{record_file.read_text()}")
    told = mmcache("explain", "--json", "--file", str(broken))
    assert (told.returncode, len(told.stdout.splitlines())) == (0, len(EXAMPLES))
    assert told.stderr.startswith(f"mmcache: {broken}, line 1: not a record")
