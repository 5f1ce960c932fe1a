# SPDX-License-Identifier: Apache-2.0
"""A Ray Data job about many pictures, two questions each, on engines of the CPU. Needs `pip install '.[ray]'`.

Sides, each a job in a process of its own: `stock` is vLLM alone with Ray's stage that prepares images, `mmcache` has
rows that carry the pictures as files. Then the same job once more with the same store, and one with an actor killed.
What all of them must answer is what LLM() answers in one process, without the plugin. A last job has many rows, each a
new question about one of a few small pictures, and says how the memory of its processes grows.

No request is sent before all engines are ready. Ray would otherwise start one of them and, while it answers, the
others, whose start takes processor time from what is measured.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import wrapt
from mmcache_tools.harness.server import CPU_ENV
from mmcache_tools.zoo import build_cached

from benchmarks import probing
from benchmarks.pictures import PHOTOGRAPH, SMALL, data_url, picture
from benchmarks.processes import MIB, Sampler
from benchmarks.results import Result

QUESTIONS = ("What is in this picture?", "Which colors do you see?")
SAMPLING = {"temperature": 0.0, "max_tokens": 8}
ENGINE = {
    "enforce_eager": True, "block_size": 32, "max_model_len": 2048, "dtype": "float32", "max_num_seqs": 8,
    "enable_prefix_caching": True, "limit_mm_per_prompt": {"image": 1}, "seed": 0,
}  # fmt: skip
FIRST, AGAIN, KILLED = "a job", "the same job again, one store", "a job, an actor killed"
MANY = "many rows"
MANY_PICTURES = 20
MANY_BLOCKS = 1024
"""Blocks of each engine's KV cache in the job of many rows: so few that the rows before the first of MOMENTS have used
all of them. A larger cache takes memory as it fills, which would look like growth with the rows."""
MOMENTS = {"start": 0.25, "middle": 0.5, "end": 0.95}
"""When memory is looked at, by the share of rows that the engines have been asked."""
BATCH_ROWS = 16
ROWS_IN_BLOCK = 2 * BATCH_ROWS
"""Rows that Ray handles at once outside the engines. It makes 200 blocks unless told otherwise, and for the few rows of
a small job its own work for a block takes longer than the engines' work for the rows in it."""
START_S, JOB_S = 600, 3600.0
"""The most that Ray waits for all engines, and this process for a job."""
IDLE_MS = 600_000
"""How long Ray keeps a worker process that does nothing. Another one would be started in its place and import vLLM, in
the middle of what is measured."""
LOOK_S = 0.05

Answers = dict[str, list[int]]


def measure(options: Namespace) -> Result:
    """By case: seconds, bytes of the object store for a row by those of the file, decodes, processor and tower runs."""
    result = Result()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, files = build_cached("qwen3-vl", folder), folder / "pictures"
        files.mkdir()
        for number in range(options.pictures):
            (files / f"{number:05}.jpg").write_bytes(picture(PHOTOGRAPH, number))
        expected, _ = job("offline", "stock", model, files, folder, options.actors)
        cases = [(FIRST, side, folder / "store") for side in options.sides]
        cases += [(AGAIN, "mmcache", folder / "store"), (KILLED, "mmcache", folder / "another")]
        found: dict[str, dict[tuple[str, str], float]] = {}
        for case, side, store in cases:
            answers, numbers = job(case, side, model, files, folder, options.actors, store=store)
            wrong = sum(answers[key] != tokens for key, tokens in expected.items() if key in answers)
            rows = {"rows": numbers.pop("rows"), "lost_rows": len(expected.keys() - answers.keys()), "wrong": wrong}
            found.setdefault(side, {}).update({(case, what): n for what, n in {**rows, **numbers}.items()})
            if wrong or rows["lost_rows"] or rows["rows"] != len(expected):
                result.problems.append(f"{case}, {side}: {rows}, expected {len(expected)} rows as LLM() answers them")
        if "stock" in found:
            found["stock"] |= {(AGAIN, what): n for (case, what), n in found["stock"].items() if case == FIRST}
        result.add_sides(found)
        if options.rows:
            add_many(result, model, folder, options.actors, options.rows)
    return result


