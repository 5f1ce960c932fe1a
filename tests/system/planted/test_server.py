# SPDX-License-Identifier: Apache-2.0
"""Entries planted under a running server that lets vLLM unpickle: in SQLite, in Valkey and in files of features.

No line of one is executed, the server lives, and its answers are those from before. What is well made and of another
image's size fails a request at most until the server knows better. The control: what was saved is used.
"""

import base64
import json
import pickle
import sqlite3
import struct
from collections.abc import Callable, Iterator
from random import Random

import httpx
import msgspec
import openai
import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached

from tests.support import files, hostile
from tests.support.hostile import Marker
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, within
from tests.system.planted.test_packages import Replica
from vllm_mmcache.components.features.package import unpack
from vllm_mmcache.exactness.pictures import ellipses
from vllm_mmcache.storage.frame import HEAD_BYTES, frame
from vllm_mmcache.storage.record_store import RECORDS

pytestmark = pytest.mark.engine

PREFIX = RECORDS.remote_prefix

NUM_ROUNDS = 12
"""Of entries drawn at random, in all places at once."""
MOST_FAILURES = 3  # of requests, where what was planted is well made

Change = Callable[[bytes], bytes]


class Planted:
    """A server that keeps nothing in RAM, and everything that its stores hold."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.cold = replica.ask()
        assert within(LONG_S, lambda: len(self.rows()) >= 2 and len(self.names()) >= 2), "no records were saved"
        replica.wait_until_saved()
        self.saved = self.rows()
        (self.file,), (self.key,) = replica.files(), replica.keys()
        self.package = self.file.read_bytes()
        self.forget()

    def forget(self) -> None:
        """Ask about another image, the one that the server then knows without a look at its stores."""
        content = base64.b64encode(files.saved(ellipses("another", (96, 96)), "PNG")).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
        self.replica.client.chat.completions.create(
            model="zoo",
            messages=[{"role": "user", "content": [part]}],  # type: ignore[list-item, misc]
            max_tokens=1,
        )

    def connect(self) -> sqlite3.Connection:
        (file,) = (self.replica.place / "records").glob("*.sqlite")
        return sqlite3.connect(file, timeout=60)

    def rows(self) -> dict[bytes, bytes]:
        """What SQLite has: values by key."""
        if not list((self.replica.place / "records").glob("*.sqlite")):
            return {}
        with self.connect() as connection:
            return {key: framed[HEAD_BYTES:] for key, framed in connection.execute("SELECT key, frame FROM records")}

    def names(self) -> list[bytes]:
        """What Valkey has."""
        return list(self.replica.remote.client.keys(f"{PREFIX}*"))

    def put_back(self) -> None:
        """As if nothing had been planted."""
        self.plant_records(lambda value: value, lambda value: value)
        self.plant_package(self.package)

    def plant_records(self, image: Change, item: Change) -> None:
        """Have other records of the image, JSON, and of its item, msgpack, in SQLite and in Valkey."""
        with self.connect() as connection:
            for key, value in self.saved.items():
                framed = frame(key, (image if value.startswith(b"[") else item)(value))
                connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, 2000000000)", (key, framed))
                self.replica.remote.client.set(PREFIX + key.hex(), framed)

    def plant_package(self, packed: bytes) -> None:
        self.file.write_bytes(packed)
        self.replica.remote.client.set(self.key, packed)

    def ask(self) -> list[str]:
        """Until there is the right answer; returns what went wrong before, of requests that failed."""
        failures: list[str] = []
        while True:
            self.forget()
            try:
                assert self.replica.ask() == self.cold
                return failures
            except openai.APIError as error:
                failures.append(str(error))
                assert len(failures) <= MOST_FAILURES, failures

    def assert_well(self) -> None:
        assert httpx.get(f"{self.replica.url}/health", timeout=60).status_code == 200


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Marker:
    return Marker(tmp_path_factory.mktemp("marker") / "marker")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, running_server: Server) -> Iterator[Planted]:
    root = tmp_path_factory.mktemp("planted")
    running_server.client.flushall()
    env = {
        "MMCACHE_STORE": f"{root / 'store'} {running_server.url}",
        "MMCACHE_STORE_REMOTE_TIMEOUT_S": str(TIMEOUT_S),
        "MMCACHE_FEATURE_RAM_BYTES": "0",
        "MMCACHE_RECORDS_RAM_BYTES": "0",
        "MMCACHE_MEDIA_RECORDS": "1",
        "MMCACHE_STORE_WAIT_S": "10",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    args = (*CPU_ARGS, "--served-model-name", "zoo", "--enable-prefix-caching")
    model = build_cached("qwen3-vl", root / "zoo")
    with serve(model, log_path=root / "log", env=env, args=args) as server:
        yield Planted(Replica(server.url, root / "store", running_server))


@pytest.fixture(autouse=True)
def unharmed(planted: Planted, marker: Marker) -> Iterator[None]:
    planted.put_back()
    yield
    assert not marker.path.exists(), "a planted entry was executed"
    planted.assert_well()


def test_what_was_saved_is_used(planted: Planted) -> None:
    """The control: the records in SQLite, and in Valkey where SQLite has none."""
    for place in ("disk", "remote"):
        processed, hits = planted.replica.count("items_processed"), planted.replica.count("record_hits")
        assert planted.ask() == []
        assert planted.replica.count("items_processed") == processed, place
        assert planted.replica.count("record_hits") >= hits + 2, place
        with planted.connect() as connection:
            connection.execute("DELETE FROM records")


def test_pickles_of_the_former_format(planted: Planted, marker: Marker) -> None:
    """What vLLM's own decoder unpickled."""
    encode = msgspec.msgpack.encode
    for code, pickled in ((1, pickle.dumps(marker)), (2, marker.pickles()[-1])):
        boom = encode({"image_grid_thw": msgspec.msgpack.Ext(code, pickled)})
        for value in (encode([[], boom]), encode([2, {"image_grid_thw": msgspec.msgpack.Ext(code, pickled)}])):
            planted.plant_records(lambda value: value, lambda _, value=value: value)  # type: ignore[misc]
            corrupt = planted.replica.count("record_corrupt")
            assert planted.ask() == []
            assert planted.replica.count("record_corrupt") == corrupt + 2


