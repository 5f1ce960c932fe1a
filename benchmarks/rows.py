# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of measurements: of which benchmark and cases, what is shown of them, and how."""

from typing import NamedTuple

from benchmarks.forms import COUNT, NUMBER, RATE, RATIO, SHARE, TIME, Form, Row, numbers, own, time

MANY = "{conversations} conversations with screenshots for {seconds:.0f} s"
ALL_STARTS = ("api_server", "engine", "worker")
SIZES = "0.3 / 0.9 / 2.1 / 4.1 / 8.3 megapixels"
OF_SIZES = ("640x480", "1280x720", "1920x1080", "2560x1600", "3840x2160")
WORK = ("decode_s", "processor_s", "hash_s", "transfer_s")
CONNECTORS = {
    "stock": "vLLM",
    "ECCPUConnector": "vLLM's ECCPUConnector",
    "ECExampleConnector": "vLLM's ECExampleConnector",
}
BESIDE = ("ECCPUConnector", "mmcache")
FILES = {"png": "0.2 to 6.8", "jpeg": "0.1 to 1.5"}  # MB
FALLEN_OUT = "rotation, fallen out"
IN_ROTATION = ("rotation, unknown", FALLEN_OUT)


class Target(NamedTuple):
    """A bound: the plugin's number of a case by another one's. Each is (case, what is counted, side)."""

    text: str
    number: tuple[str, str, str]
    by: tuple[str, str, str]
    limit: float


def of_stock(text: str, case: str, what: str, limit: float) -> Target:
    return Target(text, (case, what, "mmcache"), (case, what, "stock"), limit)


# What an image may cost before the model sees it.
TARGETS = (
    Target("a picture that fell out of the processor cache, by one that is in it, same server",
           (FALLEN_OUT, "time_s", "mmcache"), ("rotation, held", "time_s", "mmcache"), 1.05),
    Target("the same, by a server whose processor cache holds all",
           (FALLEN_OUT, "time_s", "mmcache"), ("rotation, all in the cache", "time_s", "mmcache"), 1.05),
    of_stock("the same: CPU time of the API server, by stock's", FALLEN_OUT, "api_server_cpu_s", 0.25),
    Target("the same: bytes to the engine, by the encoded picture's",
           (FALLEN_OUT, "sent_bytes", "mmcache"), (FALLEN_OUT, "encoded_bytes", "mmcache"), 1.0),
    *(Target(f"first question after a restart, {place}, by the next one (pixels and features in RAM, no KV)",
             (f"restart, {tier}, first", "time_s", "mmcache"), (f"restart, {tier}, next", "time_s", "mmcache"), 1.15)
      for tier, place in (("disk", "a directory"), ("valkey", "Valkey"))),
    *(of_stock(f"unknown pictures{made}, {number} at once: time until the last first token, by stock's",
               f"{part}, {case}", "time_s", limit)
      for part, made in (("many", ""), ("many-small", ", made small for the tower"))
      for number, case, limit in (("many", "at once", 0.75), ("one", "alone", 1.05))),
    of_stock("a video of 64 frames, from the second time, by stock's", "video, again", "time_s", 0.15),
    of_stock("a video of 64 frames, after a restart, by stock's", "video, restarted", "time_s", 0.2),
)  # fmt: skip


def reuse(benchmark: str, case: str, text: str = "", in_readme: bool = False) -> Row:
    """Tokens reused of the best possible."""
    said = f"{text or case}: tokens reused of the best possible"
    return Row(said, benchmark, (f"*, {case}",), "cached_tokens/best_tokens", SHARE, text or case, in_readme)


def replayed(benchmark: str, case: str, text: str, in_readme: bool = False) -> tuple[Row, ...]:
    """What a replay reports, in four rows."""
    cases = (f"*, {case}",)
    return (
        reuse(benchmark, case, text),
        Row("the same: runs of the vision tower", benchmark, cases, "tower_runs", COUNT, f"{text}, runs of the tower"),
        Row("the same: pictures decoded", benchmark, cases, "decodes", COUNT, f"{text}, decodes"),
        Row(f"{text}: time of a request", benchmark, cases, "time_s", TIME, text, in_readme),
    )


