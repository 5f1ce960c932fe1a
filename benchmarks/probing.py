# SPDX-License-Identifier: Apache-2.0
"""What the processes of a server spend on images: seconds by kind of work, bytes to the engine, decodes, tower runs.

The same on stock and plugin, and loaded through vLLM's own options. Each second of a thread belongs to one kind: a
picture that is decoded within the processor is not counted as processor. A process writes its numbers into a mapped
file of a folder, PROCESSOR_PROBE; the benchmark reads them there.
"""

import contextlib
import functools
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers import zoo_server
from vllm_mmcache.demo.server import Server

FOLDER = "PROCESSOR_PROBE"
API, ENGINE, WORKER = PROCESSES = ("api", "engine", "worker")
KINDS = ("decode_s", "processor_s", "hash_s", "encode_s", "receive_s")
# Bytes, requests and moments are those of requests alone. Moments are added up: the clock is one for all processes.
NAMES = (*KINDS, "sent_bytes", "requests", "decodes", "tower_runs", "sent_at", "received_at")
REQUEST = "EngineCoreRequest"
OPTIONS = (
    "--middleware", "benchmarks.probing.Middleware",
    "--scheduler-cls", "benchmarks.probing.Scheduler",
    "--worker-extension-cls", "benchmarks.probing.Extension",
)  # fmt: skip
CONTENT_DIGESTS = (("vllm_mmcache.tenant", "digest"), ("vllm_mmcache.features.digests", "inputs_digest"))

_FORMAT = struct.Struct(f"={len(NAMES)}d")
_here = threading.local()


@dataclass(frozen=True)
class Probed:
    """A server, and the folder where its processes write what they do."""

    server: Server
    folder: Path


