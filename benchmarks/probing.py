# SPDX-License-Identifier: Apache-2.0
"""What the processes of a server spend on images: seconds by kind of work, bytes to the engine, decodes, tower runs.

The same on stock and plugin, and loaded through vLLM's own options. Each second of a thread belongs to one kind: a
picture that is decoded within the processor is not counted as processor. A process writes its numbers into a mapped
file of a folder, PROCESSOR_PROBE; the benchmark reads them there.
"""

import contextlib
import functools
import importlib
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import wrapt
from mmcache_tools.harness.server import Server

from benchmarks.probe.sitecustomize import Spans
from benchmarks.processes import server_cpu_s
from benchmarks.servers import zoo_server

FOLDER = "PROCESSOR_PROBE"
API, ENGINE, WORKER = PROCESSES = ("api", "engine", "worker")
KINDS = ("decode_s", "processor_s", "hash_s", "encode_s", "receive_s")
# Bytes, requests and moments are those of requests alone. Moments are added up: the clock is one for all processes.
NAMES = (*KINDS, "sent_bytes", "requests", "decodes", "tower_runs", "sent_at", "received_at")
REQUEST = "EngineCoreRequest"
RECEIVE = "/benchmarks/receive"
"""The path of the API server at which a body is only received."""
OPTIONS = (
    "--middleware", "benchmarks.probing.Middleware",
    "--scheduler-cls", "benchmarks.probing.Scheduler",
    "--worker-extension-cls", "benchmarks.probing.Extension",
)  # fmt: skip
CONTENT_DIGESTS = (("vllm_mmcache.base.tenant", "digest"), ("vllm_mmcache.content.digests", "inputs_digest"))


@dataclass(frozen=True)
class Probed:
    """A server, its model, and the folder where its processes write what they do."""

    server: Server
    model: Path
    folder: Path

    def spent(self) -> Counter[str]:
        """What its processes have spent so far."""
        return Counter(
            {f"{name}_cpu_s": cpu_s for name, cpu_s in server_cpu_s(self.server).items()} | read(self.folder)
        )


@contextlib.contextmanager
def probed_server(
    model: Path, side: str, images: int, args: Sequence[str], env: Mapping[str, str], log_path: Path | None = None
) -> Iterator[Probed]:
    with tempfile.TemporaryDirectory() as name:
        given = {FOLDER: name, **env}
        with zoo_server(model, side, images=images, args=(*OPTIONS, *args), env=given, log_path=log_path) as server:
            yield Probed(server, model, Path(name))


def read(folder: Path) -> dict[str, float]:
    """The numbers of all processes together.

    Raises: RuntimeError where a kind of process is missing: nothing may look as if it cost nothing.
    """
    values = {path.name: np.fromfile(path) for path in folder.iterdir()}
    if missing := set(PROCESSES) - {name.partition("-")[0] for name in values}:
        raise RuntimeError(f"no numbers of {', '.join(sorted(missing))} in {folder}: was the probe loaded there?")
    return dict(zip(NAMES, np.sum([*values.values()], axis=0).tolist(), strict=True))


def for_each(spent: Mapping[str, float], questions: int) -> dict[str, float]:
    """What a stretch of time cost for one question. Units: seconds, bytes.

    `transit_s` is the way between the processes, `transfer_s` all of the way from a request in one to the same in the
    other. Raises: RuntimeError where another number of requests went to the engine.
    """
    if spent["requests"] != questions:
        raise RuntimeError(f"{questions} questions, but {spent['requests']:.0f} requests went to the engine")
    apart = {name: number / questions for name, number in spent.items() if name != "requests"}
    transit_s = apart.pop("received_at") - apart.pop("sent_at")
    return {**apart, "transit_s": transit_s, "transfer_s": apart["encode_s"] + transit_s + apart["receive_s"]}