def served(case: str) -> tuple[Row, ...]:
    """What vLLM's own client reports of a run, and what the server did."""
    text, cases = f"`vllm bench serve` with random-mm, {case}", (case,)
    return (
        Row(f"{text}: time to first token", "random_mm", cases, "first_token_s", TIME, f"bench serve, {case}"),
        Row("the same: pictures decoded", "random_mm", cases, "decodes", COUNT, f"bench serve, {case}, decodes"),
        Row("the same: runs of the vision tower", "random_mm", cases, "tower_runs", COUNT,
            f"bench serve, {case}, runs of the tower"),
    )  # fmt: skip


def by_size(form: str, when: str) -> tuple[Row, ...]:
    """What a picture costs before the model sees it, by its size."""
    said, cases = f"{form.upper()}, {when}", tuple(f"{form} {size}, {when}" for size in OF_SIZES)
    return (
        Row(f"a picture of {SIZES}, {said}: time to first token", "processor", cases, "time_s", TIME),
        Row(f"one of 1920x1080, {said}: decode / processor / hash / transfer to the engine, ms", "processor",
            (f"{form} 1920x1080, {when}",), WORK, Form(numbers(".1f", 1000))),
        Row(f"the same, by size: to the engine, MB; files are of {FILES[form]}", "processor", cases, "sent_bytes",
            Form(numbers(".1f", 1e-6))),
    )  # fmt: skip


def connector(side: str) -> Row:
    return Row(f"{{images}} images with {CONNECTORS[side]} for stock, runs of the tower: first asked / again, out of"
               " vLLM's own cache / after a restart", "upstream_connectors", ("first", "rotation", "restart"),
               "tower_runs", Form(numbers(".0f")), sides=(side, "mmcache"))  # fmt: skip


def loading(tier: str) -> Row:
    """The model of costs: stock's column is the tower."""
    cases = tuple(f"Qwen3-VL-8B, {picture}, H200" for picture in ("720p", "1080p", "1440p", "4K"))
    return Row(f"derived, Qwen3-VL-8B on an H200, 720p / 1080p / 1440p / 4K: the tower, and loading from {tier}",
               "feature_costs", cases, "time_s", TIME, sides=("tower", tier))  # fmt: skip


