# SPDX-License-Identifier: Apache-2.0
"""What the room decides without an engine: agreement of ranks, what fits, the fingerprint, and the trap."""

from typing import Any

import pytest
import torch

from vllm_mmcache import settings
from vllm_mmcache.errors import TowerTrapped
from vllm_mmcache.features.package import FEATURES, GRID, Package
from vllm_mmcache.features.ram import RamTier
from vllm_mmcache.features.room import Facts, Item, Layout, Room
from vllm_mmcache.features.store import Store

FACTS = Facts("model", "processor", "float32")
FEATURES_OF_ITEM = torch.arange(12.0).reshape(4, 3)


class Tower(torch.nn.Module):
    """The part of a counted model that the room looks at."""

    tower_parts = ("visual",)

    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(self.visual.weight)
        torch.nn.init.zeros_(self.visual.bias)
        self.loaded_weights = {"visual.weight": "digest"}
        self.num_loads = 1
        self.before_tower: Any = None


def layout(others: list[bool] | None = None, rank: int = 0) -> Layout:
    """`others` are the findings of the other rank."""

    def agree(has: list[bool]) -> list[bool]:
        return has if others is None else [a and b for a, b in zip(has, others, strict=True)]

    return Layout(rank, 1 if others is None else 2, agree)


def room_of(store: Store, model: Tower | None = None, **more: Any) -> Room:
    return Room(model or Tower(), store, FACTS, more.pop("layout", layout()))  # type: ignore[arg-type]


def item(number: int = 0, **more: Any) -> Item:
    inputs = {"pixel_values": torch.full((16, 2), float(number)), GRID: torch.tensor([1, 4, 4])}
    return Item(f"image-{number}", inputs | more, 4)


@pytest.fixture
def store() -> Store:
    return Store(RamTier(10**6))


def fill(room: Room, *items: Item) -> None:
    assert room.take(items) == [None] * len(items)
    for one in items:
        room.save(one.mm_hash, FEATURES_OF_ITEM)


def test_saved_and_taken(store: Store) -> None:
    room = room_of(store)
    fill(room, item(0))
    found = room.take([item(1), None, item(0)])
    assert found[0] is found[1] is None
    assert torch.equal(found[2], FEATURES_OF_ITEM)


def test_only_what_was_expected_is_saved(store: Store) -> None:
    room = room_of(store)
    room.save("image-0", FEATURES_OF_ITEM)
    room.take([item(0)])
    room.take([item(1)])
    room.save("image-0", FEATURES_OF_ITEM)
    assert room.take([item(0)]) == [None]


def test_what_is_used_must_be_there_on_every_rank(store: Store) -> None:
    fill(room_of(store, layout=layout([False, False])), item(0), item(1))
    room = room_of(store, layout=layout([False, True]))
    found = room.take([item(0), item(1)])
    assert found[0] is None
    assert found[1] is not None


def test_ranks_do_not_share(store: Store) -> None:
    fill(room_of(store, layout=layout([True])), item(0))
    assert room_of(store, layout=layout([True], rank=1)).take([item(0)]) == [None]
    assert room_of(store, layout=layout([True])).take([item(0)]) != [None]


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {FEATURES: FEATURES_OF_ITEM},
        {FEATURES: FEATURES_OF_ITEM[:3], GRID: torch.tensor([1, 4, 4])},
        {FEATURES: FEATURES_OF_ITEM.reshape(-1), GRID: torch.tensor([1, 4, 4])},
        {FEATURES: FEATURES_OF_ITEM, GRID: torch.tensor([1, 2, 8])},
    ],
    ids=["empty", "no grid", "fewer tokens", "flat", "another grid"],
)
def test_a_planted_package_that_does_not_fit(
    store: Store, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = room_of(store)
    monkeypatch.setattr(store, "find", lambda identity: (Package(tensors), "ram"))
    assert room.take([item(0)]) == [None]


def test_ready_made_embeddings_are_left_alone(store: Store) -> None:
    ready = Item("image-0", {"image_embeds": FEATURES_OF_ITEM}, 4)
    room = room_of(store)
    assert room.take([ready]) == [None]
    room.save("image-0", FEATURES_OF_ITEM)
    assert room.take([ready]) == [None]


def test_the_fingerprint_follows_the_weights(store: Store) -> None:
    model = Tower()
    room = room_of(store, model)
    fill(room, item(0))
    first = room.fingerprint()
    with torch.no_grad():
        model.visual.weight[0, 0] += 1
    assert room.fingerprint() == first  # not looked at for each image
    room.doubt()
    assert room.fingerprint() != first
    assert room.take([item(0)]) == [None]
    with torch.no_grad():
        model.visual.weight[0, 0] -= 1
    model.loaded_weights["visual.weight"] = "of other weights, packed away by a kernel"
    model.num_loads += 1
    assert room.take([item(0)]) == [None]


def test_the_trap(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.load_settings({"tower_trap": True}))
    model = Tower()
    room = room_of(store, model)
    model.before_tower(3)  # vLLM's own runs at start
    fill(room, item(0))
    room.take([item(1)])
    model.before_tower(1)
    with pytest.raises(TowerTrapped, match="entered for 2 images"):
        model.before_tower(2)
    monkeypatch.setattr(store, "find", lambda identity: (None, ""))
    room.take([item(0)])
    with pytest.raises(TowerTrapped, match="the store holds"):
        model.before_tower(1)
    monkeypatch.setattr(settings, "_current", settings.load_settings())
    model.before_tower(1)
