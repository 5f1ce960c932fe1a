# SPDX-License-Identifier: Apache-2.0
"""What the feature store costs an engine's steps: its own time in each, and the decoding of others while it loads.

Decoding: the time of every step of four requests, without loads and while 20 packages of 64 MiB come from the disk
(out of the page cache), or from a Valkey behind a proxy that lets 100 MB/s through. The control is a thread that reads
the same files and does nothing with them. Stock has no store: what is compared is the plugin with and without loads.
"""

import contextlib
import os
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from vllm import SamplingParams

from benchmarks.engines import started
from benchmarks.results import Result
from benchmarks.servers import stored
from benchmarks.sides import run_worker
from benchmarks.slow import SlowProxy
from tests.engine_configuration import CONFIGURATIONS
from vllm_mmcache import background, settings
from vllm_mmcache.features import runner
from vllm_mmcache.features.package import Shape
from vllm_mmcache.features.scheduler import Connector
from vllm_mmcache.prove.engines import Rig
from vllm_mmcache.prove.scenarios import filler, picture, user

A_CORE_TO_SPARE = {"OMP_NUM_THREADS": "1"}  # for the engine to decode on one of two, as a GPU leaves cores
PACKAGE = Shape(2048, 16384, "bfloat16")  # 64 MiB: about an image of 1080p to Qwen3-VL-8B

QUIET_STEPS = 1500


def measure(options: Namespace) -> Result:
    """The store's own time by engine, then decoding beside loads by tier. Units: milliseconds of a step."""
    result = Result()
    for engine in options.engines:
        task = {"images": options.images, "rounds": options.rounds, "size": options.size, "family": options.family}
        found = run_worker("benchmarks.feature_steps:steps", "mmcache", CONFIGURATIONS[engine].environment(), **task)
        for which, spread_ in found.items():
            for what, number in spread_.items():
                result.add(f"{engine}, {which}", what, {"mmcache": number})
    task = {"packages": options.packages, "repeats": options.repeats, "family": options.family}
    call = "benchmarks.feature_steps:loading"
    for tier in ("disk", "valkey"):
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(stored(tier, nice=19))  # Valkey stands for another machine
            chosen: dict[str, Any] = {"store": store}
            if tier == "valkey":
                proxy = stack.enter_context(SlowProxy(int(store.rpartition(":")[2]), options.bandwidth))
                chosen = {"store": f"redis://127.0.0.1:{proxy.port}", "store_remote_timeout_s": 2}
            found = run_worker(call, "mmcache", A_CORE_TO_SPARE, chosen=chosen, **task)
        result.details[tier] = {"load_s": found.pop("load_s")}
        for what in found["without"]:
            result.add(f"decoding, {tier}", what, {which: spread_[what] for which, spread_ in found.items()})
    return result