ROWS: tuple[Row, ...] = (
    Row("hash a prompt of {tokens:,} tokens with {images} images (sha256)", "block_keys", ("sha256",), "time_s", TIME,
        "hash a long prompt"),
    Row("Gemma 3 on the CPU, prompts to {longest_prompt_tokens:,.0f} tokens, against Transformers: largest error of a"
        " log-probability", "gemma3_attention", ("against Transformers",), "error", Form(numbers(".2g"), "work"),
        "Gemma 3, error of a log-probability"),
    Row("Gemma 3 on the CPU, against Transformers: wrong answers of {answers:.0f}", "gemma3_attention",
        ("against Transformers",), "wrong_answers", COUNT, "Gemma 3, wrong answers", in_readme=True),
    Row("Gemma 3, random load on a tiny KV cache: requests", "gemma3_attention", ("random load",), "requests",
        Form(numbers(",.0f"))),
    Row("the same: requests that hang", "gemma3_attention", ("random load",), "hung", COUNT,
        "Gemma 3, requests that hang"),
    Row("the same: images split", "gemma3_attention", ("random load",), "images_split", COUNT, "Gemma 3, images split"),
    Row("Gemma 3: CPU time of a prefill with six images / with text alone", "gemma3_attention",
        ("prefill, six images", "prefill, text alone"), "cpu_s", RATIO, "Gemma 3"),
    reuse("image_questions", "20 images x 2 questions", in_readme=True),
    reuse("image_questions", "20 images x 5 questions, interleaved"),
    reuse("image_questions", "two demo images, varying query image, 20 queries"),
    Row("a first request about 1 and 4 images, 4,000 and 8,000 tokens: time", "cold_requests", ("*, cold, *",),
        "time_s", RATIO, "a first request, worst of 4 cases", in_readme=True),
    reuse("agents", "agent replay, 18 turns"),
    reuse("agents", "window of 5 screenshots, 15 turns"),
    Row("{photos} photographs, each once: time in the last quarter by the first", "agents",
        ("*, photographs, each once",), "last_to_first", Form(numbers(".2f"))),
    *replayed("computer_use", "1 live", "computer use, {steps} steps, 1 screenshot live"),
    *replayed("computer_use", "3 live", "computer use, {steps} steps, 3 screenshots live"),
    *replayed("computer_use", "5 live", "computer use, {steps} steps, 5 screenshots live"),
    *replayed("image_service", "0% again", "image service, {requests} requests, no image twice"),
    *replayed("image_service", "50% again", "image service, {requests} requests, half of the images again"),
    *served("first run"),
    *served("same seed again"),
    Row("the same: tokens reused of the best possible", "random_mm", ("same seed again",),
        "cached_tokens/best_tokens", SHARE, "bench serve, same seed again"),
    Row("a text turn about {images} known screenshots, 1280x720 PNG: time to first token", "warm_turn", ("PNG",),
        "first_token_s", TIME, "warm turn, PNG", in_readme=True),
    Row("a text turn about {images} known screenshots, 1920x1080 JPEG: time to first token", "warm_turn", ("JPEG",),
        "first_token_s", TIME, "warm turn, JPEG"),
    Row("the same: body, PNG / JPEG, bytes", "warm_turn", ("PNG", "JPEG"), "body_bytes", Form(numbers(",.0f"))),
    Row("the same: CPU time of the API server, PNG / JPEG", "warm_turn", ("PNG", "JPEG"), "api_server_cpu_s", RATIO,
        "warm turn, CPU of the API server"),
    Row("the same: images decoded, PNG / JPEG", "warm_turn", ("PNG", "JPEG"), "decodes", COUNT, "warm turn, decodes"),
    Row("the PNG turn with the client transport: time to first token", "warm_turn", ("PNG, client transport",),
        "first_token_s", TIME),
    Row("{conversations} such conversations at once: turns per second", "warm_turn", ("conversations at once",),
        "turns_per_s", RATE, "warm turns at once, time per turn", in_readme=True),
    Row("the first turn, with unknown images: time", "warm_turn", ("unknown images",), "first_token_s", RATIO,
        "first turn, unknown images"),
    Row("{images} images of {size}x{size} in rotation, from the second round: time of a question", "gallery",
        ("*, in rotation",), "time_s", TIME, "images in rotation", in_readme=True),
    Row("the same: runs of the vision tower", "gallery", ("*, in rotation",), "tower_runs", COUNT,
        "images in rotation, runs of the tower"),
    Row("a question about an unknown image, features saved to disk: time", "gallery", ("*, unknown",), "time_s", RATIO,
        "unknown image, features saved"),
    Row("after a restart, {images} images: time of a question, features from disk", "restart", ("*, disk",), "time_s",
        TIME, "after a restart, disk", in_readme=True),
    Row("after a restart, {images} images: time of a question, features from Valkey", "restart", ("*, valkey",),
        "time_s", TIME, "after a restart, Valkey"),
    Row("a conversation about {images} screenshots after a restart, KV in vLLM's ExampleConnector: time to first token",
        "kv_restart", ("restart",), "first_token_s", TIME, "after a restart, KV in ExampleConnector"),
    Row("identity of a known image, at most", "identity", ("*",), "warm_s", Form(own(" us", 1e6, ".0f"))),
    # No ratio and no point: two servers differ by more than their sides (docs/identity.md).
    Row("a turn that names {images} images by uuid alone: time to first token, ms", "identity", ("uuid-only turn",),
        "first_token_s", Form(lambda groups: (time(groups[0][0][0]), time(groups[0][0][1])))),
    Row("recording why a warm turn about {images} images missed: time", "observe", ("recording a turn",), "time_s",
        Form(own(" us", 1e6, ".0f"))),
    Row("the same: time of the turn", "observe", ("recorded turn",), "time_s", TIME),
    Row(f"{MANY}: time to first token, p50 / p99", "load", ("p50", "p99"), "first_token_s", TIME,
        "conversations at once, first token", in_readme=True),
    Row("the same: whole request, p50 / p99", "load", ("p50", "p99"), "whole_s", TIME),
    Row("the same: requests per second", "load", ("load",), "requests_per_s", RATE,
        "conversations at once, time per request"),
    Row("the same: requests that failed", "load", ("load",), "failed", COUNT, "conversations at once, failed"),
    Row("the same: growth of memory after the warm-up, API server / engine, MiB a minute", "load",
        ("api_server", "engine"), "slope_mib_per_minute", NUMBER),
    Row("the same: resident at the end, API server / engine, MiB", "load", ("api_server", "engine"), "end_mib",
        Form(numbers(",.0f"))),
    Row("CPU time until the server is healthy, API server / engine / worker, s", "start_cost", ALL_STARTS, "cpu_s",
        Form(numbers(".2f"))),
    Row("the plugin's own CPU time at start, API server / engine / worker", "start_cost", ALL_STARTS,
        "plugin_own_cpu_s", Form(own(" s", 1, ".2f"))),
    Row("encryption at rest, off / on: processor time to save and load {mebibytes} MiB and 1000 records", "sealing",
        ("save", "load", "1000 records"), "cpu_s", TIME, sides=("clear", "sealed")),
    *(Row(f"{{images}} images in RAM, {text}: the feature store's time in a step, median / p99 / most, ms",
          "feature_steps", (case,), ("median_ms", "p99_ms", "most_ms"), Form(own("", 1, ".2f")))
      for text, case in (("runner V1, every step", "v1, all steps"), ("V1, steps with images", "v1, with images"),
                         ("V2, every step", "v2-async, all steps"), ("V2, with images", "v2-async, with images"))),
    *(Row(f"a step of others' decoding, without / while {{packages}} x 64 MiB {text}: median / p99 / most, ms",
          "feature_steps", (case,), ("median_ms", "p99_ms", "most_ms"), Form(numbers(".1f")), sides=("without", side))
      for text, case, side in (("load from disk", "decoding, disk", "loading"),
                               ("are only read", "decoding, disk", "reading"),
                               ("load from Valkey", "decoding, valkey", "loading"))),
    *(loading(tier) for tier in ("RAM", "NVMe", "Valkey, 100 GbE", "Valkey, 25 GbE", "Valkey, 10 GbE")),
    *(connector(side) for side in CONNECTORS),
    Row("an image after new weights, ECCPUConnector for stock: runs of the tower (0 is a wrong answer)",
        "upstream_connectors", ("new weights",), "tower_runs", Form(numbers(".0f")), sides=BESIDE),
    Row("a known image beside a new one, memory full, ECCPUConnector for stock: answered (0: the engine ends)",
        "upstream_connectors", ("memory full",), "answered", Form(numbers(".0f")), sides=BESIDE),
    Row("{images} pictures of 1280x720 in rotation, unknown / fallen out of the processor cache: time to first token",
        "processor", IN_ROTATION, "time_s", TIME),
    Row("the same: CPU time of the API server", "processor", IN_ROTATION, "api_server_cpu_s", TIME),
    Row("the same: CPU time of the engine", "processor", IN_ROTATION, "engine_cpu_s", TIME),
    Row("the same: to the engine, MB", "processor", IN_ROTATION, "sent_bytes",
        Form(numbers(".2f", 1e-6))),
    *(Row(f"after a restart, features in {place}, first question about a picture / the next: time to first token",
          "processor", (f"restart, {tier}, first", f"restart, {tier}, next"), "time_s", TIME)
      for tier, place in (("disk", "a directory"), ("valkey", "Valkey"))),
    *(row for form in FILES for when in ("unknown", "again") for row in by_size(form, when)),
    Row("{at_once} unknown pictures of 1920x1080 at once, large / made small for the tower: time until the last token",
        "processor", ("many, at once", "many-small, at once"), "time_s", TIME),
    Row("one of them alone: time to first token", "processor", ("many, alone", "many-small, alone"), "time_s", TIME),
    Row("a video of 64 frames, first / from the second time / after a restart: time to first token", "processor",
        ("video, first", "video, again", "video, restarted"), "time_s", TIME),
    *(Row(f"{target.text} (at most {target.limit:g})", "processor", (target.text,), "ratio", Form(own("", 1, ".3f")))
      for target in TARGETS),
    Row("memory when {distinct:,} images of {size}x{size} are known, API server / engine, MiB", "memory",
        ("api_server", "engine"), "end_mib", Form(own("", 1, ",.0f"))),
    Row("the same: bytes an image in the second half", "memory", ("api_server", "engine"), "second_half_bytes_an_image",
        Form(own("", 1, ",.0f"))),
    Row("chaos: requests answered / wrong / failed / under way at a kill", "chaos", ("chaos",),
        ("requests", "wrong", "failed", "excused"), Form(own("", 1, ",.0f"))),
    Row("the same: growth without a fault, API server / engine, MiB", "chaos", ("growth",),
        ("api_server_mib", "engine_mib"), Form(numbers(".0f"))),
)  # fmt: skip
