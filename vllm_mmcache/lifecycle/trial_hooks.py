# SPDX-License-Identifier: Apache-2.0
"""Has an engine tried before it says that it is ready, where components are on that were not shown to be exact on it.

Engine process, its main thread: the last thing that EngineCore.__init__ does. So every API server waits for it, and
what the trial finds goes to them with the ready message (rank_sync.py). What passes is kept with the user's proofs, so
that the next start needs no trial.
"""

import logging
import weakref
from typing import Any

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.errors import HookError, ProofsUnwritable
from vllm_mmcache.base.status import ON
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.lifecycle import activation, rank_sync, user_proofs
from vllm_mmcache.lifecycle.switch_off import switch_off
from vllm_mmcache.trial.verdict import NOT_PASSED

logger = logging.getLogger("vllm.mmcache")

HOW = "trial at start"
"""How a proof was made, in the user's file."""

_TRIED = "_mmcache_tried"
"""On an engine: that its components were tried, or need not be."""

_being_made: Any = None  # a weak reference to the engine that is being made


hook = Hooks(
    "trial",
    "engine",
    why="components are tried on the user's own engine before it serves",
    upstream="none: a plugin is not told when an engine is built and not yet ready",
    remove_when="a plugin is told when an engine is built and not yet ready",
)


@hook(
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    name="begin",
)
def note_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of EngineCore._initialize_kv_caches: the engine that is being made."""
    global _being_made
    _being_made = weakref.ref(instance)
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.engine.core:freeze_gc_heap",
    name="try",
    reads=("vllm.v1.engine.core:EngineCore.__init__",),
)
def try_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of freeze_gc_heap as EngineCore.__init__ sees it, which calls it when all else is made."""
    global _being_made
    engine_core = _being_made() if _being_made is not None else None
    _being_made = None
    if engine_core is not None:
        if settings.current().attention == "reference":
            _serve_with_reference(engine_core)
        _try(engine_core)
    return wrapped(*args, **kwargs)


def end(engine_core: Any) -> None:
    """The engine is ready: what should have been tried and was not is off. Engine process."""
    missed = _to_try(engine_core)
    setattr(engine_core, _TRIED, True)
    for component in missed:
        switch_off(engine_core, component, f"{NOT_PASSED} was not made", is_ready=False)


def _to_try(engine_core: Any) -> list[str]:
    """The components that are on and were not shown to be exact on this engine."""
    if getattr(engine_core, _TRIED, False):
        return []
    on = {**status.of("worker"), **status.of("engine")}
    for states in rank_sync.of_ranks(engine_core.model_executor).values():
        on |= {name: state for name, state in states.items() if name not in on or on[name] == ON}
    return [name for name in activation.on_trial(engine_core.vllm_config) if on.get(name) == ON]


def _serve_with_reference(engine_core: Any) -> None:
    """Raises: HookError, where the naive attention can't be had: it was asked for, to be sure of what it gives."""
    from vllm_mmcache.reference_attention.vllm_layers import serve_with_reference

    reasons = [reason for reason in engine_core.collective_rpc(serve_with_reference) if reason]
    if reasons:
        raise HookError(f"attention=reference can't be had on this engine: {reasons[0]}. Unset MMCACHE_ATTENTION")
    logger.warning("mmcache: attention is computed in its plainest form, which is slow (the setting attention)")


def _try(engine_core: Any) -> None:
    from vllm_mmcache.components.image_checkpoints.hooks import why_unneeded
    from vllm_mmcache.trial.sequence import Trial

    components = _to_try(engine_core)
    if why_unneeded(engine_core.scheduler):
        components = [name for name in components if name not in ("image_checkpoints", "inner_checkpoints")]
    if not engine_core.log_stats:  # then nobody hears what is counted
        components = [name for name in components if name != "metrics"]
    setattr(engine_core, _TRIED, True)
    if not components:
        return
    logger.info("mmcache: trying %s on this engine", ", ".join(components))
    trial = Trial(
        engine_core,
        components,
        settings.current().trial_s,
        lambda component, reason: switch_off(engine_core, component, reason, is_ready=False),
    )
    verdict = trial.run()
    if verdict.differed or verdict.untried:
        logger.warning("mmcache: trial of this engine: %s", verdict)
    else:
        logger.info("mmcache: trial of this engine: %s", verdict)
    if verdict.attention_wrong:
        logger.error(
            "mmcache: attention of this engine is not what its naive form gives: %s. Answers may be wrong, also of "
            "stock vLLM. Way out: another --attention-backend, or --enforce-eager",
            verdict.attention_wrong,
        )
    if settings.current().attention == "reference":
        return  # it says nothing of this engine's own attention
    # With wrong attention the next start is to say so again, which one without a trial could not: no proof stays.
    passed, failed = verdict.passed, list(verdict.differed)
    if verdict.attention_wrong:
        passed, failed = [], [*failed, *passed]
    try:
        scope = user_proofs.ProofScope.of(engine_core.vllm_config)
        user_proofs.add(scope, passed, HOW, [], failed=failed)
    except ProofsUnwritable as error:
        logger.warning("mmcache: the next start tries this engine again: %s", error)
