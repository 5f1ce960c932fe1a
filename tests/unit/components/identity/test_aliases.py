# SPDX-License-Identifier: Apache-2.0
"""The alias table: whose it is, what re-binding does, its bound, and what is counted and said."""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.base import settings
from vllm_mmcache.components.identity import audit
from vllm_mmcache.components.identity.aliases import Aliases
from vllm_mmcache.metrics import counters

pytestmark = pytest.mark.answers


@pytest.fixture(autouse=True)
def quiet_before() -> Iterator[None]:
    audit._said.clear()
    yield
    audit._said.clear()


def test_an_alias_belongs_to_tenant_and_modality() -> None:
    aliases = Aliases()
    aliases.bind("image", "x", "a", "one")
    assert aliases.find("image", "x", "a") == "one"
    assert [aliases.find("image", "x", salt) for salt in ("b", None, "A")] == [None] * 3
    assert aliases.find("video", "x", "a") is None


@pytest.mark.parametrize("name", ["of another tenant", "of nobody"])
def test_an_unknown_name_is_counted_whoever_has_it(name: str, log: pytest.LogCaptureFixture) -> None:
    """One that another tenant has bound counts, costs and says what one counts that nobody has."""
    aliases = Aliases()
    aliases.bind("image", "of another tenant", "a", "one")
    before, size = counters.totals(), aliases.size()
    with log.at_level(logging.INFO, "vllm.mmcache"):
        assert aliases.find("image", name, "b") is None
    now = counters.totals()
    assert {one: now[one] - before[one] for one in now if now[one] != before[one]} == {"aliases_unknown": 1}
    assert aliases.size() == size
    assert not log.records


def test_rebinding_is_counted_once() -> None:
    aliases, before = Aliases(), counters.ALIASES_REBOUND.value
    for content_id in ("one", "one", "two", "two"):
        aliases.bind("image", "x", None, content_id)
    aliases.bind("image", "x", "other tenant", "three")
    assert aliases.find("image", "x", None) == "two"
    assert counters.ALIASES_REBOUND.value == before + 1


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.Settings(image_aliases=3))
    aliases = Aliases()
    for number in range(9):
        aliases.bind("image", str(number), None, "content")
        assert aliases.find("image", "0", None) == "content"  # used, so it stays
    assert len(aliases) == 3
    assert aliases.find("image", "5", None) is None
    aliases.clear()
    assert not len(aliases)


def test_threads_bind_one_alias() -> None:
    """Whoever was last: a whole content id of somebody, never nothing."""
    aliases = Aliases()
    aliases.bind("image", "x", "s", "0")

    def work(number: int) -> None:
        for _ in range(500):
            aliases.bind("image", "x", "s", str(number))
            assert aliases.find("image", "x", "s") in {str(one) for one in range(8)}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(aliases) == 1


def test_one_line_per_kind_and_minute(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    monkeypatch.setattr(audit, "time", SimpleNamespace(monotonic=lambda: now[0]))  # for no other thread
    with log.at_level(logging.WARNING, "vllm.mmcache"):
        for _ in range(5):
            audit.note(counters.ALIASES_REBOUND, "one kind")
            audit.note(counters.ALIASES_TOO_LONG, "other kind")
        now[0] += audit.INTERVAL_S - 1
        audit.note(counters.ALIASES_REBOUND, "one kind")
        assert len(log.records) == 2
        now[0] += 1
        audit.note(counters.ALIASES_REBOUND, "one kind")
    said: list[Any] = [record.args for record in log.records if record.args]
    assert [first for first, *_ in said] == ["one kind", "other kind", "one kind"]
