# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of measurements: of which benchmark and cases, what is shown of them, and how."""

from benchmarks.forms import COUNT, NUMBER, RATE, RATIO, SHARE, TIME, Form, Row, numbers, own, time

MANY = "{conversations} conversations with screenshots for {seconds:.0f} s"
ALL_STARTS = ("api_server", "engine", "worker")


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
    Row("identity of a known image, at most", "identity", ("*",), "warm_s", Form(own("us", 1e6, ".0f"))),
    # No ratio and no point: two servers differ by more than their sides (docs/identity.md).
    Row("a turn that names {images} images by uuid alone: time to first token, ms", "identity", ("uuid-only turn",),
        "first_token_s", Form(lambda groups: (time(groups[0][0][0]), time(groups[0][0][1])))),
    Row("recording why a warm turn about {images} images missed: time", "observe", ("recording a turn",), "time_s",
        Form(own("us", 1e6, ".0f"))),
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
        "plugin_own_cpu_s", Form(own("s", 1, ".2f"))),
)  # fmt: skip
