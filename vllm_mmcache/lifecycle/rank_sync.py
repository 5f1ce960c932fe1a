# SPDX-License-Identifier: Apache-2.0
"""All ranks of an engine have the same components: asked once, when the model is loaded. Engine and worker processes.

The engine asks each worker what its components are, through the executor that it has anyway, and a component that is
off in one rank is switched off in all. Only then do workers begin what is the same in all of them, such as trying the
vision tower, whose ranks wait for each other; and they are asked again. The question is sent by value, since a worker
may be without us. What was found goes to the API servers with the engine's ready message (report.py).
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from vllm_mmcache import __version__
from vllm_mmcache.base import settings, status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.errors import MMCacheError
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.content import image_namer
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.lifecycle import activation
from vllm_mmcache.lifecycle.registry import parts
from vllm_mmcache.metrics import transport

logger = logging.getLogger("vllm.mmcache")

KEY = "mmcache"
"""Of our part in the ready message; vLLM's decoders pass over what they don't know."""
NO_MMCACHE = "it has no mmcache"
_WORKERS = "_mmcache_workers"  # on an executor: rank -> components, or None

PlainStates = dict[str, Any]
"""What a process says as plain data: version, and components: component -> [state, reason]."""


class Trial(NamedTuple):
    """What the ranks begin together when all can: they open the arena and try their towers."""

    arena: str
    """The address of what they share with the engine."""
    modalities: tuple[str, ...]
    """That their towers are tried with."""


NOT_YET = Trial("", ())
"""Each looks by itself whether it could, and makes what it needs for it."""


hook = Hooks(
    "report",
    "engine",
)


def synchronize(executor: Any, vllm_config: Any) -> None:
    """Switch a component off in all ranks where it is off in one, or in the engine.

    Engine process, before any request.
    """
    if vllm_config.parallel_config.node_rank_within_dp > 0:
        return  # the leader asks the workers of this node, too
    _, made = _settle(executor, NOT_YET)
    trial = _prepare(vllm_config, made)
    found, features = _settle(executor, trial)
    if trial.arena and not _open(vllm_config, features):
        found, _ = _settle(executor, NOT_YET)  # and every rank closes what it has opened
    setattr(executor, _WORKERS, found)


def _prepare(vllm_config: Any, made: Sequence[Mapping[str, Any]]) -> Trial:
    """What the ranks shall begin together; nothing where features are not kept. made: what look_at gave in each."""
    if not status.is_on("features"):
        return NOT_YET
    from vllm_mmcache.components.features.engine import hooks

    try:
        return Trial(hooks.prepare(vllm_config), hooks.agree_on_trial(made))
    except MMCacheError as error:
        status.put("engine", "features", State("off", str(error)))
        hooks.close_store(vllm_config)
        return NOT_YET


def _open(vllm_config: Any, told: Iterable[Mapping[str, Any]]) -> bool:
    """Open the engine's store; whether it is open, or need not be said to be off."""
    from vllm_mmcache.components.features.engine import hooks

    if not status.is_on("features"):
        hooks.close_store(vllm_config)
        return True
    try:
        hooks.open_store(vllm_config, told)
    except MMCacheError as error:
        status.put("engine", "features", State("off", str(error)))
        return False
    return True


def _settle(executor: Any, trial: Trial) -> tuple[dict[int, dict[str, State]], list[Mapping[str, Any]]]:
    """Ask all workers, and switch off in all what is off in one. Returns the states by rank, and what told features.

    What is off has one reason in the engine and in all ranks, so that the report says it once.
    """
    found, features = _ask(executor, {}, trial)
    off = {}
    for component in dict.fromkeys([*parts("engine"), *parts("worker")]):
        ours = status.of("engine").get(component)
        of_workers = {f"worker {rank}": states[component] for rank, states in found.items() if component in states}
        if reason := _why_off(ours, of_workers):
            off[component] = reason
            if ours is not None and ours.state != "unneeded":
                status.put("engine", component, State("off", reason))
    some = [component for component in off if any(states.get(component) == ON for states in found.values())]
    if some:
        logger.warning(
            "mmcache: off in all ranks: %s", "; ".join(f"{component}: {off[component]}" for component in some)
        )
        found, _ = _ask(executor, off, NOT_YET)
    for states in found.values():
        states |= {
            component: State("off", reason)
            for component, reason in off.items()
            if component in states
            and states[component].state != "unneeded"
            and states[component].reason != NO_MMCACHE  # which the report looks for
        }
    return found, features


def _why_off(ours: State | None, of_workers: Mapping[str, State]) -> str:
    """Why a component is off in the engine or in a worker; empty if it is in none. ours: what it is in the engine."""
    if ours is None or ours.state != "off":
        return status.why_off(of_workers.items())
    if all(one.reason in ours.reason for one in of_workers.values() if one.state == "off"):
        return ours.reason  # what the ranks say was agreed on before, or they say nothing
    return status.why_off([*of_workers.items(), ("engine", ours)])


def switch_off_in_ranks(executor: Any, off: Mapping[str, str]) -> None:
    """Switch components off in all ranks, while the engine runs: component -> reason.

    Engine process, main thread, between two steps. What a rank keeps for them is closed when this returns.
    """
    if hasattr(executor, _WORKERS):  # or the workers are another node's to ask
        setattr(executor, _WORKERS, _ask(executor, off, NOT_YET)[0])


