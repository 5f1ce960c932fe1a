# SPDX-License-Identifier: Apache-2.0
"""Carries the counters of worker and engine to /metrics with what these send each other anyway.

A worker adds what it has counted since its last step to the step's output, the scheduler what it has counted since its
last statistics to the statistics; whoever receives takes it out again before vLLM's own code sees it. So counters of
engines on other machines arrive, too, and no file or port is needed. Of several tensor-parallel ranks the one whose
output vLLM uses is heard; the ranks run the same images. With pipeline stages the images are the first one's and the
last one's output is used, so each stage hands on what it has counted with the tensors that it sends to the next.
"""

import json
from typing import Any

import torch
import wrapt
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters, table_sizes, transport

_PREFIX = "mmcache:"
_COUNTS = "mmcache_counts"  # attribute of a step's ModelRunnerOutput


hook = Hooks(
    "metrics",
    "worker",
    why="what is counted in the worker is to reach the engine; ModelRunnerOutput has no field for plugins",
    upstream="none: the stat logger plugins receive, but nothing sends",
    remove_when="a plugin can add to SchedulerStats, and its worker's side to ModelRunnerOutput",
)


class _OutputWithCounts(wrapt.ObjectProxy[Any]):
    """An AsyncModelRunnerOutput, which is still being copied from the device; the counts are added when it is here.

    With async scheduling another thread waits for it, while this one is in its next step.
    """

    def get_output(self) -> Any:
        return _with_counts(self.__wrapped__.get_output())


@hook(
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    name="attach_step",
)
@hook(
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
    name="attach_sample",
)
def attach_counts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.execute_model and Worker.sample_tokens: the step's output gets what was counted since the last.

    Worker process; the last pipeline stage alone, whose output is read.
    """
    output = wrapped(*args, **kwargs)
    if not get_pp_group().is_last_rank:
        return output  # nobody reads it
    if isinstance(output, AsyncModelRunnerOutput):
        return _OutputWithCounts(output)
    return _with_counts(output)


def _with_counts(output: Any) -> Any:
    if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
        counts = transport.take_worker_counts()
        if counts is not None:
            setattr(output, _COUNTS, counts)
    return output


@hook(
    "vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict",
    name="forward_counts",
    args=("tensor_dict",),
    only="pipeline stages",
    why="of pipeline stages the first runs the vision tower, and the last one's output alone reaches the engine",
)
def forward_counts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of GroupCoordinator.isend_tensor_dict(tensor_dict); worker process.

    The counts are the name of an empty tensor: some groups send tensors alone, but all send their names.
    """
    tensors = argument(wrapped, args, kwargs, "tensor_dict")
    counts = transport.take_worker_counts() if instance is get_pp_group() and not instance.is_last_rank else None
    if counts is None:
        return wrapped(*args, **kwargs)
    more = {name: value for name, value in kwargs.items() if name != "tensor_dict"}
    return wrapped({**tensors, _PREFIX + json.dumps(counts): torch.empty(0)}, *args[1:], **more)


@hook(
    "vllm.distributed.parallel_state:GroupCoordinator.irecv_tensor_dict",
    name="receive_counts",
    only="pipeline stages",
    why="of pipeline stages the first runs the vision tower, and the last one's output alone reaches the engine",
)
def receive_counts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of GroupCoordinator.irecv_tensor_dict: takes the counts out, so that vLLM sees only what it has sent.

    Worker process.
    """
    outcome = wrapped(*args, **kwargs)
    tensors = outcome[0]
    for name in [name for name in tensors or () if name.startswith(_PREFIX)]:
        del tensors[name]
        transport.receive_worker_counts(json.loads(name.removeprefix(_PREFIX)))
    return outcome


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    name="collect_counts",
    process="engine",
    args=("model_runner_output",),
    why="a worker with a process of its own can't be asked",
)
def collect_counts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.update_from_output(_, model_runner_output): takes the counts out of a step's output.

    Engine process.
    """
    output = argument(wrapped, args, kwargs, "model_runner_output")
    counts = vars(output).pop(_COUNTS, None)
    if counts is not None:
        transport.receive_worker_counts(counts)
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
    name="send",
    process="engine",
    why="what is counted in the engine is to be seen on /metrics; SchedulerStats has no field for plugins",
)
def send(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.make_stats: lays what the engine has counted into the statistics, where there are any.

    It goes as an entry of our own of ec_connector_stats, the statistics that a connector for encoder outputs makes up.
    Engine process, scheduler thread.
    """
    stats = wrapped(*args, **kwargs)
    if stats is not None and transport.is_heard() and (counts := transport.take_counts() | table_sizes.take_changed()):
        stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), transport.KEY: counts}
    return stats


@hook(
    "vllm.v1.metrics.loggers:StatLoggerManager.record",
    name="receive",
    process="api",
    args=("scheduler_stats",),
    why="stat logger plugins are loaded by the server alone, not by LLM()",
)
def receive(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of StatLoggerManager.record: takes what engines have counted out of the statistics, and shows it.

    API server, or the offline program.
    """
    stats = argument(wrapped, args, kwargs, "scheduler_stats")
    if stats is not None and transport.KEY in (of_connector := stats.ec_connector_stats or {}):
        for name, amount in of_connector.pop(transport.KEY).items():
            if name == transport.STATES:
                transport.receive_states(kwargs.get("engine_idx") or 0, amount)
            elif name.startswith(table_sizes.PREFIX):
                table_sizes.show_changed(name, amount, kwargs.get("engine_idx") or 0)
            else:
                counters.show_engine_count(name, amount)
        stats.ec_connector_stats = of_connector or None
    return wrapped(*args, **kwargs)


def announce_states(engine_core: Any, states: transport.States) -> None:
    """Tell every API server what the components of this engine have become. Engine process, main thread.

    It goes as statistics of their own, since vLLM sends those of a step to one API server alone. Without statistics,
    and where the component metrics is off, none is told: the engine itself does not need it.
    """
    queue = getattr(engine_core, "output_queue", None)
    if queue is None:  # the engine is in the API server's process
        transport.receive_states(0, states)
    elif engine_core.log_stats and status.is_on("metrics") and transport.is_heard():
        scheduler = engine_core.scheduler
        for client in range(len(engine_core.addresses.outputs)):
            stats = SchedulerStats(*scheduler.get_request_counts(), kv_cache_usage=scheduler.get_kv_cache_usage())
            stats.ec_connector_stats = {transport.KEY: {transport.STATES: states}}
            queue.put_nowait((client, EngineCoreOutputs(scheduler_stats=stats)))
