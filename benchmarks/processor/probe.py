# SPDX-License-Identifier: Apache-2.0
"""What the processes of a server spend on images: seconds by kind of work, and bytes that go to the engine.

The same on stock and plugin, and loaded through vLLM's own options: `--middleware` in the API server,
`--scheduler-cls` in the engine (see in_engine.py), `--worker-extension-cls` in the worker (see in_worker.py). Each
second of a thread belongs to one kind: a picture that is decoded within the processor is not counted as processor.

A process writes its numbers into a mapped file of PROCESSOR_PROBE, a folder; the benchmark reads them from there.
"""

import functools
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "PROCESSOR_PROBE"
API, ENGINE, WORKER = PROCESSES = ("api", "engine", "worker")
KINDS = ("decode", "processor", "hash", "encode", "receive")
# Bytes and messages are those of requests alone. A moment is a time of the monotonic clock, one for all processes.
NAMES = (*KINDS, "sent_bytes", "sent", "decodes", "towers", "sent_moment", "received_moment")
REQUEST = "EngineCoreRequest"
OPTIONS = (
    "--middleware", "benchmarks.processor.probe.Middleware",
    "--scheduler-cls", "benchmarks.processor.in_engine.Scheduler",
    "--worker-extension-cls", "benchmarks.processor.in_worker.Extension",
)  # fmt: skip
CONTENT_DIGESTS = (("vllm_mmcache.tenant", "digest"), ("vllm_mmcache.features.digests", "inputs_digest"))

_FORMAT = struct.Struct(f"={len(NAMES)}d")
_here = threading.local()


class Numbers:
    """NAMES and their values, in a file that another process may read at any time. Any thread."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        self._values = [0.0] * len(NAMES)
        self._lock = threading.Lock()

    def add(self, **more: float) -> None:
        """Add to numbers; a moment takes the place of the one before."""
        with self._lock:
            for name, value in more.items():
                at = NAMES.index(name)
                self._values[at] = value if name.endswith("_moment") else self._values[at] + value
            self._map[:] = _FORMAT.pack(*self._values)


class Span:
    """The time of this thread belongs to `kind` until the block ends, but for spans within."""

    def __init__(self, numbers: Numbers, kind: str) -> None:
        self.numbers, self.kind = numbers, kind

    def __enter__(self) -> None:
        stack = _here.__dict__.setdefault("stack", [])
        self._settle(stack)
        stack.append(self.kind)

    def __exit__(self, *error: object) -> None:
        self._settle(_here.stack)
        _here.stack.pop()

    def _settle(self, stack: list[str]) -> None:
        now = time.perf_counter()
        if stack:
            self.numbers.add(**{stack[-1]: now - _here.since})
        _here.since = now


def timed(numbers: Numbers, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its time counted as `kind`."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with Span(numbers, kind):
            return function(*args, **kwargs)

    return wrapper


def install(process: str) -> Numbers:
    """Measure in this process, which is one of PROCESSES."""
    numbers = Numbers(Path(os.environ[FOLDER]) / f"{process}-{os.getpid()}")
    from PIL.ImageFile import ImageFile
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.processing.context import InputProcessingContext
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    ImageFile.load = counted_load(numbers, timed(numbers, "decode", ImageFile.load))
    InputProcessingContext.call_hf_processor = timed(numbers, "processor", InputProcessingContext.call_hf_processor)
    hash_kwargs = timed(numbers, "hash", MultiModalHasher.hash_kwargs)
    MultiModalHasher.hash_kwargs = staticmethod(hash_kwargs)  # what was bound to the class is wrapped
    for module, name in CONTENT_DIGESTS:
        with suppress(ImportError):
            __import__(module)
            replace_everywhere(function := getattr(sys.modules[module], name), timed(numbers, "hash", function))
    if process == API:
        MsgpackEncoder.encode = counted_encode(numbers, MsgpackEncoder.encode)
    if process == WORKER:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner.load_model = counted_towers(numbers, CPUModelRunner.load_model)
    if process == ENGINE:
        MsgpackDecoder.decode = counted_decode(numbers, MsgpackDecoder.decode)
    return numbers


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
            numbers.add(towers=len(outputs))
            return outputs

        self.model.embed_multimodal = counted

    return wrapper


def counted_encode(numbers: Numbers, encode: Callable[..., Any]) -> Callable[..., Any]:
    """Of requests: the bytes of all frames, tensors too, as they go into the socket."""

    @functools.wraps(encode)
    def wrapper(self: Any, obj: Any) -> Any:
        if type(obj).__name__ != REQUEST:
            return encode(self, obj)
        with Span(numbers, "encode"):
            frames = encode(self, obj)
        numbers.add(sent_bytes=sum(size(frame) for frame in frames), sent=1, sent_moment=time.perf_counter())
        return frames

    return wrapper


def counted_decode(numbers: Numbers, decode: Callable[..., Any]) -> Callable[..., Any]:
    """Of requests: when their frames had come, and the seconds until they are a request."""

    @functools.wraps(decode)
    def wrapper(self: Any, frames: Any) -> Any:
        start = time.perf_counter()
        request = decode(self, frames)
        if type(request).__name__ == REQUEST:
            numbers.add(receive=time.perf_counter() - start, received_moment=start)
        return request

    return wrapper


def size(frame: Any) -> int:
    """Bytes of one frame of a message, whatever buffer it is."""
    return memoryview(frame).nbytes


class Middleware:
    """An ASGI middleware that does nothing to requests; made once in each API server."""

    def __init__(self, app: Any) -> None:
        self.app = app
        install(API)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def read(folder: Path) -> dict[str, dict[str, float]]:
    """The numbers of each process that has been measured in a folder, added up where there are several of a kind.

    Raises: RuntimeError where a process is missing: nothing may look as if it cost nothing.
    """
    found: dict[str, dict[str, float]] = {}
    for path in folder.iterdir():
        process = path.name.partition("-")[0]
        values = dict(zip(NAMES, _FORMAT.unpack(path.read_bytes()), strict=True))
        before = found.get(process, dict.fromkeys(NAMES, 0.0))
        found[process] = {
            name: max(before[name], value) if name.endswith("_moment") else before[name] + value
            for name, value in values.items()
        }
    if missing := set(PROCESSES) - set(found):
        raise RuntimeError(f"no numbers of {', '.join(sorted(missing))} in {folder}: was the probe loaded there?")
    return found


def difference(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], num_requests: int
) -> dict[str, float]:
    """What a stretch of time cost for one request, in all processes together. Units: seconds, bytes.

    `transit` is the way of its last request between the processes; `transfer` is all of the way from a request in one
    to the same in the other. Raises: RuntimeError where another number of requests went to the engine.
    """
    apart = {name: sum(after[process][name] - before[process][name] for process in after) / num_requests
             for name in NAMES if not name.endswith("_moment")}  # fmt: skip
    if (sent := apart.pop("sent")) != 1:
        raise RuntimeError(f"{num_requests} questions, but {sent * num_requests:.0f} requests went to the engine")
    transit = max(0.0, after[ENGINE]["received_moment"] - after[API]["sent_moment"])
    return apart | {"transit": transit, "transfer": apart["encode"] + transit + apart["receive"]}
