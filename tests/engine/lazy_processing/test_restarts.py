# SPDX-License-Identifier: Apache-2.0
"""One store, and servers in turn whose model's directory or arguments have changed: nothing of before is used.

Two engines in turn stand for two servers. What was kept is still used after a restart that changes nothing.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.tolerances import assert_equals_answer
from mmcache_tools.zoo import build_cached
from vllm.tokenizers import registry
from vllm.transformers_utils import processor

from tests.support.asking import Asking, Work
from tests.support.store_server import Put, alone, put
from tests.support.tiers import LONG_S
from vllm_mmcache.components.lazy_media.media_info import RECORDS
from vllm_mmcache.content.base64_image import CONTENT_IDS
from vllm_mmcache.exactness.conversations import picture, user
from vllm_mmcache.storage import record_store

pytestmark = pytest.mark.engine

__all__ = ["alone", "put"]

TALK = [user("Look:", picture(790, (640, 480)), "What is it?")]
KEPT = Work(deferred=1)
NEW = Work(processed=1, tower=1)
LESS = 100_000
"""Pixels, fewer than the picture has."""


class Servers:
    """Servers in turn, on one store and with one directory of a model."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._directory = build_cached("qwen3-vl", pool.zoo_root)

    def ask(self, **more: Any) -> Work:
        """What a server that starts now does for the question; its answer is that of one that knows no image."""
        self.stop()
        rig = self._pool.get(EngineConfig("qwen3-vl", more=tuple(more.items())))
        asking = Asking(rig)
        work = asking.ask(TALK)
        rig.make_cold()
        (cold,) = rig.ask(TALK)  # an image without a file has neither record nor the file's name
        assert_equals_answer(asking.answers[0], cold, rig.tolerance, "a cold run")
        assert record_store.current().flush(LONG_S)
        assert rig.features.flush(LONG_S)
        return work

    def stop(self) -> None:
        """End the server; the next one is another process, which has read nothing."""
        self._pool.close()
        record_store.close()
        RECORDS.clear()
        CONTENT_IDS.clear()
        for cached in (*vars(processor).values(), *vars(registry).values()):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()

    def edit(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a file of the model's directory in place."""
        path = self._directory / name
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))


@pytest.fixture
def servers(put: Put, tmp_path: Path) -> Iterator[Servers]:
    """On a directory of a model that is this test's alone."""
    put(store=str(tmp_path / "store"))
    pool = EnginePool(tmp_path / "zoo")
    yield (found := Servers(pool))
    found.stop()


def limit_size(content: dict[str, Any]) -> None:
    assert content["size"]["longest_edge"] > LESS
    content["size"]["longest_edge"] = LESS


def swap_words(content: dict[str, Any]) -> None:
    """The last two words have each other's tokens."""
    words = content["model"]["vocab"]
    one, other = sorted(words, key=words.__getitem__)[-2:]
    words[one], words[other] = words[other], words[one]


def test_another_processor_and_another_tokenizer(alone: EnginePool, servers: Servers) -> None:
    """A directory that was changed in place, and arguments of the server: each is a miss where it counts."""
    assert servers.ask() == NEW
    assert servers.ask() == KEPT, "the control: what is kept is used"
    servers.edit("preprocessor_config.json", limit_size)
    assert servers.ask() == NEW
    assert servers.ask(mm_processor_kwargs={"max_pixels": 80_000}) == NEW
    servers.edit("tokenizer.json", swap_words)
    assert servers.ask() == Work(processed=1), "features know no tokens"