@contextlib.contextmanager
def probed_server(
    model: Path, side: str, args: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[Probed]:
    with tempfile.TemporaryDirectory() as name:
        env = {FOLDER: name, **(env or {})}
        with zoo_server(model, side, images=1, args=(*OPTIONS, *args), env=env) as server:
            yield Probed(server, Path(name))


def read(folder: Path) -> dict[str, float]:
    """The numbers of all processes together.

    Raises: RuntimeError where a kind of process is missing: nothing may look as if it cost nothing.
    """
    values = {path.name: _FORMAT.unpack(path.read_bytes()) for path in folder.iterdir()}
    if missing := set(PROCESSES) - {name.partition("-")[0] for name in values}:
        raise RuntimeError(f"no numbers of {', '.join(sorted(missing))} in {folder}: was the probe loaded there?")
    return dict(zip(NAMES, map(sum, zip(*values.values(), strict=True)), strict=True))


def for_each(before: Mapping[str, float], after: Mapping[str, float], requests: int) -> dict[str, float]:
    """What a stretch of time cost for one request. Units: seconds, bytes.

    `transit_s` is the way between the processes, `transfer_s` all of the way from a request in one to the same in the
    other. Raises: RuntimeError where another number of requests went to the engine.
    """
    apart = {name: (after[name] - before[name]) / requests for name in NAMES}
    if (sent := apart.pop("requests")) != 1:
        raise RuntimeError(f"{requests} questions, but {sent * requests:.0f} requests went to the engine")
    transit_s = apart.pop("received_at") - apart.pop("sent_at")
    return {**apart, "transit_s": transit_s, "transfer_s": apart["encode_s"] + transit_s + apart["receive_s"]}


class Numbers:
    """NAMES and their values, in a file that another process may read at any time. Any thread."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        self._values = dict.fromkeys(NAMES, 0.0)
        self._lock = threading.Lock()

    def add(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                self._values[name] += value
            self._map[:] = _FORMAT.pack(*self._values.values())

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """The time of this thread belongs to `kind` until the block ends, but for spans within."""
        stack = _here.__dict__.setdefault("stack", [])
        self._settle(stack)
        stack.append(kind)
        try:
            yield
        finally:
            self._settle(stack)
            stack.pop()

    def _settle(self, stack: list[str]) -> None:
        now = time.perf_counter()
        if stack:
            self.add(**{stack[-1]: now - _here.since})
        _here.since = now

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted as `kind`."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.span(kind):
                return function(*args, **kwargs)

        return wrapper


@functools.cache
def install(process: str) -> None:
    """Measure in this process, which is one of PROCESSES."""
    numbers = Numbers(Path(os.environ[FOLDER]) / f"{process}-{os.getpid()}")
    from PIL.ImageFile import ImageFile
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.processing.context import InputProcessingContext
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    ImageFile.load = counted_load(numbers, numbers.timed("decode_s", ImageFile.load))
    InputProcessingContext.call_hf_processor = numbers.timed("processor_s", InputProcessingContext.call_hf_processor)
    hash_kwargs = numbers.timed("hash_s", MultiModalHasher.hash_kwargs)
    MultiModalHasher.hash_kwargs = staticmethod(hash_kwargs)  # what was bound to the class is wrapped
    for module, name in CONTENT_DIGESTS:
        with contextlib.suppress(ImportError):
            __import__(module)
            replace_everywhere(function := getattr(sys.modules[module], name), numbers.timed("hash_s", function))
    if process == API:
        MsgpackEncoder.encode = counted_encode(numbers, MsgpackEncoder.encode)
    elif process == ENGINE:
        MsgpackDecoder.decode = counted_decode(numbers, MsgpackDecoder.decode)
    else:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner.load_model = counted_towers(numbers, CPUModelRunner.load_model)


def replace_everywhere(function: object, by: object) -> None:
    """In every module of the plugin that has it under any name."""
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == "vllm_mmcache"]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, by)


def counted_load(numbers: Numbers, load: Callable[..., Any]) -> Callable[..., Any]:
    """Pillow's: pictures that are decoded; a second load of one decodes nothing."""

    @functools.wraps(load)
    def wrapper(picture: Any) -> Any:
        if picture.tile:
            numbers.add(decodes=1)
        return load(picture)

    return wrapper


def counted_towers(numbers: Numbers, load_model: Callable[..., Any]) -> Callable[..., Any]:
    """A model runner's: the images that the tower of what it loads runs for, those at start among them."""

    @functools.wraps(load_model)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        embed = self.model.embed_multimodal

        def counted(**inputs: Any) -> Any:
            outputs = embed(**inputs)
            numbers.add(tower_runs=len(outputs))
            return outputs

        self.model.embed_multimodal = counted

    return wrapper


def counted_encode(numbers: Numbers, encode: Callable[..., Any]) -> Callable[..., Any]:
    """Of requests: the bytes of all frames, tensors too, as they go into the socket."""

    @functools.wraps(encode)
    def wrapper(self: Any, obj: Any) -> Any:
        if type(obj).__name__ != REQUEST:
            return encode(self, obj)
        with numbers.span("encode_s"):
            frames = encode(self, obj)
        size = sum(memoryview(frame).nbytes for frame in frames)
        numbers.add(sent_bytes=size, requests=1, sent_at=time.perf_counter())
        return frames

    return wrapper


def counted_decode(numbers: Numbers, decode: Callable[..., Any]) -> Callable[..., Any]:
    """Of requests: when their frames had come, and the seconds until they are a request."""

    @functools.wraps(decode)
    def wrapper(self: Any, frames: Any) -> Any:
        start = time.perf_counter()
        request = decode(self, frames)
        if type(request).__name__ == REQUEST:
            numbers.add(receive_s=time.perf_counter() - start, received_at=start)
        return request

    return wrapper


class Middleware:
    """An ASGI middleware that does nothing to requests; made once in each API server."""

    def __init__(self, app: Any) -> None:
        self.app = app
        install(API)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class Nothing:
    """Adds nothing to the worker."""


def __getattr__(name: str) -> Any:
    """Loads the probe where vLLM asks for its scheduler, and gets its own, or for what extends its worker."""
    if name == "Scheduler":
        from vllm.v1.core.sched.scheduler import Scheduler

        install(ENGINE)
        return Scheduler
    if name == "Extension":
        install(WORKER)
        return Nothing
    raise AttributeError(name)
