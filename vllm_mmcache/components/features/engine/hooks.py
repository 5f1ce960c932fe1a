# SPDX-License-Identifier: Apache-2.0
"""Puts the store beside vLLM's scheduler: as its encoder-cache connector, vLLM's own interface. Engine process.

Looking for an image's features begins when its request arrives. While they are on their way the request is passed
over and others go on, for no longer than its tower would take; the ranks are told of what lies in the arena. Images
stay on the list of what is to be encoded, so nothing is promised: what does not come is a run of the tower.

The connector is set where vLLM has none, after the engine was built, and not by ec_transfer_config: that would accept
embeddings from clients (`enable_mm_embeds`), make every rank answer every step, and be one per process.
"""

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_mmcache.base import settings
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.base.estimate import Estimate
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.store_url import redact
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.cost_model import CostModel
from vllm_mmcache.components.features.engine.ram_tier import RamTier
from vllm_mmcache.components.features.engine.store import Store
from vllm_mmcache.components.features.engine.transfers import Ranks
from vllm_mmcache.components.features.engine.vllm_connector import TRANSIT_BYTES, Connector
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.storage.open import open_tiers

logger = logging.getLogger("vllm.mmcache")

_prepared: dict[int, Arena] = {}  # id of a VllmConfig -> the arena of its engine
_opened: dict[int, "Connector"] = {}  # id of a VllmConfig -> its engine's, until its scheduler takes it
_connectors = weakref.WeakValueDictionary[int, "Connector"]()  # the same, as long as it is there


hook = Hooks(
    "features",
    "engine",
)


def prepare(vllm_config: Any) -> str:
    """Make the arena of an engine; returns its address for the ranks. Raises: ArenaUnusable."""
    in_force = settings.current()
    arena = Arena.create(in_force.feature_ram_bytes or TRANSIT_BYTES, vllm_config.parallel_config.tensor_parallel_size)
    _prepared[id(vllm_config)] = arena
    # Of an engine that never comes, or that ends without a request.
    for table in (_prepared, _opened, _connectors):
        weakref.finalize(vllm_config, table.pop, id(vllm_config), None)
    return arena.address


def agree_on_trial(told: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """The modalities that all ranks can try their towers with, by what `opening.look_at` gave in each that encodes.

    Raises: StoreUnusable where images are not among them, or not the same in all: their towers wait for each other.
    """
    digests = {modality: {one[modality] for one in told} for modality in ("image", "video")}
    if len(digests["image"]) != 1:
        raise StoreUnusable("what the vision tower would be tried with is not the same in all ranks")
    if len(digests["video"]) != 1:
        logger.info("mmcache: no features of videos are kept: they could not be tried alike in all ranks")
    return tuple(modality for modality, found in digests.items() if len(found) == 1 and all(found))


def open_store(vllm_config: Any, told: Iterable[Mapping[str, Any]]) -> None:
    """Open the store of an engine, with what its ranks told of themselves. Raises: StoreUnusable, SettingsError.

    Where it raises, nothing stays open here; the ranks are to close theirs (opening.close_on_rank).
    """
    arena = _prepared[id(vllm_config)]
    try:
        connector = _connector(vllm_config, arena, told)
    except BaseException:
        close_store(vllm_config)
        raise
    del _prepared[id(vllm_config)]
    _opened[id(vllm_config)] = _connectors[id(vllm_config)] = connector
    in_force = settings.current()
    logger.info(
        "mmcache: features are kept in RAM (%s)%s",
        in_force.feature_ram_bytes.human_readable(),
        f" and in {redact(in_force.store)}, {in_force.store_ttl.until()}" if in_force.store else "",
    )


def _connector(vllm_config: Any, arena: Arena, told: Iterable[Mapping[str, Any]]) -> Connector:
    facts = sorted((one for one in told if one), key=lambda one: int(one["row"]))
    kinds = {tuple(value for name, value in sorted(one.items()) if name != "row") for one in facts}
    if len(facts) != len(arena.board):
        raise StoreUnusable(f"{len(facts)} of the {len(arena.board)} ranks that encode are this engine's own")
    if len(kinds) != 1:
        raise StoreUnusable("what the vision tower makes of an image is not the same in all ranks")
    in_force = settings.current()
    tiers = open_tiers(in_force, FEATURES)
    tower = Estimate(arena.board["tower_s"][0])
    costs = CostModel(tower.seconds, in_force.store_wait_s, [tier.counts for tier in tiers])
    store = Store(arena, RamTier(arena.num_bytes, keeps=in_force.feature_ram_bytes > 0), tiers, costs)
    return Connector(vllm_config, arena, Ranks(arena, facts), store)


def close_store(vllm_config: Any, *, writes: bool = True) -> None:
    """There is no store for this engine, or none any more: its threads end, and its memory and connector are let go.

    The one way to close a store in the engine, for one that was refused at start as for one that is switched off
    later, also again; opening.close_on_rank is that of a rank. Call it between two steps, after `status` says that
    features are off. What is in RAM and `writes` is written to the tiers first, within a few seconds; else it
    may be what is wrong. A scheduler that has taken the connector keeps it for images that come without their pixels
    alone. Engine process, the scheduler's thread.
    """
    if (arena := _prepared.pop(id(vllm_config), None)) is not None:
        arena.close()
    _opened.pop(id(vllm_config), None)
    if (connector := _connectors.pop(id(vllm_config), None)) is not None:
        if connector.has_scheduler:
            connector.close(writes=writes)
        else:
            connector.shutdown()


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.add_request",
    name="on_request_added",
    args=("request",),
    why="looking for an image's features begins when its request arrives, not when it is scheduled",
    upstream="none: a connector first hears of a request when it could be scheduled",
    remove_when="a connector is told of a request when it arrives, and may be set without ec_transfer_config",
)
def on_request_added(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.add_request: what is known of a new request's images is looked for at once."""
    connector = _opened.pop(id(instance.vllm_config), None)
    if connector is not None and instance.ec_connector is None:
        connector.serve(instance)
    if isinstance(instance.ec_connector, Connector):
        with failsafe("features"):
            instance.ec_connector.on_request_added(argument(wrapped, args, kwargs, "request"))
    return wrapped(*args, **kwargs)


def connector_of(scheduler: Any) -> "Connector | None":
    """The store beside a scheduler; None where it has none, or has none any more."""
    found = scheduler.ec_connector
    if not isinstance(found, Connector):
        found = _opened.get(id(scheduler.vllm_config))
    return found if found is not None and not found.is_closed else None


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    name="refuted",
    why="the API server must forget a record that is not of its image, or the next request fails as well",
    upstream="none: a connector can't fail a request, nor name the items whose cache entries are wrong",
    remove_when="a connector can say which items of a request are wrong",
)
def name_refuted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.update_from_output: a step's outputs name images whose records were not their own."""
    by_client = wrapped(*args, **kwargs)
    if isinstance(connector := instance.ec_connector, Connector):
        connector.name_refuted(by_client)
    return by_client
