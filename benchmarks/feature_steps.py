# SPDX-License-Identifier: Apache-2.0
"""What the feature store costs an engine's steps: its own time in each, and the decoding of others while it loads.

Decoding: the time of every step of four requests, without loads and while 20 packages of 64 MiB come from the disk
(out of the page cache), or from a Valkey behind a proxy that lets 100 MB/s through. The control is a thread that reads
the same files and does nothing with them. Stock has no store: what is compared is the plugin with and without loads.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from mmcache_tools.harness.engines import ZooRig

from benchmarks.replays import started
from benchmarks.results import Result, run_worker
from benchmarks.servers import stored
from tests.support.engine_configuration import CONFIGURATIONS
from vllm_mmcache.base import background, settings
from vllm_mmcache.base.store_url import store_places
from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.engine.vllm_connector import Connector
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.features.worker.rank import RankFeatures
from vllm_mmcache.exactness.conversations import filler, picture, user

A_CORE_TO_SPARE = {"OMP_NUM_THREADS": "1"}  # for the engine to decode on one of two, as a GPU leaves cores
PACKAGE = Shape(2048, 16384, "bfloat16")  # 64 MiB: about an image of 1080p to Qwen3-VL-8B
QUIET_STEPS = 1500
SPREAD = ("median_ms", "p99_ms", "most_ms")
IsOver = Callable[[int], bool]  # after so many steps


def measure(options: Namespace) -> Result:
    """The store's own time by engine, then decoding beside loads by tier. Units: milliseconds of a step."""
    result, module = Result(), "benchmarks.feature_steps"
    given = {name: getattr(options, name) for name in ("family", "images", "rounds", "size")}
    for engine in options.engines:
        found = run_worker(f"{module}:steps", "mmcache", CONFIGURATIONS[engine].environment(), **given)
        for (which, times), what in itertools.product(found.items(), SPREAD):
            result.add(f"{engine}, {which}", what, {"mmcache": times[what]})
    given = {name: getattr(options, name) for name in ("family", "packages", "repeats")}
    for tier in ("disk", "valkey"):
        with contextlib.ExitStack() as stack:
            # Valkey stands for another machine.
            chosen: dict[str, Any] = {"store": stack.enter_context(stored(tier, nice=19))}
            if tier == "valkey":
                port = stack.enter_context(slow(int(chosen["store"].rpartition(":")[2]), options.bandwidth))
                chosen = {"store": f"redis://127.0.0.1:{port}", "store_remote_timeout_s": 2}
            found = run_worker(f"{module}:loading", "mmcache", A_CORE_TO_SPARE, chosen=chosen, **given)
        for what in SPREAD:
            result.add(f"decoding, {tier}", what, {which: times[what] for which, times in found.items()})
    return result


class Stopwatch:
    """Seconds that the store's code takes, summed up by step of the engine; what vLLM does in between is not counted.

    Its calls in the scheduler and in the rank are timed where they are made, and the ones within others once.
    """

    def __init__(self, rig: ZooRig) -> None:
        self.steps: list[tuple[float, bool]] = []  # whether it took images in the step
        self._now, self._depth, self._took_images = 0.0, 0, False
        for name in ("on_request_added", "ensure_cache_available", "update_state_after_alloc", "build_connector_meta"):
            setattr(Connector, name, self._timed(getattr(Connector, name)))
        encoding, schedule = RankFeatures.encoding.__wrapped__, rig.scheduler.schedule  # type: ignore[attr-defined]

        def timed_encoding(side: Any, message: Any, outputs: Any) -> Iterator[set[str]]:
            self._took_images |= message is not None
            inside, on = encoding(side, message, outputs), self._timed(next)
            yield on(inside)
            on(inside, None)

        def next_step(*args: Any, **kwargs: Any) -> Any:
            self.steps.append((self._now, self._took_images))
            self._now, self._took_images = 0.0, False
            return schedule(*args, **kwargs)

        RankFeatures.encoding = contextlib.contextmanager(timed_encoding)  # type: ignore[method-assign, arg-type]
        rig.scheduler.schedule = next_step

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.perf_counter(), self._depth + 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._now += time.perf_counter() - start

        return timed


