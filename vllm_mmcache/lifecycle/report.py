# SPDX-License-Identifier: Apache-2.0
"""The one report of what is in force, over all processes of a deployment. API process, or the offline program.

Each engine's ready message brings its components and those of its workers (rank_sync.py), from other machines, too.
When all engines are ready, that and this process's own components are put together: logged in one line, shown on
/metrics as mmcache:component_info and on /mmcache. Where tenants must be kept apart, a process without us ends the
start.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_mmcache import __version__
from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.errors import HookError
from vllm_mmcache.base.status import State
from vllm_mmcache.content import image_namer
from vllm_mmcache.hooking import installer, subclasses
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.lifecycle import activation, config_rules, display, rank_sync
from vllm_mmcache.lifecycle.registry import COMPONENT_NAMES, parts
from vllm_mmcache.metrics import counters, transport
from vllm_mmcache.trial.verdict import NOT_PASSED

logger = logging.getLogger("vllm.mmcache")

_ENGINES = "_mmcache_engines"  # on a client: index of an engine -> what its ready message said, or None

_is_shown = False


hook = Hooks(
    "report",
    "api",
    why="when its engines are ready, a process knows what is in force everywhere, and says so",
    upstream="none: a plugin can't add to what an engine says when it is ready",
    remove_when="the ready message has a field for plugins, and a plugin is told when the engines are ready",
)


@hook(
    "vllm.v1.engine.core_client:MPClient._apply_ready_response",
    name="receive",
    args=("payload",),
    why="where the engine's message arrives",
)
def receive(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of MPClient._apply_ready_response(payload): once for each engine, also for those that come later."""
    payload = argument(wrapped, args, kwargs, "payload")
    outcome = wrapped(payload)
    said = msgspec.msgpack.decode(payload) if payload else {}
    engines = instance.__dict__.setdefault(_ENGINES, {})
    engines[said.get("data_parallel_rank", len(engines))] = said.get(rank_sync.KEY)
    if _is_shown:
        _show(status.places()["api"], engines)
    return outcome


