# SPDX-License-Identifier: Apache-2.0
"""The README's table of measurements, made from the committed results.

python -m benchmarks.summary          # print it
python -m benchmarks.summary --write  # put it into the README; a test compares
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import result_path
from benchmarks.sides import SIDES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- made by python -m benchmarks.summary -->\n", "<!-- end -->\n"

Row = tuple[str, str, str, str]  # what, stock, mmcache, command
FAMILIES = {"qwen3-vl": "Qwen3-VL", "qwen3.5": "Qwen3.5", "gemma3": "Gemma 3"}


def result(name: str) -> dict[str, Any]:
    """The committed result of a benchmark, or the one in BENCH_RESULTS."""
    found: dict[str, Any] = json.loads(result_path(name).read_text())
    return found


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def block_keys() -> list[Row]:
    found = result("block_keys")
    (row,) = [row for row in found["rows"] if row["algo"] == "sha256"]
    options = found["options"]
    what = f"hash a prompt of {options['tokens']:,} tokens with {options['images']} images (sha256)"
    ours = f"{row['mmcache_ms']:.1f} ms ({row['ratio']:.2f})"
    return [(what, f"{row['stock_ms']:.1f} ms", ours, "make bench-block-keys")]


def gemma3_attention() -> list[Row]:
    found = result("gemma3_attention")
    stock, ours = found["stock"], found["mmcache"]

    def hung(side: dict[str, Any]) -> str:
        load = side["load"]
        return f"{load['requests_hung']:,} of {load['requests_hung'] + load['requests_finished']:,}"

    longest = max(row["longest_prompt_tokens"] for row in ours["exactness"])
    what = f"Gemma 3 on the CPU, prompts to {longest:,} tokens: largest error of a log-probability against Transformers"
    ratios = [f"{found[case]['ratio']:.2f}" for case in ("prefill_images", "prefill_text")]
    command = "make bench-gemma3"
    return [
        (what, f"{stock['max_delta_logprob']:.1f}", f"{ours['max_delta_logprob']:.5f}", command),
        ("the same: wrong answers of 24", *(str(side["answers_wrong_of_24"]) for side in (stock, ours)), command),
        ("the same: requests that hang under random load on a tiny KV cache", hung(stock), hung(ours), command),
        ("the same: images split under that load", *(str(s["load"]["spans_split"]) for s in (stock, ours)), command),
        ("the same: CPU time of a prefill with six images / with text alone", "1", " / ".join(ratios), command),
    ]  # fmt: skip


def image_questions() -> list[Row]:
    found = result("image_questions")

    def share(side: str, family: str, workload: str) -> str:
        seen = found[family]["workloads"][side]["workloads"][workload]
        return f"{seen['cached_tokens'] / seen['best_tokens']:.2f}"

    rows = []
    for workload, what in (
        ("20 images x 2 questions", "20 images x 2 questions"),
        ("20 images x 5 questions, interleaved", "20 images x 5 questions, interleaved"),
        ("two demo images, varying query image, 20 queries", "two demo images, then another image, 20 queries"),
    ):
        shares = [" / ".join(share(side, family, workload) for family in ("qwen3.5", "gemma3")) for side in SIDES]
        what += ": tokens reused of the best possible, Qwen3.5 / Gemma 3"
        rows.append((what, shares[0], shares[1], "make bench-image-questions"))
    return rows


def cold_requests() -> list[Row]:
    found = result("cold_requests")
    ranges = []
    for family in ("gemma3", "qwen3.5"):
        ratios = [case["ratio"] for name, case in found[family].items() if name != "in_turn"]
        ranges.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
    what = "a first request about 1 and 4 images, 4,000 and 8,000 tokens, time by stock's: Gemma 3 / Qwen3.5"
    return [(what, "1", " / ".join(ranges), "make bench-cold-requests")]


def warm_turn() -> list[Row]:
    found = result("warm_turn")["targets"]
    rows, command = [], "make bench-warm-turn"
    for case, picture in (("png", "1280x720 PNG"), ("jpeg", "1920x1080 JPEG")):
        what = f"a text turn about 20 known screenshots, {picture} ({found[f'{case}: body, MB']:.0f} MB of body): time"
        stock, ours = (found[f"{case}: time to first token, {side}, ms"] for side in SIDES)
        rows.append((f"{what} to first token", f"{stock:.0f} ms", f"{ours:.0f} ms ({ours / stock:.2f})", command))
    cpu = [found[f"{case}: API server CPU per warm turn, mmcache / stock"] for case in ("png", "jpeg")]
    decoded = [found[f"{case}: images decoded on a warm turn, mmcache"] for case in ("png", "jpeg")]
    transport = [found[f"png: client transport and {side} / stock without it"] for side in SIDES]
    return [
        *rows,
        ("the same: CPU time of the API server, PNG / JPEG", "1", f"{cpu[0]:.2f} / {cpu[1]:.2f}", command),
        ("the same: images decoded", "20", f"{max(decoded):.0f}", command),
        (
            "the PNG turn with the client transport, by stock without it",
            f"{transport[0]:.2f}",
            f"{transport[1]:.2f}",
            command,
        ),
        (
            "8 such conversations at once: turns per second",
            "1",
            f"{found['at once: warm turns per second, mmcache / stock']:.1f}",
            command,
        ),
        (
            "the first turn, with unknown images: time",
            "1",
            f"{found['cold turn with unknown images, mmcache / stock']:.2f}",
            command,
        ),
    ]


def gallery() -> list[Row]:
    found = result("gallery")
    rows, command = [], "make bench-features"
    families = ("qwen3-vl", "qwen3.5")
    for family in families:
        times = found[family]["rounds_2_and_3"]
        what = f"{FAMILIES[family]}, 20 images of 1024x1024 in rotation, from the second round: time of a question"
        ours = f"{ms(times['mmcache_s'])} ms ({times['ratio']:.2f})"
        rows.append((what, f"{ms(times['stock_s'])} ms", ours, command))
    runs = [" / ".join(str(found[one]["tower_runs_in_rounds_2_and_3"][side]) for one in families) for side in SIDES]
    rows.append(("the same, Qwen3-VL / Qwen3.5: runs of the vision tower", *runs, command))
    cold = " / ".join(f"{found[family]['cold_with_saving']['ratio']:.2f}" for family in families)
    rows.append(("the same: time of a question about an unknown image, features saved to disk", "1", cold, command))
    return rows


def restart() -> list[Row]:
    found = result("restart")
    rows = []
    for family in ("qwen3-vl", "qwen3.5"):
        what = f"{FAMILIES[family]}, after a restart, 20 images: time of a question with features from disk / Valkey"
        tiers = [found[family][tier] for tier in ("disk", "valkey")]
        stock = " / ".join(ms(tier["stock_s"]) for tier in tiers)
        ours = " / ".join(f"{ms(tier['mmcache_s'])} ({tier['ratio']:.2f})" for tier in tiers)
        rows.append((what, f"{stock} ms", f"{ours} ms", "make bench-features"))
    return rows


def agents() -> list[Row]:
    found = result("agents")
    families = [family for family in FAMILIES if family in found]
    names, command = " / ".join(FAMILIES[family] for family in families), "make bench-agents"

    def per_family(workload: str, side: str, value: Callable[[dict[str, Any]], str]) -> str:
        return " / ".join(value(found[family][workload][side]) for family in families)

    def of_the_best(row: dict[str, Any]) -> str:
        return f"{row['cached_tokens'] / row['best_tokens']:.2f}"

    rows = []
    for workload in ("agent replay, 18 turns", "window of 5 screenshots, 15 turns"):
        shares = [per_family(workload, side, of_the_best) for side in SIDES]
        rows.append((f"{workload}: tokens reused of the best possible, {names}", *shares, command))
    photos = [per_family("200 photographs", side, lambda row: f"{row['last_to_first']:.2f}") for side in SIDES]
    rows.append((f"200 photographs, each once: time of the last by the first, {names}", *photos, command))
    return rows


def identity() -> list[Row]:
    found = result("identity")
    cost = max(row["warm_s"] for row in found["cost"].values())
    turn, command = found["uuid_only_turn"], "make bench-identity"
    return [
        ("identity of a known image, at most", "-", f"{1e6 * cost:.0f} us", command),
        (
            "a turn that names 20 images by uuid alone: time to first token",
            f"{ms(turn['stock_s'])} ms",
            f"{ms(turn['mmcache_s'])} ms ({turn['ratio']:.2f})",
            command,
        ),
    ]


def observe() -> list[Row]:
    turn = result("observe")["turn"]
    cost = turn["recorded"] - turn["plain"]
    ours = f"{1e6 * cost:.0f} us ({100 * cost / turn['plain']:.1f} %)"
    return [("recording why a warm turn about 20 images missed: time (of the turn)", "-", ours, "make bench-observe")]


PARTS = (
    block_keys,
    gemma3_attention,
    image_questions,
    cold_requests,
    agents,
    warm_turn,
    gallery,
    restart,
    identity,
    observe,
)


def table() -> str:
    """The table in Markdown, with the machines that it was measured on."""
    lines = ["| what | stock | mmcache | command |", "|---|---|---|---|"]
    for part in PARTS:
        lines += [f"| {what} | {stock} | {ours} | `{command}` |" for what, stock, ours, command in part()]
    seen = {(result(part.__name__)["machine"], result(part.__name__)["vllm"]) for part in PARTS}
    machines = "; ".join(f"{machine}, vLLM {version}" for machine, version in sorted(seen))
    note = f"Measured on: {machines}. Tiny random models: ratios and exactness matter, not milliseconds."
    return "\n".join([*lines, "", note, ""])


def written(text: str) -> str:
    """The README's text with today's table between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{README.name} lacks the marks {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + table() + END + after


def main() -> None:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if parser.parse_args().write:
        README.write_text(written(README.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