class Stopwatch:
    """Seconds that the store's code takes, summed up by step of the engine; what vLLM does in between is not counted.

    Its calls in the scheduler and in the rank are timed where they are made, and the ones within others once.
    """

    def __init__(self, rig: Rig) -> None:
        self.steps: list[float] = []
        self.took_images = False
        self.with_images: list[float] = []
        self._now = 0.0
        self._depth = 0
        for name in ("arrive", "ensure_cache_available", "update_state_after_alloc", "build_connector_meta"):
            setattr(Connector, name, self._timed(getattr(Connector, name)))
        encoding = runner.Side.encoding

        @contextlib.contextmanager
        def timed_encoding(side: Any, message: Any, outputs: Any) -> Iterator[set[str]]:
            self.took_images |= message is not None
            inside = encoding(side, message, outputs)
            with self._running():
                taken = inside.__enter__()
            try:
                yield taken
            finally:
                with self._running():
                    inside.__exit__(None, None, None)

        runner.Side.encoding = timed_encoding  # type: ignore[method-assign, assignment]
        schedule = rig.scheduler.schedule

        def next_step(*args: Any, **kwargs: Any) -> Any:
            self._end_step()
            return schedule(*args, **kwargs)

        rig.scheduler.schedule = next_step

    def forget(self) -> None:
        """What was counted so far was to warm up."""
        self.steps, self.with_images, self._now, self.took_images = [], [], 0.0, False

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        start, self._depth = time.perf_counter(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._now += time.perf_counter() - start

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._running():
                return method(*args, **kwargs)

        return timed

    def _end_step(self) -> None:
        self.steps.append(self._now)
        if self.took_images:
            self.with_images.append(self._now)
        self._now, self.took_images = 0.0, False


def steps(root: Path, family: str, images: int, rounds: int, size: int) -> dict[str, Any]:
    """Milliseconds of the store's code in each step, with every image in RAM: all steps, and those with images."""
    with started(root, family, {}, max_tokens=2048) as rig:
        return steps_of(rig, images, rounds, size)


def steps_of(rig: Rig, images: int, rounds: int, size: int) -> dict[str, Any]:
    rig.make_cold()
    watch = Stopwatch(rig)
    for round_ in range(rounds + 1):
        for number in range(0, images, 2):
            pictures = [picture(number + n, (size, size)) for n in range(2)]
            rig.ask([user(*pictures, f"{round_}?")], max_tokens=8)
        rig.forget_all_but_features()
        if not round_:
            watch.forget()
    return {"all steps": spread(watch.steps), "with images": spread(watch.with_images)}


def loading(root: Path, family: str, chosen: dict[str, Any], packages: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of the steps of requests that decode, without loads and while packages of 64 MiB load, in turn."""
    with started(root, family, chosen, max_tokens=2048) as rig:
        return loading_of(rig, packages, repeats)


def loading_of(rig: Rig, packages: int, repeats: int) -> dict[str, Any]:
    rig.ask([user(filler(20))])  # the first request lets the connector in
    connector = rig.features
    identities = [connector.ranks.identity(f"package {number}") for number in range(packages)]
    (tier,) = connector.store.below
    content = memoryview(os.urandom(PACKAGE.num_bytes))
    for identity in identities:
        assert tier.save(identity, PACKAGE, content)
    without: list[float] = []
    beside_reads: list[float] = []
    busy: list[float] = []
    load_s: list[float] = []
    for _ in range(repeats):
        with Decoding(rig) as decoding:
            without += decoding.step_until(lambda num_steps: num_steps == QUIET_STEPS)
        with Decoding(rig) as decoding, reading() as is_over:
            beside_reads += decoding.step_until(is_over)
        connector.store.ram.clear()
        drop_from_page_cache()
        with Decoding(rig) as decoding:
            fetches = [connector.store.fetch(identity, PACKAGE) for identity in identities]
            seconds = decoding.step_until(lambda num_steps, under_way=fetches: all(one.is_done for one in under_way))
        assert all(fetch.source == tier.name for fetch in fetches), [fetch.source for fetch in fetches]
        busy += seconds
        load_s.append(sum(seconds))
    control = {"reading": spread(beside_reads)} if beside_reads else {}
    return {"without": spread(without), "loading": spread(busy), **control, "load_s": load_s}


class Decoding:
    """As many requests as fit into a step, within the block; one that ends makes room for the next."""

    def __init__(self, rig: Rig) -> None:
        self._engine = rig.llm.llm_engine
        self._prompts = [rig.render([user(filler(10 + number))])[0] for number in range(rig.config.num_seqs)]
        self._names: dict[str, str] = {}

    def __enter__(self) -> "Decoding":
        for prompt in self._prompts:
            self._add(prompt)
        self.step_until(lambda num_steps: num_steps == 20)
        return self

    def __exit__(self, *raised: object) -> None:
        self._engine.abort_request(list(self._names))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def step_until(self, is_over: Callable[[int], bool]) -> list[float]:
        """Seconds of each step."""
        seconds: list[float] = []
        while not is_over(len(seconds)):
            start = time.perf_counter()
            outputs = self._engine.step()
            seconds.append(time.perf_counter() - start)
            for output in outputs:
                if output.finished:
                    self._add(self._names.pop(output.request_id))
        return seconds

    def _add(self, prompt: str) -> None:
        name = str(time.monotonic_ns())
        self._names[name] = prompt
        self._engine.add_request(name, prompt, SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))


def files() -> list[Path]:
    """Those of the store's directory, where it has one."""
    place, _ = settings.store_places(settings.current().store)
    return list(Path(place).glob("features/??/*")) if place is not None else []


def drop_from_page_cache() -> None:
    """Files of the store are read from the disk, as after a restart of the machine."""
    for path in files():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def reading() -> Iterator[Callable[[int], bool]]:
    """The control: a thread reads the same files once and does nothing with them. Yields whether it is over."""
    drop_from_page_cache()
    piece = memoryview(bytearray(4 * 1024**2))

    def read() -> None:
        background.step_back()
        for path in files():
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    thread = threading.Thread(target=read)
    thread.start()
    yield lambda num_steps: not thread.is_alive()
    thread.join()


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and most, in milliseconds."""
    ranked = sorted(seconds)
    return {
        "count": len(ranked),
        "median_ms": 1000 * median(ranked),
        "p99_ms": 1000 * ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))],
        "most_ms": 1000 * ranked[-1],
    }
