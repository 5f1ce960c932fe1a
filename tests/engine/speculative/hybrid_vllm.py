# SPDX-License-Identifier: Apache-2.0
"""What hybrid_worker.py changes of vLLM in its own process: what the CPU lacks, a witness, and faults.

V1 with async scheduling wants streams and events. On the CPU a copy has arrived when the call returns, which is one of
the orders that a GPU may take: the one in which it runs ahead of a busy host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class _Done:
    """A stream or an event of a device on which everything has happened already."""

    device = torch.device("cpu")

    def __init__(self, *arguments: Any, **more: Any) -> None: ...

    def record(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Witness:
    """Compares, for each request and step, the count of accepted tokens that is used with the one that was found."""

    def __init__(self) -> None:
        self.counts = 0
        self.wrong: list[tuple[str, int, int]] = []  # request, the count used, the true one
        self._true: dict[str, int] = {}

    def saw(self, requests: list[str], counts: Any) -> None:
        """What a step found."""
        self._true.update(zip(requests, map(int, counts), strict=False))

    def used(self, requests: list[str], counts: Any, gone: set[str]) -> None:
        """What the next step goes by; of requests that are gone, or come anew, nothing is known."""
        for request in gone:
            self._true.pop(request, None)
        for request, count in zip(requests, map(int, counts), strict=False):
            if request in self._true:
                self.counts += 1
                if count != self._true[request]:
                    self.wrong.append((request, count, self._true[request]))


def prepare(change: str | None) -> Witness:
    """Before the engine starts. `change`: a fault, "count" or "boundary"."""
    from vllm.v1.worker import mamba_utils

    for module, name in ((torch, "Event"), (torch.cuda, "Event"), (torch.cuda, "Stream")):
        setattr(module, name, _Done)
    _set(torch.cuda, "current_stream", _Done)
    _set(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    _set(mamba_utils, "_TEMPORAL_TILES", 1)  # programs per copy: the interpreter runs them one after the other
    if change == "boundary":
        _set(mamba_utils.MambaSpecDecodeGPUContext, "run_fused_postprocess", _counts_alone)
        _set(mamba_utils.MambaSpecDecodeGPUContext, "run_fused_postprocess_align", lambda self, *arguments: None)
    return _watch(mamba_utils, forget=change == "count")


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _counts_alone(self: Any, num_reqs: int, num_accepted_tokens_gpu: Any, *rest: Any, **more: Any) -> None:
    """The fault "boundary": the state at a block's end isn't copied there."""
    self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])


def _watch(mamba_utils: Any, forget: bool) -> Witness:
    """V1's two calls around a step. With `forget`, the fault "count": each request goes by one accepted token."""
    witness = Witness()
    before, after = mamba_utils.preprocess_mamba, mamba_utils.postprocess_mamba_align_gpu

    def preprocess_mamba(scheduler_output: Any, *rest: Any, **more: Any) -> Any:
        batch = rest[3]
        gone = {*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())}
        gone.update(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        if forget:
            batch.num_accepted_tokens_cpu[:] = 1
        witness.used(batch.req_ids, batch.num_accepted_tokens_cpu, gone)
        return before(scheduler_output, *rest, **more)

    def postprocess_mamba_align_gpu(**more: Any) -> None:
        after(**more)
        witness.saw(more["input_batch"].req_ids, more["num_accepted_tokens_cpu_tensor"][: more["num_reqs"]])

    _set(mamba_utils, "preprocess_mamba", preprocess_mamba)
    _set(mamba_utils, "postprocess_mamba_align_gpu", postprocess_mamba_align_gpu)
    return witness


def one_program_per_copy() -> None:
    """Triton's interpreter runs a kernel's programs one after the other."""
    from vllm.v1.worker import mamba_utils

    _set(mamba_utils, "_TEMPORAL_TILES", 1)


@contextlib.contextmanager
def faulty(fault: str | None) -> Iterator[None]:
    """Model runner V2 with a fault while the block runs.

    "precopy": a state isn't copied into the block that follows. "boundary": the state at a block's end isn't kept
    there. "count": each request goes by the count of accepted tokens of another one.
    """
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    after = MambaHybridModelState.postprocess_state

    def swapped(self: Any, idx_mapping: Any, num_sampled: Any, *rest: Any) -> None:
        after(self, idx_mapping, num_sampled if isinstance(num_sampled, int) else num_sampled.roll(1), *rest)

    def nothing(self: Any, *arguments: Any) -> None: ...

    owner, name, value = {
        None: (MambaHybridModelState, "postprocess_state", after),
        "precopy": (MambaSpecDecodeGPUContext, "run_fused_precopy", nothing),
        "boundary": (MambaSpecDecodeGPUContext, "run_fused_postprocess_align", nothing),
        "count": (MambaHybridModelState, "postprocess_state", swapped),
    }[fault]
    before = getattr(owner, name)
    _set(owner, name, value)
    try:
        yield
    finally:
        _set(owner, name, before)