def of_ranks(executor: Any) -> Mapping[int, Mapping[str, State]]:
    """What the components are in each rank, as it was told last. Engine process."""
    found: Mapping[int, Mapping[str, State]] = getattr(executor, _WORKERS, {})
    return found


@hook(
    "vllm.v1.engine.core:EngineCoreProc._make_ready_response",
    name="send",
    why="every API server, on other machines too, is to know which components the engine and its workers have",
    upstream="none: a plugin can't add to what an engine says when it is ready",
    remove_when="the ready message has a field for plugins, and a plugin is told when the engines are ready",
)
def send_report(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of EngineCoreProc._make_ready_response: what vLLM encodes next and sends to every API server.

    If any API server is on another machine, it may be without mmcache. So no statistics of ours are sent, to any of
    them, until a marked request shows that one has it. With identity off no request is marked, and they are sent at
    once.
    """
    is_near = all(address.startswith("ipc://") for address in instance.addresses.outputs)
    if not is_near and settings.current().identity is not False:
        transport.await_listener()
    return {**msgspec.to_builtins(wrapped(*args, **kwargs)), KEY: of_ready_engine(instance)}


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.add_request",
    name="heard",
    args=("request",),
    why="API servers on other machines may be without mmcache, and vLLM's log of statistics would end there at ours",
    upstream="none: an engine is not told what plugins its API servers have",
    remove_when="statistics have a field for plugins",
)
def note_listener(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.add_request: sends our statistics from the first request with a mark of image_namer on.

    It shows that an API server has mmcache.
    """
    if not transport.is_heard() and image_namer.of(argument(wrapped, args, kwargs, "request")) is not None:
        transport.note_listener()
    return wrapped(*args, **kwargs)


def of_ready_engine(engine_core: Any) -> dict[str, PlainStates]:
    """As of_engine, when the engine has become ready: what should have been tried and was not is off."""
    if activation.on_trial(engine_core.vllm_config):
        from vllm_mmcache.lifecycle import trial_hooks

        trial_hooks.end(engine_core)
    return of_engine(engine_core)


def of_engine(engine_core: Any) -> dict[str, PlainStates]:
    """What is told of each process of an engine, by name. Engine process, when it has its scheduler."""
    if status.is_on("image_checkpoints"):
        from vllm_mmcache.components.image_checkpoints.hooks import why_unneeded

        if reason := why_unneeded(engine_core.scheduler):
            for name in ("image_checkpoints", "inner_checkpoints"):
                if status.is_on(name):
                    activation.step_aside("engine", name, reason)
    workers = of_ranks(engine_core.model_executor)
    processes = {"engine": status.of("engine"), **{f"worker {rank}": states for rank, states in workers.items()}}
    return {process: as_plain_data(states) for process, states in processes.items()}


def of_worker(worker: Any, off: Mapping[str, str], arena: str, modalities: Sequence[str]) -> PlainStates:
    """What is told of this worker, after the components named were switched off. Worker process, asked by the engine.

    arena: address of what it shares with the engine. With one, all ranks have the same components, and what to try
    their towers with in these modalities, so what they do together can begin; until then each looks by itself.
    """
    for component, reason in off.items():
        if component in status.of("worker") and status.of("worker")[component].state != "unneeded":
            status.put("worker", component, State("off", reason))  # the same reason everywhere, with the ranks it is of
    if "features" in off:
        from vllm_mmcache.components.features.worker import opening

        opening.close_on_rank(worker)
    if status.of("worker").get("inner_checkpoints") == ON:
        from vllm_mmcache.components.inner_checkpoints import hooks_worker

        hooks_worker.look_at(worker)
    features: Mapping[str, Any] = {}
    if status.is_on("features"):
        from vllm_mmcache.components.features.worker import opening

        features = opening.open_on_rank(worker, arena, modalities) if arena else opening.look_at(worker)
    return {**as_plain_data(status.of("worker")), "features": features}


def as_plain_data(states: Mapping[str, State]) -> PlainStates:
    """States as plain data."""
    return {
        "version": __version__,
        "components": {component: [one.state, one.reason] for component, one in states.items()},
    }


def read(said: PlainStates | None, parts: Mapping[str, Any]) -> dict[str, State]:
    """The states out of plain data. Of a process that said nothing, or is of another version, all `parts` are off."""
    if said is None or said["version"] != __version__:
        reason = NO_MMCACHE if said is None else f"it has mmcache {said['version']}, not {__version__}"
        return {component: State("off", reason) for component in parts}
    return {component: State(state, reason) for component, (state, reason) in said["components"].items()}


def _ask(
    executor: Any, off: Mapping[str, str], trial: Trial
) -> tuple[dict[int, dict[str, State]], list[Mapping[str, Any]]]:
    answers = executor.collective_rpc(_question(dict(off), trial.arena, trial.modalities))
    states = {rank: read(said, parts("worker")) for rank, said in answers}
    return states, [said["features"] for _, said in answers if said is not None and said.get("features")]


def _question(
    off: dict[str, str], arena: str, modalities: tuple[str, ...]
) -> Callable[[Any], tuple[int, PlainStates | None]]:
    def question(wrapper: Any) -> tuple[int, PlainStates | None]:  # of a function: so it is pickled by value
        ours: Any = sys.modules.get("vllm_mmcache.lifecycle.rank_sync")
        is_ours = ours is not None and ours.status.of("worker")
        worker = getattr(wrapper, "worker", wrapper)
        return worker.rank, ours.of_worker(worker, off, arena, modalities) if is_ours else None

    return question
