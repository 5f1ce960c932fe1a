# SPDX-License-Identifier: Apache-2.0
"""Which groups are wanted here: by setting, and by where the room was exercised."""

import logging
from typing import Any

import pytest

from vllm_mmcache import settings
from vllm_mmcache.errors import SwapError
from vllm_mmcache.upstream import start, swap
from vllm_mmcache.upstream.ledger import NEEDS, OVERTAKEN_BY, groups
from vllm_mmcache.upstream.proven import ENGINE_ROOMS
from vllm_mmcache.upstream.seams import SEAMS


def test_every_group_and_seam_belongs_together() -> None:
    assert {seam.group for seam in SEAMS} <= set(groups())
    assert set(ENGINE_ROOMS) <= set(groups())
    assert set(ENGINE_ROOMS) <= set(settings.Settings.model_fields)
    assert set(OVERTAKEN_BY) | set(NEEDS) | set(NEEDS.values()) <= set(groups())
    order = list(groups())
    assert all(order.index(needed) < order.index(group) for group, needed in NEEDS.items())


def test_a_room_steps_aside_where_vllm_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The split of a vLLM that stops at the last multimodal feature by itself (56818) reads where that ends."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert start.why_off("image_checkpoints") == ""

    def _mamba_block_aligned_split(self: Any, request: Any, num_new_tokens: int) -> int:
        return min(num_new_tokens, request.mm_final_end)

    monkeypatch.setattr(Scheduler, "_mamba_block_aligned_split", _mamba_block_aligned_split)
    assert start.why_off("image_checkpoints").startswith("vLLM has its own")


@pytest.mark.parametrize("group", OVERTAKEN_BY)
def test_a_room_steps_aside(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This vLLM does not do it itself; where all the symbols are there, the room is off and says which they are."""
    monkeypatch.setattr(settings, "_current", settings.Settings())
    for symbol in OVERTAKEN_BY[group]:
        assert start.why_off(group) == ""  # with a part of them, too
        module, _, path = symbol.partition(":")
        monkeypatch.setattr(".".join([module, path]), print, raising=False)
    assert start.why_off(group) == f"vLLM has its own: {', '.join(OVERTAKEN_BY[group])}"


def test_a_room_needs_another() -> None:
    assert start.why_alone("lifted_bodies", {"lazy_media"}) == ""
    assert start.why_alone("lifted_bodies", set()) == "needs lazy_media, which is off"
    assert start.why_alone("settings", set()) == ""


def test_rooms_of_the_api_server_are_not_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_install", lambda group, members, version: swap.Outcome(group, "on"))
    monkeypatch.setattr(start, "_say", lambda version, outcomes: None)
    for process, there in (("api", True), ("engine", False), ("worker", False)):
        monkeypatch.setattr(start, "process_name", lambda process=process: process)
        on = {outcome.group for outcome in start.start()}
        assert ({"lazy_media", "lifted_bodies", "identity"} <= on) == there
        assert "settings" in on


def test_required_salts_need_the_room(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Off by mismatch: an error that says what it means; where salts are required, no start."""
    outcome = swap.Outcome("identity", "off", "symbol changed")
    monkeypatch.setattr(start, "_install", lambda group, members, version: outcome)
    monkeypatch.setattr(start, "groups", lambda: {"identity": groups()["identity"]})
    monkeypatch.setattr(start, "_line", "")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(settings, "_current", settings.Settings())
    with caplog.at_level(logging.ERROR, "vllm.mmcache"):
        start.start()
        start.say_pending()
    (record,) = caplog.records
    assert "identity is off (symbol changed): uuids of clients are trusted" in record.getMessage()
    for off in (settings.Settings(require_salt=True), settings.Settings(require_salt=True, identity=False)):
        monkeypatch.setattr(settings, "_current", off)
        with pytest.raises(SwapError, match="require_salt is set"):
            start.start()
    monkeypatch.setattr(start, "_off", {})
    monkeypatch.setattr(settings, "_current", settings.Settings(require_salt=True))
    start.refuse_without_identity()