@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_all_kinds_at_once(planted: Planted, marker: Marker, number: int) -> None:
    chance = Random(number)
    planted.plant_records(
        lambda value: hostile.image_record(chance, value, marker),
        lambda value: hostile.item_record(chance, value, [], marker),
    )
    identity, shape, features = unpack(planted.package)
    planted.plant_package(hostile.package(chance, identity, shape, bytes(features), marker))
    corrupt = planted.replica.count("record_corrupt")
    assert planted.ask() == []
    assert planted.replica.count("record_corrupt") >= corrupt + 2


def sized(width: int, height: int) -> Change:
    """The record of an image of another size, well made."""

    def change(value: bytes) -> bytes:
        kept = json.loads(value)
        return json.dumps([kept[0], width, height, *kept[3:]]).encode()

    return change


def gridded(*grid: int) -> Change:
    """The record of an item of another size, well made."""

    def change(value: bytes) -> bytes:
        number, fields = msgspec.msgpack.decode(value)
        fields["image_grid_thw"]["data"] = struct.pack("<3q", *grid)
        return bytes(msgspec.msgpack.encode([number, fields]))

    return change


def as_it_is(value: bytes) -> bytes:
    return value


@pytest.mark.parametrize("with_features", [True, False])
@pytest.mark.parametrize(
    ("image", "item"),
    [
        (sized(320, 240), as_it_is),
        (as_it_is, gridded(1, 8, 8)),
        (sized(256, 256), gridded(1, 16, 16)),  # which fit each other
        (sized(10_000, 10_000), gridded(1, 600, 600)),
    ],
    ids=["image", "item", "both", "both, huge"],
)
def test_well_made_and_of_another_size(planted: Planted, image: Change, item: Change, with_features: bool) -> None:
    """The engine finds out when it makes the pixels; the records are right afterwards."""
    if not with_features:
        planted.file.unlink(missing_ok=True)
        planted.replica.remote.client.delete(planted.key)
    planted.plant_records(image, item)
    print(planted.ask())
    assert planted.ask() == []
    planted.assert_well()
