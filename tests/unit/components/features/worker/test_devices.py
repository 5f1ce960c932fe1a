# SPDX-License-Identifier: Apache-2.0
"""On a rank with another GPU than the first, a thread makes no context on the first one.

torch.cuda is stood in for: each call that would make a context on a thread's device notes the device it would be on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.components.features.engine.test_transfers import Engine
from tests.unit.components.features.worker.test_weights import Model
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES
from vllm_mmcache.components.features.worker import device_copies, device_threads
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.components.features.worker.weights import Fingerprints

OWN = torch.device("cuda", 1)


class Cuda:
    """The devices of threads, and on which ones contexts were made; a thread begins on the first device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device_of: dict[int, int] = {threading.get_ident(): OWN.index}
        self.contexts: set[int] = set()
        cuda = {"set_device": self.set_device, "Stream": self.stream, "stream": self.entered}
        cuda |= {"current_stream": self.stream, "cudart": self.stream, "device": self.device}
        for name, stand_in in cuda.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(device_copies, "_pin", lambda memory: 0)

    def set_device(self, device: torch.device) -> None:
        self.device_of[threading.get_ident()] = device.index

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.device_of.get(threading.get_ident(), 0)
        self.set_device(device)
        yield
        self.device_of[threading.get_ident()] = before

    def use(self) -> None:
        self.contexts.add(self.device_of.get(threading.get_ident(), 0))

    def stream(self, *arguments: Any, **more: Any) -> Any:
        return self

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        self.use()
        yield

    def wait_event(self, event: Any) -> None:
        self.use()

    def record_event(self) -> None:
        self.use()

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.use()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def in_the_thread_of_copies() -> Iterator[Callable[[Callable[[], Any]], None]]:
    engine = Engine(1, 64 * ALIGN_BYTES)
    arena = Arena.open(engine.arena.address)

    def run(job: Callable[[], Any]) -> None:
        copies = DeviceCopies(arena, 0, OWN)
        copies.then(job)
        copies.flush()
        copies.close()

    yield run
    engine.close()


def test_the_thread_of_copies_is_on_its_rank_s_device(
    cuda: Cuda, in_the_thread_of_copies: Callable[[Callable[[], Any]], None]
) -> None:
    in_the_thread_of_copies(cuda.use)
    assert cuda.contexts == {OWN.index}


def test_a_thread_that_sets_no_device_would_be_noticed(
    cuda: Cuda, in_the_thread_of_copies: Callable[[Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    in_the_thread_of_copies(cuda.use)
    assert cuda.contexts == {0, OWN.index}  # what ends the copies is on the rank's


@pytest.mark.parametrize("sets_device", [True, False])
def test_copies_that_are_closed_in_any_thread_unpin_on_their_device(
    sets_device: bool, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the one in which Python finds that nobody has the model runner any more."""
    if not sets_device:
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    engine = Engine(1, 64 * ALIGN_BYTES)
    copies = DeviceCopies(Arena.open(engine.arena.address), 0, OWN)
    closing = threading.Thread(target=copies.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert cuda.contexts == {OWN.index if sets_device else 0}
    engine.close()


def test_no_thread_of_a_rank_begins_elsewhere() -> None:
    """What a rank runs starts its threads by start_thread, which sets the device; but those of vLLM's own pools."""
    folder = Path(device_threads.__file__).parent
    files = [*folder.glob("*.py"), *folder.parents[1].glob("*/hooks_worker.py")]
    assert len(files) > 8
    starting = {
        file.name: word
        for file in files
        for word in ("Thread(", "ThreadPoolExecutor(", "Threads(", "Timer(", "start_new_thread(")
        if word in file.read_text(encoding="utf-8")
    }
    assert starting == {"device_threads.py": "Thread("}


@pytest.mark.parametrize("sets_device", [True, False])
def test_the_thread_that_reads_weights_is_on_its_rank_s_device(
    sets_device: bool, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sets_device:
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    weights = Fingerprints(Tower(Model()), lambda generation, fingerprint: None)
    weights._device = OWN  # as for a tower whose tensors are there
    weights.mark_unknown()
    assert weights.wait(60)
    weights.close()
    assert cuda.contexts == {OWN.index, *(() if sets_device else (0,))}
