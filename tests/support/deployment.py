# SPDX-License-Identifier: Apache-2.0
"""Real deployments of `vllm serve`: what they say of the components, what they answer, and that nothing is left."""

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from mmcache_tools.harness.server import CPU_ARGS, CPU_ENV, Server, free_port, stop, wait_until_healthy
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine_configuration import CHOSEN
from tests.support.target import png, url_of

ARGS = (
    *CPU_ARGS, "--max-model-len", "2048", "--served-model-name", "zoo", "--limit-mm-per-prompt", '{"image": 2}',
    "--enable-prefix-caching", "--enable-prompt-tokens-details",
)  # fmt: skip
TWO_RANKS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
NUM_LOGPROBS = 5
TOLERANCE = 1e-3  # of log-probabilities in float32, as in the exactness tests

_MARK = "TEST_DEPLOYMENT"  # a variable that each process of a deployment has, wherever it moved to

Component = tuple[str, str]
"""State and reason, as mmcache:component_info shows them."""


@dataclass(frozen=True)
class Answer:
    """Tokens as text, the log-probabilities of the best ones of each step, and how much of the prompt was cached."""

    tokens: tuple[str, ...]
    logprobs: tuple[dict[str, float], ...]
    num_cached: int

    def equals(self, other: "Answer") -> bool:
        """The same tokens and, in each step, the same probabilities to within the tolerance."""
        return self.tokens == other.tokens and all(
            abs(mine[token] - its[token]) <= TOLERANCE
            for mine, its in zip(self.logprobs, other.logprobs, strict=True)
            for token in mine.keys() & its.keys()
        )


