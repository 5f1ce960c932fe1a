# SPDX-License-Identifier: Apache-2.0
"""What the room decides without an engine: agreement of ranks, what fits, the fingerprint, and the trap."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_mmcache import settings
from vllm_mmcache.errors import TowerTrapped
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.package import FEATURES, GRID, Package, pack
from vllm_mmcache.features.probe import Kind
from vllm_mmcache.features.ram import RamTier
from vllm_mmcache.features.room import Facts, Item, Layout, Room, misfit
from vllm_mmcache.features.store import Store
from vllm_mmcache.features.tower import Tower

FACTS = Facts("model", "processor", "float32")
FEATURES_OF_ITEM = torch.arange(12.0).reshape(4, 3)


KIND = Kind(3, torch.float32)


class Model(torch.nn.Module):
    """A vision tower and a language model, marked as vLLM marks them."""

    _language_model_names = ("language_model",)

    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(self.visual.weight)
        torch.nn.init.zeros_(self.visual.bias)
        self.language_model = torch.nn.Linear(3, 3)


def layout(others: list[bool] | None = None, rank: int = 0) -> Layout:
    """`others` are the findings of the other rank."""

    def agree(has: list[bool]) -> list[bool]:
        return has if others is None else [a and b for a, b in zip(has, others, strict=True)]

    return Layout(rank, 1 if others is None else 2, agree)


def room_of(store: Store, tower: Tower | None = None, **more: Any) -> Room:
    return Room(tower or Tower(Model()), KIND, store, FACTS, more.pop("layout", layout()))


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


GRID_OF_ITEM = torch.tensor([1, 4, 4])
MISFITS = {
    "empty": {},
    "no grid": {FEATURES: FEATURES_OF_ITEM},
    "fewer tokens": {FEATURES: FEATURES_OF_ITEM[:3], GRID: GRID_OF_ITEM},
    "flat": {FEATURES: FEATURES_OF_ITEM.reshape(-1), GRID: GRID_OF_ITEM},
    "another grid": {FEATURES: FEATURES_OF_ITEM, GRID: torch.tensor([1, 2, 8])},
    "another hidden size": {FEATURES: FEATURES_OF_ITEM[:, :2], GRID: GRID_OF_ITEM},
    "one level more": {FEATURES: FEATURES_OF_ITEM.repeat(1, 2), GRID: GRID_OF_ITEM},
    "another dtype": {FEATURES: FEATURES_OF_ITEM.to(torch.bfloat16), GRID: GRID_OF_ITEM},
}


@pytest.mark.parametrize("tensors", MISFITS.values(), ids=MISFITS)
def test_a_package_that_does_not_fit_is_a_miss_and_set_aside(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Planted under the right identity; what fits is found the same way (the control)."""
    disk = DiskTier(tmp_path, 10**6)
    room = room_of(Store(RamTier(0), [disk]))
    assert room.take([item(0)]) == [None]
    identity = room._expected["image-0"][0]
    disk.save(identity.key, pack(identity, Package.of({FEATURES: FEATURES_OF_ITEM, GRID: GRID_OF_ITEM})))
    assert room.take([item(0)]) != [None]
    disk.directory.path_of(identity.key).write_bytes(pack(identity, Package.of(tensors)))
    assert room.take([item(0)]) == [None]
    assert disk.counters.snapshot()["set_aside"] == 1
    assert not disk.has(identity)


def test_what_the_tower_gave_must_fit_too(store: Store) -> None:
    room = room_of(store)
    room.take([item(0)])
    room.save("image-0", FEATURES_OF_ITEM[:2])
    assert room.take([item(0)]) == [None]


def test_a_misfit_is_named() -> None:
    package = Package.of(MISFITS["another hidden size"])
    assert misfit(package, item(0), KIND) == ("features (4, 2) torch.float32, this model's are (4, 3) torch.float32")
    assert not misfit(Package.of({FEATURES: FEATURES_OF_ITEM, GRID: GRID_OF_ITEM}), item(0), KIND)


def test_ready_made_embeddings_are_left_alone(store: Store) -> None:
    ready = Item("image-0", {"image_embeds": FEATURES_OF_ITEM}, 4)
    room = room_of(store)
    assert room.take([ready]) == [None]
    room.save("image-0", FEATURES_OF_ITEM)
    assert room.take([ready]) == [None]


def test_the_fingerprint_follows_the_weights(store: Store) -> None:
    model = Model()
    tower = Tower(model)
    room = room_of(store, tower)
    fill(room, item(0))
    first = room.fingerprint()
    with torch.no_grad():
        model.visual.weight[0, 0] += 1
    assert room.fingerprint() == first  # not looked at for each image
    tower.doubt()
    assert room.fingerprint() != first
    assert room.take([item(0)]) == [None]
    with torch.no_grad():
        model.visual.weight[0, 0] -= 1
        model.language_model.weight[0, 0] += 1  # no part of it
    tower.doubt()
    assert room.fingerprint() == first
    tower.loaded["visual.weight"] = "of other weights, packed away by a kernel"
    tower.num_loads += 1
    assert room.take([item(0)]) == [None]


def test_the_trap(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.load_settings({"tower_trap": True}))
    room = room_of(store)
    room.spring_trap(3)  # vLLM's own runs at start
    fill(room, item(0))
    room.take([item(1)])
    room.spring_trap(1)
    with pytest.raises(TowerTrapped, match="entered for 2 images"):
        room.spring_trap(2)
    monkeypatch.setattr(store, "find", lambda identity, misfit: (None, ""))
    room.take([item(0)])
    with pytest.raises(TowerTrapped, match="the store holds"):
        room.spring_trap(1)
    monkeypatch.setattr(settings, "_current", settings.load_settings())
    room.spring_trap(1)
