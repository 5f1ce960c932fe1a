# SPDX-License-Identifier: Apache-2.0
"""Packages of another model under the right name, on disk and in Valkey, through a real server.

Each is whole and has the identity that is asked for, so only a look at the model tells that it does not fit. The
server goes on, the answer is that of a cold run, and both copies are set aside. The control: what was saved is used.
"""

import base64
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from blake3 import blake3
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached
from openai import OpenAI

from tests.support import files
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import FEATURES, LENGTH, Shape, pack, unpack
from vllm_mmcache.components.features.tiers import FEATURES as KIND
from vllm_mmcache.exactness.pictures import ellipses
from vllm_mmcache.storage.redis_backend import INCOMING

pytestmark = pytest.mark.engine

PREFIX = KIND.remote_prefix

Plant = Callable[[Identity, Shape, bytes], bytes]


def shaped(**sizes: Callable[[Shape], Any]) -> Plant:
    """A package whose shape differs in these, whole and with a right checksum."""

    def plant(identity: Identity, shape: Shape, features: bytes) -> bytes:
        other = replace(shape, **{name: size(shape) for name, size in sizes.items()})
        return pack(identity, other, features[: other.num_bytes])

    return plant


def deep(identity: Identity, shape: Shape, features: bytes) -> bytes:
    """A package of three dimensions, which no Shape can say."""
    packed = pack(identity, shape, features)
    header = json.loads(packed[LENGTH.size : -len(features)])
    seen, said = [shape.num_tokens, shape.width], [1, shape.num_tokens, shape.width]
    record = header["__metadata__"]["record"].replace(*(json.dumps(one, separators=(",", ":")) for one in (seen, said)))
    header["__metadata__"] |= {"record": record, "blake3": blake3(record.encode() + features).hexdigest()}
    header[FEATURES]["shape"] = said
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % LENGTH.size)
    return LENGTH.pack(len(written)) + written + features


PLANTED: dict[str, Plant] = {
    "another hidden size": shaped(width=lambda shape: shape.width - 64),
    "one level less": shaped(width=lambda shape: shape.width // 2),
    "another dtype": shaped(dtype=lambda shape: "float16"),
    "fewer tokens": shaped(num_tokens=lambda shape: shape.num_tokens - 1),
    "three dimensions": deep,
}


class Replica:
    """A server that looks into directory and Valkey for each image: nothing stays in RAM once it was used."""

    def __init__(self, url: str, place: Path, remote: Server) -> None:
        self.url, self.place, self.remote = url, place, remote
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)

    def ask(self) -> tuple[str, list[float]]:
        """The answer about the one picture, text and log-probabilities, from empty caches of vLLM's own."""
        for cache in ("prefix", "mm", "encoder"):
            httpx.post(f"{self.url}/reset_{cache}_cache", timeout=60).raise_for_status()
        time.sleep(1)  # the last one says that weights may have changed: they are read again, and no server tells when
        content = base64.b64encode(files.saved(ellipses("planted", (160, 120)), "PNG")).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}},
            {"type": "text", "text": "What is this?"},
        ]
        answer = self.client.chat.completions.create(
            model="zoo",
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item, misc]
            max_tokens=6,
            temperature=0,
            logprobs=True,
        ).choices[0]
        assert answer.logprobs is not None
        return str(answer.message.content), [one.logprob for one in answer.logprobs.content or ()]

    def count(self, name: str) -> float:
        """A counter of ours over all tiers, once what the worker counted has travelled with its next step."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            text = page.read().decode()
        return sum(float(value) for value in re.findall(rf"^mmcache:{name}_total(?:{{.*}})? (\S+)$", text, re.M))

    def files(self) -> list[Path]:
        return sorted((self.place / "features").glob("??/*.safetensors"))

    def keys(self) -> list[bytes]:
        found = cast(list[bytes], self.remote.client.keys(f"{PREFIX}*"))  # beside them are records
        return [key for key in found if not key.startswith((PREFIX + INCOMING).encode())]

    def wait_until_saved(self) -> None:
        deadline = time.monotonic() + LONG_S
        while not (self.files() and self.keys()):
            assert time.monotonic() < deadline, "nothing was saved"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, running_server: Server) -> Iterator[Replica]:
    root = tmp_path_factory.mktemp("planted")
    running_server.client.flushall()
    env = {
        "MMCACHE_STORE": f"{root / 'store'} {running_server.url}",
        "MMCACHE_STORE_REMOTE_TIMEOUT_S": str(TIMEOUT_S),
        "MMCACHE_FEATURE_RAM_BYTES": "0",
        "MMCACHE_STORE_WAIT_S": "10",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    args = (*CPU_ARGS, "--served-model-name", "zoo", "--enable-prefix-caching")
    model = build_cached("qwen3-vl", root / "zoo")
    with serve(model, log_path=root / "log", env=env, args=args) as server:
        yield Replica(server.url, root / "store", running_server)


def test_planted_packages(replica: Replica) -> None:
    cold = replica.ask()
    replica.wait_until_saved()
    (file,) = replica.files()
    (key,) = replica.keys()
    assert key.decode() == PREFIX + file.stem
    identity, shape, view = unpack(file.read_bytes())
    features = bytes(view)
    assert shape.dtype != "float16"

    runs = replica.count("tower_images")
    assert replica.ask() == cold  # from RAM, for the last time
    hits = replica.count("features_hits")
    assert replica.ask() == cold
    replica.ask()  # one step more, so that all of it is on /metrics
    assert replica.count("features_hits") > hits
    assert replica.count("tower_images") == runs, "the control: what was saved is used"

    for name, plant in PLANTED.items():
        aside, runs = replica.count("features_set_aside"), replica.count("tower_images")
        planted = plant(identity, shape, features)
        file.write_bytes(planted)
        replica.remote.client.set(key, planted)
        assert replica.ask() == cold, name
        replica.wait_until_saved()
        assert replica.ask() == cold, name
        assert replica.count("features_set_aside") == aside + 2, name
        assert replica.count("tower_images") == runs + 1, name
        assert unpack(file.read_bytes())[2] == features, name
    assert httpx.get(f"{replica.url}/health", timeout=60).status_code == 200
