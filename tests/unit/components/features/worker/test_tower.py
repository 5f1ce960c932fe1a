# SPDX-License-Identifier: Apache-2.0
"""What belongs to a model's vision tower, and how its weights are watched."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from vllm_mmcache.components.features.worker.tower import Tower, watched

WEIGHT = torch.arange(4.0)


class Model(torch.nn.Module):
    """As vLLM's classes are: marked, with a mapper of checkpoint names where those differ."""

    hf_to_vllm_mapper = SimpleNamespace(map_name=lambda name: name.replace("model.text.", "language_model."))

    def __init__(self, marked: tuple[str, ...] = ("language_model",)) -> None:
        super().__init__()
        self.visual, self.ears, self.language_model = (torch.nn.Linear(2, 2) for _ in range(3))
        self.newline = torch.nn.Parameter(torch.zeros(2))
        self._language_model_names = marked

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


def test_everything_outside_of_the_language_model_belongs_to_it() -> None:
    names = {name for name, _ in Tower(Model()).tensors()}
    assert names == {"visual.weight", "visual.bias", "ears.weight", "ears.bias", "newline"}


def test_a_name_that_only_starts_alike_is_another() -> None:
    model = Model()
    model.language_model_projector = torch.nn.Linear(2, 2)
    assert "language_model_projector.weight" in {name for name, _ in Tower(model).tensors()}


def test_an_unmarked_model_is_refused() -> None:
    with pytest.raises(LookupError, match="Model does not mark its language model"):
        Tower(Model(marked=()))


def test_loading_is_watched_and_not_changed() -> None:
    model = Model()
    tower = Tower(model)
    tower.watch(notes=True)
    assert watched(model) is tower
    weights = {"model.text.layers.0.weight": WEIGHT, "model.visual.weight": WEIGHT, "visual.bias": WEIGHT}
    assert model.load_weights(iter(weights.items())) == weights.keys()
    assert tower.loaded.keys() == {"model.visual.weight", "visual.bias"}
    assert tower.num_loads == 1
    before = dict(tower.loaded)
    model.load_weights([("visual.bias", WEIGHT + 1)])
    assert {name for name in before if before[name] != tower.loaded[name]} == {"visual.bias"}
    model.load_weights([("visual.bias", WEIGHT)])
    assert tower.loaded == before
    assert tower.num_loads == 3


def test_loading_is_guarded() -> None:
    tower, seen = Tower(model := Model()), []

    @contextmanager
    def guard() -> Iterator[None]:
        seen.append(tower.num_loads)
        yield
        seen.append(tower.num_loads)

    tower.watch(notes=False)
    tower.guard = guard
    model.load_weights([("visual.bias", WEIGHT)])
    assert seen == [0, 1]
    assert tower.loaded == {}


def test_a_load_that_fails_counts() -> None:
    """Half of the weights may be new."""
    tower = Tower(model := Model())
    tower.watch(notes=True)

    def breaks() -> Iterable[tuple[str, torch.Tensor]]:
        yield "visual.bias", WEIGHT
        raise OSError("the file ends here")

    with pytest.raises(OSError, match="ends here"):
        model.load_weights(breaks())
    assert tower.num_loads == 1


def test_weights_that_are_packed_away_are_seen() -> None:
    model = Model()
    assert Tower(model).hidden_weights() == []
    model.visual.weight = torch.nn.Parameter(torch.empty(0))
    assert Tower(model).hidden_weights() == ["visual.weight"]
