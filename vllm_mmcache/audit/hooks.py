# SPDX-License-Identifier: Apache-2.0
"""The hooks of the audit. Engine process, main thread; installed only where the setting audit is above 0.

Its requests are like any other to the scheduler; what stands here keeps them from clients and from statistics, and
makes way for users. Nothing of it may fail a request.
"""

import logging
import weakref
from functools import partial
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import RequestStatus

from vllm_mmcache.audit import vllm_requests
from vllm_mmcache.audit.auditor import Auditor
from vllm_mmcache.base import settings, uses
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.lifecycle.switch_off import switch_off

logger = logging.getLogger("vllm.mmcache")

AUDITOR = "_mmcache_auditor"
"""The attribute of an EngineCore and of its scheduler that holds the Auditor."""
_FINISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_FIRST = (EngineCoreRequestType.ADD, EngineCoreRequestType.UTILITY)

hook = Hooks(
    "audit",
    "engine",
    why="a share of live requests is computed anew while the engine has nothing to do, and compared",
    upstream="none: vLLM has no requests of its own",
    remove_when="a plugin may put requests of low priority that no client sees",
)


@hook(
    "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop",
    name="begin_of_data_parallel",
    why="a data-parallel engine of a mixture of experts has a loop of its own, and is not audited: the log says so",
)
@hook(
    "vllm.v1.engine.core:EngineCoreProc.run_busy_loop",
    name="begin",
    reads=(
        "vllm.v1.engine.core:EngineCoreProc._notify_idle_state_callbacks",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.can_allocate",
    ),
)
def audit_in_loop(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of EngineCoreProc.run_busy_loop: this engine is audited while it runs, or the log says why not."""
    with failsafe("audit"):
        if reason := vllm_requests.why_not(instance.vllm_config):
            logger.warning("mmcache: there is no audit of this engine: %s", reason)
        else:
            attach(instance)
            logger.info("mmcache: the audit looks at %g of the requests with reuse", settings.current().audit)
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.engine.core:EngineCoreProc._handle_client_request",
    name="work",
    args=("request_type",),
    why="a request of a user comes before those of the audit, which are ended",
)
def make_way(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of EngineCoreProc._handle_client_request(request_type, request), between two steps."""
    auditor: Auditor | None = getattr(instance, AUDITOR, None)
    if auditor is not None and argument(wrapped, args, kwargs, "request_type") in _FIRST:
        with failsafe("audit"):
            auditor.on_work()
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit",
    name="lookup",
    args=("request",),
    why="what a request reused is known when it is looked up",
)
def note_hit(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._get_local_prefix_cache_hit(request)."""
    outcome = wrapped(*args, **kwargs)
    if getattr(instance, AUDITOR, None) is not None:
        with failsafe("audit"):
            request = argument(wrapped, args, kwargs, "request")
            vllm_requests.note_reuse(request, outcome[1], instance.vllm_config)
    return outcome


@hook(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats",
    name="stats",
    args=("request",),
    why="hits of the audit's own requests are none of the users'",
)
def leave_out_of_statistics(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of KVCacheManager.record_prefix_cache_stats(request, num_hits)."""
    if uses.run_of(argument(wrapped, args, kwargs, "request")):
        return None
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._free_request",
    name="finished",
    args=("request",),
    why="a sample is taken of a request when it has its answer",
)
def take_sample(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._free_request(request)."""
    outcome = wrapped(*args, **kwargs)
    auditor: Auditor | None = getattr(instance, AUDITOR, None)
    if auditor is not None:
        with failsafe("audit"):
            request = argument(wrapped, args, kwargs, "request")
            if uses.run_of(request):
                if request.status not in _FINISHED:
                    auditor.on_lost(request)
            elif request.status in _FINISHED:
                auditor.on_finished(request, partial(vllm_requests.sample_of, request))
    return outcome


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    name="take",
    why="answers to the audit's own requests are for no client",
)
def take_answers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.update_from_output: takes the audit's answers out of what goes to the clients."""
    by_client = wrapped(*args, **kwargs)
    auditor: Auditor | None = getattr(instance, AUDITOR, None)
    if auditor is None or not auditor.is_asking:
        return by_client
    own = []
    for client, outputs in list(by_client.items()):
        mine = [one for one in outputs.outputs if one.request_id.startswith(vllm_requests.PREFIX)]
        if mine:
            own += mine
            outputs.outputs = [one for one in outputs.outputs if one not in mine]
            if not outputs.outputs and outputs.scheduler_stats is None and not outputs.finished_requests:
                del by_client[client]
    with failsafe("audit"):
        for output in own:
            if auditor.is_own(output.request_id):
                auditor.on_output(vllm_requests.logprobs_of(output))
        auditor.on_step()
    return by_client


def attach(engine_core: Any) -> Auditor:
    """Audit an engine from now on, where `on_work` and `on_idle` are called."""
    uses.want()
    core = weakref.ref(engine_core)
    engine = vllm_requests.AuditedEngine(engine_core, lambda: on_idle())
    auditor = Auditor(engine, lambda component, reason: switch_off(core(), component, reason))

    def on_idle() -> None:
        with failsafe("audit"):
            auditor.on_idle()

    for owner in (engine_core, engine_core.scheduler):
        setattr(owner, AUDITOR, auditor)
    engine.expect_idle()
    return auditor