class Numbers(Spans):
    """NAMES and their values, in a file that another process may read at any time; and what takes their place in vLLM.

    Any thread.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._values = np.memmap(path, np.float64, "w+", shape=len(NAMES))
        self._lock = threading.Lock()

    def add(self, name: str, number: float) -> None:
        with self._lock:
            self._values[NAMES.index(name)] += number

    def load(self, wrapped: Any, picture: Any, args: Any, kwargs: Any) -> Any:
        """Pillow's: pictures that are decoded; a second load of one decodes nothing."""
        self.add("decodes", bool(picture.tile))
        with self.of("decode_s"):
            return wrapped(*args, **kwargs)

    def load_model(self, wrapped: Any, runner: Any, args: Any, kwargs: Any) -> None:
        """A model runner's: the images that the tower of what it loads runs for in steps, and so not at start."""
        wrapped(*args, **kwargs)
        embed, encode, is_step = runner.model.embed_multimodal, runner._execute_mm_encoder, False

        def counted(**inputs: Any) -> Any:
            outputs = embed(**inputs)
            self.add("tower_runs", len(outputs) * is_step)
            return outputs

        def in_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_step
            is_step = True
            try:
                return encode(*args, **kwargs)
            finally:
                is_step = False

        runner.model.embed_multimodal, runner._execute_mm_encoder = counted, in_step

    def encode(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Of requests: the bytes of all frames, tensors too, as they go into the socket."""
        if type(args[0]).__name__ != REQUEST:
            return wrapped(*args, **kwargs)
        with self.of("encode_s"):
            frames = wrapped(*args, **kwargs)
        self.add("sent_bytes", sum(memoryview(frame).nbytes for frame in frames))
        self.add("requests", 1)
        self.add("sent_at", self._clock())
        return frames

    def decode(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Of requests: when their frames had come, and the seconds until they are a request."""
        start = self._clock()
        request = wrapped(*args, **kwargs)
        if type(request).__name__ == REQUEST:
            self.add("receive_s", self._clock() - start)
            self.add("received_at", start)
        return request


@functools.cache
def install(process: str) -> None:
    """Measure in this process, which is one of PROCESSES."""
    numbers = Numbers(Path(os.environ[FOLDER]) / f"{process}-{os.getpid()}")
    wrap = wrapt.wrap_function_wrapper
    wrap("PIL.ImageFile", "ImageFile.load", numbers.load)
    wrap("vllm.multimodal.processing.context", "InputProcessingContext.call_hf_processor", numbers.timed("processor_s"))
    wrap("vllm.multimodal.hasher", "MultiModalHasher.hash_kwargs", numbers.timed("hash_s"))
    for module, name in CONTENT_DIGESTS:
        with contextlib.suppress(ImportError):
            function = getattr(importlib.import_module(module), name)
            replace_everywhere(function, wrapt.FunctionWrapper(function, numbers.timed("hash_s")))
    if process == API:
        wrap("vllm.v1.serial_utils", "MsgpackEncoder.encode", numbers.encode)
    elif process == ENGINE:
        wrap("vllm.v1.serial_utils", "MsgpackDecoder.decode", numbers.decode)
    else:
        wrap("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model", numbers.load_model)


def replace_everywhere(function: object, by: object) -> None:
    """In every module of the plugin that has it under any name."""
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == "vllm_mmcache"]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, by)


class Middleware:
    """An ASGI middleware that is the app itself, but for RECEIVE; asked for once in each API server."""

    def __new__(cls, app: Any) -> Any:
        install(API)
        return layer(app)


def layer(app: Any) -> Any:
    """The app, but for RECEIVE."""

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        await (received if scope.get("path") == RECEIVE else app)(scope, receive, send)

    return asked


async def received(scope: Any, receive: Any, send: Any) -> None:
    """The least that this server can do with a body: it receives it whole, and answers with one line."""
    pieces, more = list[bytes](), True
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    b"".join(pieces)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": b"data:\n"})


def __getattr__(name: str) -> Any:
    """Loads the probe where vLLM asks for its scheduler, and gets its own, or for what extends its worker: nothing."""
    if name == "Scheduler":
        from vllm.v1.core.sched.scheduler import Scheduler

        install(ENGINE)
        return Scheduler
    if name == "Extension":
        install(WORKER)
        return type(name, (), {})
    raise AttributeError(name)