def add_many(result: Result, model: Path, folder: Path, actors: int, rows: int) -> None:
    """How the memory of a job of so many rows grows; a problem where rows are lost."""
    files = folder / "small"
    files.mkdir()
    for number in range(MANY_PICTURES):
        (files / f"{number:05}.png").write_bytes(picture(SMALL, number))
    _, numbers = job(MANY, "mmcache", model, files, folder, actors, store=folder / "many", rows=rows)
    for what, amount in numbers.items():
        result.add(MANY, what, {"mmcache": amount})
    if numbers["rows"] != rows:
        result.problems.append(f"{MANY}: {numbers['rows']:.0f} of {rows} rows came back")


def job(
    case: str, side: str, model: Path, files: Path, folder: Path, actors: int, store: Path | None = None, rows: int = 0
) -> tuple[Answers, dict[str, float]]:
    """Answers by picture and question, and numbers, of a job in a process of its own. Raises: CalledProcessError."""
    with tempfile.TemporaryDirectory() as probe:
        given = {"case": case, "side": side, "model": str(model), "files": str(files), "actors": actors, "rows": rows}
        out = folder / "out.json"
        command = [sys.executable, "-m", "benchmarks.ray_data", json.dumps({**given, "store": str(store)}), str(out)]
        env = {"MMCACHE_DISABLE": "0" if side == "mmcache" else "1", probing.FOLDER: probe}
        env |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (folder / "job.log").open("w") as log:
            try:
                subprocess.run(
                    command, env={**os.environ, **CPU_ENV, **env}, stdout=log, stderr=log, timeout=JOB_S, check=True
                )
            except subprocess.SubprocessError:
                print((folder / "job.log").read_text()[-5000:], file=sys.stderr)
                raise
        found: dict[str, Any] = json.loads(out.read_text())
        numbers: dict[str, float] = found["numbers"]
        if case not in ("offline", MANY):
            pictures = len(list(files.iterdir()))
            spent = probing.read(Path(probe))
            numbers |= {f"{what}_a_picture": spent[what] / pictures for what in ("decodes", "tower_runs")}
            numbers["bytes_a_row_by_file"] = numbers.pop("bytes_a_row") / mean_bytes(files)
    return found["answers"], numbers


def mean_bytes(files: Path) -> float:
    sizes = [path.stat().st_size for path in files.iterdir()]
    return sum(sizes) / len(sizes)


# In the job's own process


def ask_offline(given: dict[str, Any]) -> dict[str, Any]:
    """All answers of LLM() in one process."""
    from vllm import LLM, SamplingParams

    llm, asked = LLM(given["model"], **ENGINE), rows_of(Path(given["files"]))
    outputs = llm.chat([stock_row(row)["messages"] for row in asked], SamplingParams(**SAMPLING), use_tqdm=False)
    pairs = zip(asked, outputs, strict=True)
    return {"answers": {row["name"]: list(output.outputs[0].token_ids) for row, output in pairs}, "numbers": {}}


def ask_with_ray(given: dict[str, Any]) -> dict[str, Any]:
    """All answers of a job, and what it took: from the first request to the last row, and with the engines' start."""
    import ray

    process = processor_of(given)
    rows = rows_of(Path(given["files"]))
    start = time.perf_counter()
    with Watch(kills=given["case"] == KILLED) as watch:
        done = process(dataset(rows)).materialize()
        end = time.perf_counter()
    answered = done.take_all()
    times = {"time_s": end - watch.first_request, "with_start_s": end - start}
    numbers = {"rows": len(answered), **times, "bytes_a_row": most_bytes(done.stats()) / len(rows)}
    ray.shutdown()
    return {"answers": {row["name"]: [int(token) for token in row["tokens"]] for row in answered}, "numbers": numbers}