@hook(
    "vllm.v1.engine.async_llm:AsyncLLM.__init__",
    name="show",
    args=("vllm_config",),
)
@hook(
    "vllm.v1.engine.llm_engine:LLMEngine.__init__",
    name="show_offline",
    args=("vllm_config",),
)
def show_when_ready(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of AsyncLLM.__init__ and LLMEngine.__init__(vllm_config): the engines are ready after it.

    Raises: HookError, see `_show`; UnschedulableImage or CausalImages before, where no image could be right.
    """
    global _is_shown
    _is_shown = False
    status.settle({}, COMPONENT_NAMES)
    if status.is_on("image_spans"):
        from vllm_mmcache.components.image_spans.hooks_api import refuse_unservable

        refuse_unservable(argument(wrapped, args, kwargs, "vllm_config"))
    outcome = wrapped(*args, **kwargs)
    client = instance.engine_core
    inside = getattr(client, "engine_core", None)  # of an engine in this process
    is_inside = hasattr(inside, "scheduler")
    engines = {0: rank_sync.of_ready_engine(inside)} if is_inside else client.__dict__.get(_ENGINES, {})
    found = _found_here(instance)
    if "identity" in found:
        image_namer.may_bypass_identity(instance.output_processor)
    try:
        _show({**status.of("api"), **found}, engines)
    except BaseException:
        client.shutdown()
        raise
    return outcome


@hook(
    "vllm.v1.utils:RustFrontendProcessManager.__init__",
    name="no_python",
    why="with the Rust frontend nothing of ours is between clients and engines, and nobody would say so",
)
def no_python(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of RustFrontendProcessManager.__init__: nothing of ours is between clients and engines.

    Raises: HookError, where tenants must be kept apart.
    """
    activation.refuse_if_required(f"{config_rules.NO_PYTHON}, so {activation.WITHOUT_IDENTITY}")
    off = ", ".join(parts("api"))
    logger.error("mmcache: %s: off are %s; %s", config_rules.NO_PYTHON, off, activation.WITHOUT_IDENTITY)
    return wrapped(*args, **kwargs)


def _found_here(llm: Any) -> dict[str, State]:
    """What is known of this process's components only when its renderer is there."""
    is_ours = isinstance(llm.renderer, subclasses.RendererMixin)
    found = with_renderer(subclasses.base_of(llm.renderer), is_ours=is_ours)
    if not llm.log_stats:
        found["metrics"] = State("unneeded", "vLLM's own statistics are off here")
    if not hasattr(llm, "generate"):
        found["image_extraction"] = State("unneeded", "no server here")
    on = status.of("api")
    return {component: state for component, state in found.items() if on.get(component) == status.ON}


def with_renderer(renderer: type, *, is_ours: bool = True) -> dict[str, State]:
    """What is off in an API server whose renderer is of this class, as it is without us.

    is_ours: whether it was made from our subclass of it, as it is where vLLM takes it from its registry.
    """
    from vllm.renderers.base import BaseRenderer
    from vllm.renderers.hf import HfRenderer

    found, name = {}, renderer.__qualname__
    if renderer is not HfRenderer:
        found["image_extraction"] = State("off", f"not shown to be right with the renderer {name}")
    methods: list[str] = []
    with contextlib.suppress(HookError):  # with which identity is off already
        hooked = [installer.resolve_owner(member.target) for member in parts("api")["identity"].hooks_in("api")]
        methods = [attribute for owner, attribute in hooked if owner is BaseRenderer and attribute.startswith("_")]
    above = [one for one in renderer.__mro__ if not one.__module__.startswith("vllm.")]
    if not is_ours or any(method in vars(one) for one in above for method in methods):
        found["identity"] = State("off", f"the renderer {name} is not vLLM's and may go past it")
    return found


def _show(here: dict[str, State], engines: Mapping[int, Any]) -> None:
    """Put together, log, export. Raises: HookError, where tenants must be kept apart and a process is without us."""
    global _is_shown
    places = {"api": here}
    for index, told in engines.items():
        places |= _places_of(index, told)
    _follow_trials(here, places)
    found = _publish(places)
    for line in display.storage_summary(found):
        logger.info("mmcache: %s", line)
    without = [place for place, states in places.items() if rank_sync.NO_MMCACHE in {s.reason for s in states.values()}]
    if without:
        activation.refuse_if_required(f"mmcache is not in {', '.join(without)}")
    if "identity" in here and here["identity"].state == "off":
        activation.refuse_if_required(f"identity is off ({here['identity'].reason}), so {activation.WITHOUT_IDENTITY}")
    _is_shown = True


def _follow_trials(here: dict[str, State], places: Mapping[str, Mapping[str, State]]) -> None:
    """What an engine's trial has switched off is off in this process as well."""
    for name in [name for name, state in here.items() if state == status.ON]:
        elsewhere = (states[name] for place, states in places.items() if place != "api" and name in states)
        if off := next((one for one in elsewhere if one.reason.startswith(NOT_PASSED)), None):
            here[name] = off
            status.put("api", name, off)


def _places_of(index: int, told: Any) -> dict[str, dict[str, State]]:
    """What an engine told of itself and its workers, by the names of these places; of one without us, all is off."""
    places = {}
    for process, said in (told or {"engine": None}).items():
        place = f"engine {index}" if process == "engine" else f"{process} of engine {index}"
        places[place] = rank_sync.read(said, {**parts("engine"), **(parts("worker") if told is None else {})})
    return places


def _publish(places: Mapping[str, Mapping[str, State]]) -> dict[str, State]:
    """Say what is in force over these processes, in this process, on /metrics and in the log."""
    status.settle(places, COMPONENT_NAMES)
    found = status.in_force()
    for info in (counters.COMPONENT_INFO, counters.ROOM_INFO):
        info.show({(component, state.state, state.reason) for component, state in found.items()})
    logger.info("mmcache %s in force: %s", __version__, activation.words(found.items()))
    return found


def _change(index: int, told: Any) -> None:
    """An engine that serves says what its components have become (switch_off.py).

    What no engine has on any more has nothing to do in this process, either.
    """
    if not _is_shown:
        return
    places = {**status.places(), **_places_of(index, told)}
    for component, here in places["api"].items():
        found = [
            (place, states[component]) for place, states in places.items() if place != "api" and component in states
        ]
        if here == status.ON and found and all(state.state == "off" for _, state in found):
            status.put("api", component, status.combine(found))
    _publish({**places, "api": {**places["api"], **status.of("api")}})


transport.listen(_change)
