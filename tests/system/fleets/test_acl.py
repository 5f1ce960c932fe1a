# SPDX-License-Identifier: Apache-2.0
"""A user who may do no more than docs/operate.md says: with that all works, and with one command less one line says so.

What each command is for is found out here, too: a command that nothing needs would not be in the table.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.packages import BUDGET_BYTES, features, identity, load, save
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, within
from tests.support.valkeys import Cluster, Watched
from tests.system.cli.test_commands import assert_one_line, mmcache
from tests.system.fleets.test_cluster import KEYS, NUMBERS, PREFIX, records_at, tier_at
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.tier import Tier

PAGE = (Path(__file__).parents[3] / "docs" / "operate.md").read_text()
(RULES,) = re.findall(r"^ +ACL SETUSER mmcache (on >PASSWORD [^\\\n]*(?:\\\n[^\\\n]*)*)$", PAGE, re.MULTILINE)
RULE = [word for word in RULES.replace("\\\n", " ").split() if word != ">PASSWORD"]
ALLOWED = [word.removeprefix("+") for word in RULE if word.startswith("+")]


def url_of(server: Server, *without: str) -> str:
    """The server's URL for a user by the documented rule, without these commands."""
    rule = [word for word in RULE if word.removeprefix("+") not in without]
    server.client.execute_command("ACL SETUSER", "mmcache", "reset", ">secret", *rule)
    return server.url.replace("//", "//mmcache:secret@")


@pytest.fixture(autouse=True)
def no_user(server: Server) -> Iterator[None]:
    server.client.acl_log_reset()
    yield
    server.client.execute_command("ACL DELUSER", "mmcache")


def forever(url: str, kind: Kind = FEATURES) -> Tier:
    """Entries of this one never expire."""
    return Tier(kind, RedisBackend(url, kind, ttl_s=0, timeout_s=TIMEOUT_S, max_bytes=BUDGET_BYTES))


def test_all_works(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    url = url_of(server)
    for tier, records in ((tier_at(url), records_at(url)), (forever(url), forever(url, RECORDS))):
        assert save(tier, 0)
        assert save(tier, 0)  # there, and used again
        assert load(tier, 0) == features(0)
        server.client.set(PREFIX + identity(1).key, b"garbage")
        assert load(tier, 1) is None
        assert not server.client.exists(PREFIX + identity(1).key)
        records.put_many({KEYS[0]: b"value"})
        assert records.get(KEYS[0], bytes) is not None
    said = [line for line in caplog.messages if "set aside" not in line]
    assert not said
    store: dict[str, Any] = {"MMCACHE_STORE": url}
    assert json.loads(mmcache("store", "ls", "--json", **store).stdout)["remote"]["packages"]["num"] == 1
    assert "2 entries are good" in mmcache("store", "check", **store).stdout
    assert "2 entries removed" in mmcache("store", "clear", **store).stdout
    assert not [entry for entry in server.client.acl_log() if b"client" not in str(entry["object"]).encode()]


def test_nothing_else_is_allowed(server: Server) -> None:
    client = redis.Redis.from_url(url_of(server))
    for refused in (
        ("SET", "others", "1"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("PUBLISH", "a", "b"),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*refused)


def of_reading(url: str) -> None:
    load(tier_at(url), 0)


def of_writing(url: str) -> None:
    save(tier_at(url), 1)


def of_writing_for_ever(url: str) -> None:
    save(forever(url), 1)


def of_rejecting(url: str) -> None:
    load(tier_at(url), 2)


def of_records(url: str) -> None:
    records_at(url).put_many({KEYS[0]: b"value"})


WITHOUT: dict[str, tuple[Callable[[str], None], str]] = {
    "append": (of_writing, "(writing) is off"),
    "expire": (of_writing, "(writing) is off"),
    "getrange": (of_reading, "(reading) is off"),
    "persist": (of_writing_for_ever, "(writing) is off"),
    "rename": (of_writing, "(writing) is off"),
    "set": (of_records, "(writing) is off"),
    "strlen": (of_reading, "(reading) is off"),
    "unlink": (of_rejecting, "could not take"),
}
OF_THE_COMMAND_LINE = {"scan": "ls", "unlink": "clear", "strlen": "ls", "getrange": "check"}
OF_A_CLUSTER = {"cluster|slots"}


def test_every_command_is_looked_at() -> None:
    assert set(ALLOWED) == WITHOUT.keys() | OF_THE_COMMAND_LINE.keys() | OF_A_CLUSTER


@pytest.mark.parametrize("command", WITHOUT)
def test_one_command_less_is_one_line(server: Server, command: str, caplog: pytest.LogCaptureFixture) -> None:
    save(tier_at(server.url), 0)
    server.client.set(PREFIX + identity(2).key, b"garbage")
    work, said = WITHOUT[command]
    work(url_of(server, command))
    (line,) = (line for line in caplog.messages if "set aside" not in line)
    assert said in line
    assert "has no permissions to run" in line
    assert f"'{command}'" in line


@pytest.mark.parametrize("command", OF_THE_COMMAND_LINE)
def test_one_command_less_on_the_command_line(server: Server, command: str) -> None:
    save(tier_at(server.url), 0)
    done = mmcache("store", OF_THE_COMMAND_LINE[command], MMCACHE_STORE=url_of(server, command))
    assert_one_line(done, f"'{command}'", "redis://***@127.0.0.1")


def test_in_a_cluster(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    for server in cluster.primaries:
        url_of(server)
    url = url_of(cluster.primaries[0])
    tier, records = tier_at(url), records_at(url)
    for number in NUMBERS:
        assert save(tier, number)
        assert load(tier, number) == features(number)
    records.put_many(dict.fromkeys(KEYS, b"value"))
    assert f"{2 * len(NUMBERS)} entries removed" in mmcache("store", "clear", MMCACHE_STORE=url).stdout
    assert not caplog.messages
    for server in cluster.primaries:
        url_of(server, *OF_A_CLUSTER)
    tier = tier_at(url)
    for number in NUMBERS:  # it learns from each node that says where else
        assert save(tier, number)
        assert load(tier, number) == features(number)
    lines = within(LONG_S, lambda: len(caplog.messages) == 2) and caplog.messages  # reading, writing
    assert lines, caplog.messages
    assert all("can't ask who has which slots" in line and "cluster|slots" in line for line in lines)


def test_with_sentinel(watched: Watched) -> None:
    """Of Sentinel one command is needed: the user of the server has none of its own for it."""
    url_of(watched.primary)
    watched.sentinel.client.execute_command(
        "ACL SETUSER", "asking", "on", ">secret", "resetchannels", "-@all", "+sentinel|masters"
    )
    url = watched.url.replace("//", "//mmcache:secret@") + "?sentinel_username=asking&sentinel_password=secret"
    tier = tier_at(url)
    assert save(tier, 0)
    assert load(tier, 0) == features(0)