def ask_many(given: dict[str, Any]) -> dict[str, Any]:
    """The memory of a job whose rows are made, asked and dropped one after the other."""
    import ray

    process, paths, num_rows = processor_of(given), sorted(Path(given["files"]).iterdir()), int(given["rows"])

    def row(numbered: dict[str, Any]) -> dict[str, Any]:
        number = int(numbered["id"])
        path = paths[number // 2 % len(paths)]
        return {"name": str(number), "path": str(path), "question": f"Question {number}: what is it?", "max_tokens": 1}

    numbered = [{"id": number} for number in range(num_rows)]
    asked = dataset(numbered).map(row, num_cpus=0.25)
    with Sizes(num_rows) as sizes:
        num_done = sum(1 for _ in process(asked).iter_rows())
    ray.shutdown()
    return {"answers": {}, "numbers": {"rows": num_done, **sizes.numbers()}}


def processor_of(given: dict[str, Any]) -> Any:
    """Connects to a cluster of its own, and makes what asks the rows of a dataset."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    is_stock, actors = given["side"] == "stock", int(given["actors"])
    ray.init(
        num_cpus=2 * actors + 2,
        include_dashboard=False,
        object_store_memory=1 << 30,
        _system_config={"idle_worker_killing_time_threshold_ms": IDLE_MS},
        runtime_env={"worker_process_setup_hook": set_up},
    )
    ray.data.DataContext.get_current().wait_for_min_actors_s = START_S
    blocks = {"num_gpu_blocks_override": MANY_BLOCKS} if given["case"] == MANY else {}
    store = {} if is_stock else {"additional_config": {"mmcache": {"store": given["store"]}}}
    config = vLLMEngineProcessorConfig(
        model_source=given["model"],
        engine_kwargs={
            **ENGINE, **blocks, **store, "scheduler_cls": "benchmarks.probing.Scheduler",
            "worker_extension_cls": "benchmarks.probing.Extension",
        },
        concurrency=(actors, actors),
        batch_size=BATCH_ROWS,
        log_engine_metrics=False,
        placement_group_config={"bundles": [{"CPU": 1}]},
        prepare_multimodal_stage={"enabled": is_stock, "num_cpus": 0.5, "chat_template_content_format": "openai"},
        chat_template_stage={"enabled": True, "num_cpus": 0.5},
        tokenize_stage={"enabled": False},
        detokenize_stage={"enabled": False},
    )  # fmt: skip
    return build_processor(
        config,
        preprocess=stock_row if is_stock else our_row,
        postprocess=lambda row: {"name": row["name"], "tokens": [int(token) for token in row["generated_tokens"]]},
    )


def dataset(rows: list[dict[str, Any]]) -> Any:
    """The rows as a dataset of Ray, ROWS_IN_BLOCK of them in a block."""
    import ray

    return ray.data.from_items(rows, override_num_blocks=max(len(rows) // ROWS_IN_BLOCK, 1))


def set_up() -> None:
    """Prepare each of Ray's worker processes: those that import vLLM's code for images are measured from then on.

    The import is waited for, not made here: most workers do without it, and it takes many seconds.
    """
    from vllm_mmcache.batch.ray_worker import find_chat_utils

    find_chat_utils()
    wrapt.when_imported("vllm.multimodal")(lambda _: probing.install(probing.API))


def rows_of(files: Path) -> list[dict[str, Any]]:
    """A row for each question, those about one picture side by side."""
    each = itertools.product(sorted(files.iterdir()), enumerate(QUESTIONS))
    return [{"name": f"{path.name}/{number}", "path": str(path), "question": text} for path, (number, text) in each]


def stock_row(row: dict[str, Any]) -> dict[str, Any]:
    """The picture as a data URL, as Ray's documentation has it."""
    url = {"type": "image_url", "image_url": {"url": data_url(PHOTOGRAPH, Path(row["path"]).read_bytes())}}
    messages = [{"role": "user", "content": [url, {"type": "text", "text": row["question"]}]}]
    return {"messages": messages, "sampling_params": dict(SAMPLING)}


def our_row(row: dict[str, Any]) -> dict[str, Any]:
    """The picture as the bytes of its file, so that what travels can be compared."""
    from vllm_mmcache.batch import question

    sampling = {**SAMPLING, "max_tokens": row.get("max_tokens", SAMPLING["max_tokens"])}
    return {**question([Path(row["path"]).read_bytes()], row["question"]), "sampling_params": sampling}


def most_bytes(stats: str) -> float:
    """Bytes of the output of the stage that gives most, of all rows. stats: what Dataset.stats() says."""
    sizes = re.findall(r"Output size bytes per block: .*?([\d.]+) total", stats)
    return max(map(float, sizes))


class Watch(Sampler):
    """Sees when the engines get their first request; then kills the actor of one of them, if asked to."""

    interval_s = LOOK_S

    def __init__(self, kills: bool) -> None:
        super().__init__()
        self.first_request = 0.0
        self._kills = kills

    def look(self) -> None:
        """Note the moment of the first request."""
        folder = Path(os.environ[probing.FOLDER])
        with contextlib.suppress(RuntimeError, ValueError):  # not all processes have begun to write
            if not self.first_request and probing.read(folder)["requests"]:
                self.first_request = time.perf_counter()
                if self._kills:
                    actor_of(min(workers(folder))).kill()


class Sizes(Sampler):
    """Memory of this process, and of the engines' actors with all their descendants, at each of MOMENTS.

    Units: MiB of resident memory in what numbers() returns. Pages that several processes share count for each of them.
    """

    interval_s = LOOK_S

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._at = {moment: share * num_rows for moment, share in MOMENTS.items()}
        self._seen: dict[str, dict[str, int]] = {}

    def numbers(self) -> dict[str, float]:
        """By process and moment, and what has grown from the first to the last. Raises: KeyError for a missed one."""
        found: dict[str, float] = {}
        for who in ("driver", "engines"):
            sizes = {moment: self._seen[moment][who] / MIB for moment in MOMENTS}
            found |= {f"{who}_{moment}_mib": size for moment, size in sizes.items()}
            found[f"{who}_growth_mib"] = sizes["end"] - sizes["start"]
        return found

    def look(self) -> None:
        """Take the sizes of each moment that has come."""
        folder = Path(os.environ[probing.FOLDER])
        with contextlib.suppress(RuntimeError, ValueError, psutil.Error):  # not all have begun, or some have ended
            num_asked = probing.read(folder)["requests"]
            for moment, number in self._at.items():
                if moment not in self._seen and num_asked >= number:
                    actors = {actor_of(worker) for worker in workers(folder)}
                    tree = {process for actor in actors for process in (actor, *actor.children(recursive=True))}
                    engines = sum(process.memory_info().rss for process in tree)
                    self._seen[moment] = {"driver": psutil.Process().memory_info().rss, "engines": engines}


def workers(folder: Path) -> list[int]:
    """The process ids of the engines' workers, by the numbers that they write."""
    return [int(path.name.rpartition("-")[2]) for path in folder.glob("worker-*")]


def actor_of(worker: int) -> psutil.Process:
    """The actor of a worker's engine: the worker's parent is the engine's process, whose parent is the actor."""
    return psutil.Process(worker).parents()[1]


def main() -> None:
    """The job that is described on the command line; its answers and numbers go into a file."""
    given = json.loads(sys.argv[1])
    asking = {"offline": ask_offline, MANY: ask_many}.get(given["case"], ask_with_ray)
    found = asking(given)
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