def steps(root: Path, family: str, images: int, rounds: int, size: int) -> dict[str, Any]:
    """Milliseconds of the store's code in each step, with every image in RAM: all steps, and those with images."""
    with started(root, family, {}, max_tokens=2048) as rig:
        rig.make_cold()
        watch = Stopwatch(rig)
        for number in range(rounds + 1):
            for image in range(0, images, 2):
                pictures = (picture(image + n, (size, size)) for n in range(2))
                rig.ask([user(*pictures, f"{number}?")], max_tokens=8)
            rig.forget_all_but_features()
            if number == 0:  # it was to warm up
                watch.steps.clear()
        with_images = [seconds for seconds, took_images in watch.steps if took_images]
    return {"all steps": spread([seconds for seconds, _ in watch.steps]), "with images": spread(with_images)}


def loading(root: Path, family: str, chosen: dict[str, Any], packages: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of the steps of requests that decode, without loads and while packages of 64 MiB load, in turn."""
    found: dict[str, list[float]] = {"without": [], "loading": [], "reading": []}
    with started(root, family, chosen, max_tokens=2048) as rig:
        rig.ask([user(filler(20))])  # the first request lets the connector in
        store, (tier,) = rig.features.store, rig.features.store.below
        identities = [rig.features.ranks.identity(f"package {number}") for number in range(packages)]
        content = memoryview(os.urandom(PACKAGE.num_bytes))
        assert all(tiers.save(tier, identity, PACKAGE, content) for identity in identities)

        def load() -> IsOver:
            files()
            fetches.extend(store.fetch(identity, PACKAGE) for identity in identities)
            return lambda num_steps: all(one.is_done for one in fetches)

        for _ in range(repeats):
            fetches: list[Any] = []
            found["without"] += decode(rig, lambda: lambda num_steps: num_steps == QUIET_STEPS)
            found["reading"] += decode(rig, read) if files() else []
            store.ram.clear()
            found["loading"] += decode(rig, load)
            assert all(fetch.source == tier.name for fetch in fetches), [fetch.source for fetch in fetches]
    return {which: spread(seconds) for which, seconds in found.items() if seconds}


def decode(rig: ZooRig, begin: Callable[[], IsOver]) -> list[float]:
    """Seconds of each step of as many requests as fit into one, from `begin` until what it gives is true."""
    engine, seconds = rig.llm.llm_engine, list[float]()
    asks = itertools.cycle([user(filler(10 + number))] for number in range(rig.config.num_seqs))

    def step() -> None:
        start = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - start)
        for _ in [output for output in outputs if output.finished]:  # it makes room for the next
            rig.enqueue(next(asks), max_tokens=1000)

    for _ in range(rig.config.num_seqs):
        rig.enqueue(next(asks), max_tokens=1000)
    for _ in range(20):
        step()
    seconds.clear()
    is_over = begin()
    while not is_over(len(seconds)):
        step()
    engine.abort_request(list(rig.scheduler.requests), internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def files() -> list[Path]:
    """Those of the store's directory, if it has one; they are read from the disk, as after a restart of the machine."""
    place, _ = store_places(settings.current().store)
    found = list(Path(place).glob("features/??/*")) if place is not None else []
    for path in found:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def read() -> IsOver:
    """The control: a thread reads the same files once and does nothing with them."""
    piece, paths = memoryview(bytearray(4 * 1024**2)), files()

    def work() -> None:
        background.lower_priority()
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    return lambda num_steps: not thread.is_alive()


@contextlib.contextmanager
def slow(port: int, bytes_per_s: float) -> Iterator[int]:
    """The port of a proxy, a process of its own: so many bytes a second come from the server, over all connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=lambda: asyncio.run(proxy(listening, port, bytes_per_s)))
        process.start()
        try:
            yield listening.getsockname()[1]
        finally:
            process.kill()


async def proxy(listening: socket.socket, port: int, bytes_per_s: float) -> None:
    os.nice(19)  # it stands for a network
    free_at = time.monotonic()  # when the line has carried all that it was given

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_slow: bool) -> None:
        nonlocal free_at
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(64 * 1024):
                if is_slow:
                    free_at = max(free_at, time.monotonic()) + len(piece) / bytes_per_s
                    await asyncio.sleep(free_at - time.monotonic())
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, to_server, False), carry(from_server, writer, True))

    await (await asyncio.start_server(connected, sock=listening)).serve_forever()


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and most, in milliseconds."""
    ranked = sorted(1000 * one for one in seconds)
    return dict(zip(SPREAD, (median(ranked), ranked[int(0.99 * len(ranked))], ranked[-1]), strict=True))