@dataclass(frozen=True)
class Deployment(Server):
    """A server that is up."""

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def in_force(self) -> list[str]:
        """The lines of the report, one for each API server."""
        return re.findall(r"mmcache \S+ in force: (.*)", self.log())

    def all_in_force(self, number: int) -> list[str]:
        """The same of so many API servers: that one is healthy says nothing of the others."""
        until = time.monotonic() + 120
        while len(lines := self.in_force()) < number and time.monotonic() < until:
            time.sleep(0.2)
        return lines

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """What /metrics shows of us: name and values of the labels -> value."""
        shown = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(shown) for sample in family.samples]
        return {(s.name, tuple(s.labels.values())): s.value for s in samples if s.name.startswith("mmcache:")}

    def components(self) -> dict[str, Component]:
        """What mmcache:component_info shows; each component has one state."""
        info = "mmcache:component_info"
        shown = [labels for (name, labels), value in self.metrics().items() if name == info and value]
        found = {component: (state, reason) for component, reason, state in shown}  # Prometheus sorts labels by name
        assert len(found) == len(shown), shown
        return found

    def total(self, name: str) -> float:
        """The sum of a counter over all its labels."""
        return sum(value for (of, _), value in self.metrics().items() if of == f"mmcache:{name}_total")

    def ask(self, number: int = 0, *more: dict[str, Any]) -> Answer:
        """A question about picture `number`, greedy."""
        words = {"type": "text", "text": "What is this?" + " red cat" * 40}
        image = {"type": "image_url", "image_url": {"url": url_of(png(number, (96, 96)))}}
        return self.answer([words, image, *more], max_tokens=6)

    def answer(self, parts: Sequence[dict[str, Any]], max_tokens: int, timeout_s: float = 120) -> Answer:
        """A question of these parts, greedy, with the best log-probabilities of each of its max_tokens tokens."""
        body: dict[str, Any] = {"model": "zoo", "messages": [{"role": "user", "content": parts}]}
        body |= {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": True, "top_logprobs": NUM_LOGPROBS}
        said = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout_s).raise_for_status().json()
        steps = said["choices"][0]["logprobs"]["content"]
        return Answer(
            tuple(step["token"] for step in steps),
            tuple({one["token"]: one["logprob"] for one in step["top_logprobs"]} for step in steps),
            (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        )

    def forget(self) -> None:
        """Empty vLLM's own caches, so that only the feature store knows an image."""
        for cache in ("mm", "prefix", "encoder"):
            httpx.post(f"{self.url}/reset_{cache}_cache", timeout=60).raise_for_status()


def command(model: Path, *args: str) -> list[str]:
    """`vllm serve`, without `mmcache serve` before it; with either distribution of vLLM."""
    return [sys.executable, "-m", "vllm_mmcache.cli.vllm_main", "serve", str(model), "--host", "127.0.0.1", *args]


def environment(paths: Sequence[Path], variables: Mapping[str, str]) -> dict[str, str]:
    """Of a deployment: this process's without our settings and vLLM's; `paths` come first on PYTHONPATH."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MMCACHE_", "VLLM_"))} | CHOSEN.environment()
    kept = [*map(str, paths), *filter(None, [environ.get("PYTHONPATH")])]
    environ |= {k: v for k, v in CPU_ENV.items() if not k.startswith("MMCACHE_")}
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": os.pathsep.join(kept)}
    return {**environ, _MARK: uuid.uuid4().hex, **variables}


@contextlib.contextmanager
def start(log_path: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process group of its own; whatever it left behind is an error, and gone at the end."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            arguments, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        stop(process)
        left = waited_for(environ[_MARK])
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    assert not left, f"processes were left behind: {left}"


@contextlib.contextmanager
def deployed(
    model: Path, log_path: Path, *args: str, paths: Sequence[Path] = (), **variables: str
) -> Iterator[Deployment]:
    """Serve a model until the block ends."""
    port = free_port()
    environ = environment(paths, variables)
    with start(log_path, command(model, "--port", str(port), *ARGS, *args), environ) as process:
        running = Deployment(f"http://127.0.0.1:{port}", log_path, process)
        wait_until_healthy(running, 300)
        yield running


def refused(
    model: Path, log_path: Path, *args: str, paths: Sequence[Path] = (), timeout_s: float = 300, **variables: str
) -> str:
    """Start with require_salt; the sentence with which it refuses. Asserts that it ends, and all of it with it."""
    environ = environment(paths, {"MMCACHE_REQUIRE_SALT": "1", **variables})
    with start(log_path, command(model, "--port", str(free_port()), *ARGS, *args), environ) as process:
        status = process.wait(timeout_s)
        left = waited_for(environ[_MARK])
        assert not left, f"these processes go on: {left}"
    said = log_path.read_text(errors="replace")
    assert status != 0, said[-3000:]
    assert "Application startup complete" not in said
    found = set(re.findall(r"mmcache refuses to start: .*", said))
    assert len(found) == 1, (found, said[-3000:])
    return str(found.pop())


def waited_for(mark: str) -> list[int]:
    """Those of left_of() that don't end by themselves: an engine may outlive its server for a moment."""
    until = time.monotonic() + 60
    while (left := left_of(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def left_of(mark: str) -> list[int]:
    """The processes that were started with this value of the mark. Zombies have no environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


def plant(folder: Path, module: str, process: str, code: str) -> Path:
    """A folder for PYTHONPATH: once `module` is imported in the processes of this name, `code` changes it.

    `process` is a pattern of multiprocessing's name of it; in `code` the module is `module`.
    """
    folder.mkdir(parents=True)
    lines = "\n".join(f"        {line}" for line in code.strip().splitlines())
    (folder / "sitecustomize.py").write_text(f"""\
import multiprocessing, re, wrapt

@wrapt.when_imported({module!r})
def change(module):
    if re.fullmatch({process!r}, multiprocessing.current_process().name):
{lines}
""")
    return folder


def installed_plugin(folder: Path, name: str, source: str) -> Path:
    """A folder for PYTHONPATH on which `name` is an installed plugin of vLLM, whose register() is in `source`."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text(source)
    return folder
