# SPDX-License-Identifier: Apache-2.0
"""Wrong results, planted by name: what a trial of the components must find. In this process, or in another one.

`plant(name)` changes code of this project, in whatever process it is called, before an engine starts or after. For
other processes `planted_in` gives the variables with which each of them calls it when it loads its plugins.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NAME = "TEST_PLANTED_FAULT"
Set = Callable[[Any, str, Any], None]
"""Sets an attribute, as setattr does, or so that it is taken back."""


@dataclass(frozen=True)
class Fault:
    """A fault of one component, and the families of the zoo on which it makes answers wrong."""

    component: str
    families: tuple[str, ...]
    plant: Callable[[Set], None]


def _another_image(set_: Set) -> None:
    """The features of a step's images are each other's."""
    from vllm_mmcache.components.features.worker.rank import RankFeatures

    take = RankFeatures._take

    def wrong(self: Any, places: list[Any], outputs: dict[str, Any]) -> set[str]:
        names = take(self, places, outputs)
        found = [outputs[place.mm_hash].clone() for place in places]
        for place, features in zip(places, [*found[1:], *found[:1]], strict=True):
            outputs[place.mm_hash].copy_(features)
        return names

    set_(RankFeatures, "_take", wrong)


def _changed(change: Callable[[Any], Any]) -> Callable[[Set], None]:
    def plant(set_: Set) -> None:
        from vllm_mmcache.components.features.worker.rank import RankFeatures

        take = RankFeatures._take

        def wrong(self: Any, places: list[Any], outputs: dict[str, Any]) -> set[str]:
            names = take(self, places, outputs)
            for name in names:
                outputs[name].copy_(change(outputs[name].clone()))
            return names

        set_(RankFeatures, "_take", wrong)

    return plant


def _forgotten_image(set_: Set) -> None:
    """Keys know the first image of a prompt alone."""
    from vllm_mmcache.components.block_keys.hasher import BlockHasher

    call = BlockHasher.__call__

    def wrong(self: Any, request: Any) -> list[bytes]:
        features = request.mm_features
        request.mm_features = features[:1]
        try:
            return call(self, request)
        finally:
            request.mm_features = features

    set_(BlockHasher, "__call__", wrong)


def _window_of_a_block_before(set_: Set) -> None:
    """What is kept of a sliding window at a checkpoint is the window of a block before."""
    from vllm_mmcache.components.image_checkpoints.vllm_underway import Underway

    keeping = Underway._keeping

    def wrong(self: Any, manager: Any, cache_blocks: Callable[..., Any], checkpoints: Any) -> Callable[..., Any]:
        def cache_others(request: Any, *args: Any, **kwargs: Any) -> Any:
            held = manager.req_to_blocks[request.request_id]
            manager.req_to_blocks[request.request_id] = [*held[:1], *held[:-1]]
            try:
                return cache_blocks(request, *args, **kwargs)
            finally:
                manager.req_to_blocks[request.request_id] = held

        return keeping(self, manager, cache_others, checkpoints)

    set_(Underway, "_keeping", wrong)


def _state_of_a_block_before(set_: Set) -> None:
    """A state that is kept inside a step is that of half a block before."""
    from vllm_mmcache.components.inner_checkpoints.vllm_blocks import InnerBlocks

    take = InnerBlocks.take_cuts

    def wrong(self: Any, scheduled: Any) -> Any:
        block = self.mamba[0].block_size
        return {
            name: tuple(replace(cut, offset=max(1, cut.offset - block // 2)) for cut in cuts)
            for name, cuts in take(self, scheduled).items()
        }

    set_(InnerBlocks, "take_cuts", wrong)


def _cut_span(set_: Set) -> None:
    """A step may end in the middle of an image."""
    from vllm_mmcache.components.image_spans import hooks_engine

    set_(hooks_engine, "whole_spans", lambda start, num_new_tokens, spans: num_new_tokens)


def _causal_images(set_: Set) -> None:
    """The tokens of an image see what came before them alone, in cold runs as in warm ones."""
    from vllm_mmcache.components.image_spans import vllm_backend

    set_(vllm_backend, "cut_step", lambda starts, ends, spans: None)


ALL = ("qwen3-vl", "gemma3", "gemma4", "qwen3.5", "qwen2-vl", "qwen2.5-vl", "qwen3-vl-moe")
FAULTS: dict[str, Fault] = {
    "feature_of_another_image": Fault("features", ALL, _another_image),
    "feature_shifted_by_a_row": Fault("features", ALL, _changed(lambda features: features.roll(1, 0))),
    "feature_of_other_weights": Fault("features", ALL, _changed(lambda features: features * 1.2)),
    "keys_forget_the_second_image": Fault("block_keys", ALL, _forgotten_image),
    "checkpoint_off_by_a_block": Fault("image_checkpoints", ("gemma3", "gemma4"), _window_of_a_block_before),
    "inner_checkpoint_off": Fault("inner_checkpoints", ("qwen3.5",), _state_of_a_block_before),
    "span_cut_in_the_middle": Fault("image_spans", ("gemma3", "gemma4"), _cut_span),
    "causal_images": Fault("image_spans", ("gemma3", "gemma4"), _causal_images),
}


def plant(name: str, set_: Set = setattr) -> None:
    """Plant a fault in this process. Raises: KeyError for an unknown one."""
    FAULTS[name].plant(set_)


def planted_in(folder: Path, name: str) -> dict[str, str]:
    """Variables for another process, and those that it starts, in which a fault is planted. `folder` is theirs."""
    info = folder / "planted_faults-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nplanted = tests.support.planted_faults:plant_as_said\n"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), str(root), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, NAME: name, "VLLM_PLUGINS": "mmcache,planted"}


def plant_as_said() -> None:
    """Plant what the variable names; called by vLLM, once a process."""
    name = os.environ.get(NAME)
    if name and not getattr(importlib.import_module(__name__), "_planted", False):
        globals()["_planted"] = True
        plant(name)
