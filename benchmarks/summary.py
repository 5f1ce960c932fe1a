# SPDX-License-Identifier: Apache-2.0
"""The table of measurements, made from results: the committed ones for the README, others for `make bench`.

python -m benchmarks.summary          # print it
python -m benchmarks.summary --write  # put it into the README; a test compares
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sides import SIDES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- made by python -m benchmarks.summary -->\n", "<!-- end -->\n"
LINKS = "[As a plot](docs/benchmarks.png). [How to repeat and read it](docs/benchmarks.md).\n"
PROCESSES = ("api_server", "engine")
SETTLED_S = 120  # of load, before its growth of memory says anything: caches fill first

Result = dict[str, Any]
FAMILIES = {
    "qwen2-vl": "Qwen2-VL",
    "qwen2.5-vl": "Qwen2.5-VL",
    "qwen3-vl": "Qwen3-VL",
    "qwen3-vl-moe": "Qwen3-VL MoE",
    "qwen3.5": "Qwen3.5",
    "qwen3.5-moe": "Qwen3.5 MoE",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
}


class Point(NamedTuple):
    """What the plot shows of a row. Groups: time (less is better), work (less is better), reuse (shares of 1)."""

    group: str
    label: str
    stock: float
    mmcache: float


@dataclass(frozen=True)
class Row:
    """A row of the table, and its points in the plot."""

    what: str
    stock: str
    mmcache: str
    command: str
    points: tuple[Point, ...] = ()


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def families_of(found: Result) -> list[str]:
    return [family for family in FAMILIES if family in found]


def names_of(families: list[str]) -> str:
    return " / ".join(FAMILIES[family] for family in families)


def joined(values: Mapping[str, Any], form: Callable[[Any], str] = str) -> str:
    return " / ".join(form(value) for value in values.values())


def with_ratios(pairs: list[tuple[float, float]]) -> tuple[str, str]:
    """Seconds of stock and ours, one pair or several, as milliseconds; ours with the ratio."""
    stock = " / ".join(ms(stock_s) for stock_s, _ in pairs)
    ours = " / ".join(f"{ms(ours_s)} ({ours_s / stock_s:.2f})" for stock_s, ours_s in pairs)
    return f"{stock} ms", f"{ours} ms" if len(pairs) > 1 else ours.replace(" ", " ms ", 1)


def of_sides(found: Mapping[str, Any]) -> tuple[float, float]:
    """What compare() of sides.py found."""
    return found["stock_s"], found["mmcache_s"]


def block_keys(found: Result) -> list[Row]:
    (row,) = [row for row in found["rows"] if row["algo"] == "sha256"]
    options = found["options"]
    what = f"hash a prompt of {options['tokens']:,} tokens with {options['images']} images (sha256)"
    ours = f"{row['mmcache_ms']:.1f} ms ({row['ratio']:.2f})"
    points = (Point("time", f"hash {options['tokens']:,} tokens", row["stock_ms"], row["mmcache_ms"]),)
    return [Row(what, f"{row['stock_ms']:.1f} ms", ours, "make bench-block-keys", points)]


def gemma3_attention(found: Result) -> list[Row]:
    sides, command = [found[side] for side in SIDES], "make bench-gemma3"
    num_answers = sum(row.get("answers", 8) for row in sides[0]["exactness"])
    wrong = [sum(row["answers_wrong"] for row in side["exactness"]) for side in sides]
    loads = [side["load"] for side in sides]
    hung = [load["requests_hung"] for load in loads]
    asked = [load["requests_hung"] + load["requests_finished"] for load in loads]
    split = [load["spans_split"] for load in loads]
    longest = max(row["longest_prompt_tokens"] for row in sides[1]["exactness"])
    what = (
        f"Gemma 3 on the CPU, prompts to {longest:,} tokens, against Transformers: largest error of a log-probability"
    )
    errors = [side["max_delta_logprob"] for side in sides]
    cases = {"six images": found["prefill_images"], "text": found["prefill_text"]}
    prefills = (Point("time", f"Gemma 3, prefill, {case}", one["stock_cpu_s"], one["mmcache_cpu_s"])
                for case, one in cases.items())  # fmt: skip
    return [
        Row(f"{what} / wrong answers of {num_answers}",
            f"{errors[0]:.1f} / {wrong[0]}", f"{errors[1]:.5f} / {wrong[1]}", command,
            (Point("work", "Gemma 3, error of a log-probability", errors[0], errors[1]),
             Point("work", "Gemma 3, wrong answers", wrong[0], wrong[1]))),
        Row("the same: requests that hang / images split under random load on a tiny KV cache",
            *(f"{hung[i]:,} of {asked[i]:,} / {split[i]}" for i in range(2)), command,
            (Point("work", "Gemma 3, share of requests that hang", hung[0] / asked[0], hung[1] / asked[1]),
             Point("work", "Gemma 3, images split", split[0], split[1]))),
        Row("the same: CPU time of a prefill with six images / with text alone", "1",
            joined(cases, lambda one: f"{one['ratio']:.2f}"), command, tuple(prefills)),
    ]  # fmt: skip


def shares(rows: Mapping[str, Mapping[str, Any]], what: str, command: str) -> Row:
    """Tokens reused of the best possible; `rows` holds counts by family and side."""
    of = {
        side: {family: row[side]["cached_tokens"] / row[side]["best_tokens"] for family, row in rows.items()}
        for side in SIDES
    }
    points = (Point("reuse", f"{what}, {FAMILIES[one]}", *(of[side][one] for side in SIDES)) for one in rows)
    texts = (joined(of[side], lambda share: f"{share:.2f}") for side in SIDES)
    return Row(f"{what}: tokens reused of the best possible, {names_of(list(rows))}", *texts, command, tuple(points))


def image_questions(found: Result) -> list[Row]:
    def counts(family: str, workload: str) -> dict[str, Any]:
        return {side: found[family]["workloads"][side]["workloads"][workload] for side in SIDES}

    rows = []
    for workload, what in (
        ("20 images x 2 questions", "20 images x 2 questions"),
        ("20 images x 5 questions, interleaved", "20 images x 5 questions, interleaved"),
        ("two demo images, varying query image, 20 queries", "two demo images, then another image, 20 queries"),
    ):
        rows.append(
            shares({one: counts(one, workload) for one in families_of(found)}, what, "make bench-image-questions")
        )
    return rows


def cold_requests(found: Result) -> list[Row]:
    ranges, points, families = [], [], [family for family in ("gemma3", "qwen3.5") if family in found]
    for family in families:
        cases = [case for name, case in found[family].items() if name != "in_turn"]
        ratios = [case["ratio"] for case in cases]
        ranges.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
        worst = max(cases, key=lambda case: float(case["ratio"]))
        points.append(Point("time", f"a first request, worst of 4 cases, {FAMILIES[family]}", *of_sides(worst)))
    what = f"a first request about 1 and 4 images, 4,000 and 8,000 tokens, time by stock's: {names_of(families)}"
    return [Row(what, "1", " / ".join(ranges), "make bench-cold-requests", tuple(points))]


def warm_turn(found: Result) -> list[Row]:
    seen, images, command = found["targets"], found["options"]["images"], "make bench-warm-turn"
    rows = []
    for case, picture in (("png", "1280x720 PNG"), ("jpeg", "1920x1080 JPEG")):
        what = f"a text turn about {images} known screenshots, {picture} ({seen[f'{case}: body, MB']:.0f} MB of body)"
        pair = [seen[f"{case}: time to first token, {side}, ms"] / 1000 for side in SIDES]
        point = Point("time", f"warm turn, {images} images, {case.upper()}", pair[0], pair[1])
        rows.append(
            Row(f"{what}: time to first token", *with_ratios([(pair[0], pair[1])]), command, (point,)),
        )
    cpu = [seen[f"{case}: API server CPU per warm turn, mmcache / stock"] for case in ("png", "jpeg")]
    decoded = max(seen[f"{case}: images decoded on a warm turn, mmcache"] for case in ("png", "jpeg"))
    transport = [seen[f"png: client transport and {side} / stock without it"] for side in SIDES]
    faster = seen["at once: warm turns per second, mmcache / stock"]
    cold = seen["cold turn with unknown images, mmcache / stock"]
    return [
        *rows,
        Row("the same: CPU time of the API server, PNG / JPEG", "1", f"{cpu[0]:.2f} / {cpu[1]:.2f}", command,
            (Point("time", "warm turn, CPU of the API server, PNG", 1, cpu[0]),
             Point("time", "warm turn, CPU of the API server, JPEG", 1, cpu[1]))),
        Row("the same: images decoded", str(images), f"{decoded:.0f}", command,
            (Point("work", "warm turn, images decoded", images, decoded),)),
        Row("the PNG turn with the client transport, by stock without it", f"{transport[0]:.2f}",
            f"{transport[1]:.2f}", command, (Point("time", "warm turn, PNG, client transport", 1, transport[1]),)),
        Row(f"{found['options']['conversations']} such conversations at once: turns per second", "1", f"{faster:.1f}",
            command, (Point("time", "warm turns at once, time per turn", 1, 1 / faster),)),
        Row("the first turn, with unknown images: time", "1", f"{cold:.2f}", command,
            (Point("time", "first turn, unknown images", 1, cold),)),
    ]  # fmt: skip


def gallery(found: Result) -> list[Row]:
    families, command = families_of(found), "make bench-features"
    names, options = names_of(families), found["options"]
    later = {family: of_sides(found[family]["rounds_2_and_3"]) for family in families}
    cold = {family: of_sides(found[family]["cold_with_saving"]) for family in families}
    runs = {family: found[family]["tower_runs_in_rounds_2_and_3"] for family in families}
    images = f"{options['images']} images of {options['size']}x{options['size']}"
    return [
        Row(f"{images} in rotation, from the second round: time of a question, {names}",
            *with_ratios(list(later.values())), command,
            tuple(Point("time", f"images in rotation, {FAMILIES[one]}", *pair) for one, pair in later.items())),
        Row(f"the same, {names}: runs of the vision tower",
            *(joined(runs, lambda one, side=side: str(one[side])) for side in SIDES), command,
            tuple(Point("work", f"images in rotation, runs of the vision tower, {FAMILIES[one]}",
                        *(runs[one][side] for side in SIDES)) for one in families)),
        Row("the same: time of a question about an unknown image, features saved to disk", "1",
            joined(cold, lambda pair: f"{pair[1] / pair[0]:.2f}"), command,
            tuple(Point("time", f"unknown image, features saved, {FAMILIES[one]}", *pair)
                  for one, pair in cold.items())),
    ]  # fmt: skip


def restart(found: Result) -> list[Row]:
    families = families_of(found)
    rows = []
    for tier, name in (("disk", "disk"), ("valkey", "Valkey")):
        pairs = {family: of_sides(found[family][tier]) for family in families if tier in found[family]}
        if pairs:
            what = f"after a restart, {found['options']['images']} images: time of a question, features from {name}"
            points = (Point("time", f"after a restart, {name}, {FAMILIES[one]}", *pair) for one, pair in pairs.items())
            texts = with_ratios(list(pairs.values()))
            rows.append(Row(f"{what}, {names_of(list(pairs))}", *texts, "make bench-features", tuple(points)))
    return rows


def agents(found: Result) -> list[Row]:
    families, command = families_of(found), "make bench-agents"

    def of(workload: str) -> dict[str, Any]:
        return {family: found[family][workload] for family in families if workload in found[family]}

    replays = ("agent replay, 18 turns", "window of 5 screenshots, 15 turns")
    rows = [shares(of(workload), workload, command) for workload in replays if of(workload)]
    if photos := of("200 photographs"):
        texts = (joined(photos, lambda row, side=side: f"{row[side]['last_to_first']:.2f}") for side in SIDES)
        what = f"200 photographs, each once: time in the last quarter by the first, {names_of(list(photos))}"
        rows.append(Row(what, *texts, command))
    return rows


def identity(found: Result) -> list[Row]:
    cost = max(row["warm_s"] for row in found["cost"].values())
    command = "make bench-identity"
    rows = [Row("identity of a known image, at most", "-", f"{1e6 * cost:.0f} us", command)]
    if "uuid_only_turn" in found:
        pair = of_sides(found["uuid_only_turn"])
        what = f"a turn that names {found['options']['images']} images by uuid alone: time to first token"
        # No ratio and no point: two servers differ by more than their sides (docs/identity.md).
        rows.append(Row(what, *(f"{ms(seconds)} ms" for seconds in pair), command))
    return rows


def observe(found: Result) -> list[Row]:
    turn = found["turn"]
    seconds = turn["recorded"] - turn["plain"]
    cost = f"{1e6 * seconds:.0f} us ({100 * seconds / turn['plain']:.1f} %)"
    what = f"recording why a warm turn about {found['options']['images']} images missed: time (of the turn)"
    return [Row(what, "-", cost, "make bench-observe")]


def load(found: Result) -> list[Row]:
    options, sides, command = found["options"], [found[side] for side in SIDES if side in found], "make bench-load"
    if len(sides) < len(SIDES):
        return []
    family = FAMILIES[options["family"]]
    what = f"{options['conversations']} conversations with screenshots for {options['seconds']:.0f} s, {family}"
    rates = [side["requests_per_s"] for side in sides]
    times = [tuple(side["first_token_s"][of] for of in ("p50", "p99")) for side in sides]
    slopes = [[side["memory"][process]["slope_mib_per_minute"] for process in PROCESSES] for side in sides]
    rows = [
        Row(f"{what}: requests per second (failed)",
            *(f"{rate:.1f} ({side['failed']})" for rate, side in zip(rates, sides, strict=True)), command,
            (Point("time", f"{options['conversations']} conversations at once, time per request",
                   1 / rates[0], 1 / rates[1]),)),
        Row("the same: time to first token, p50 / p99", *(f"{ms(half)} / {ms(most)} ms" for half, most in times),
            command, tuple(Point("time", f"{options['conversations']} conversations at once, first token, {of}",
                                 times[0][i], times[1][i]) for i, of in enumerate(("p50", "p99")))),
    ]  # fmt: skip
    if options["seconds"] >= SETTLED_S:
        what = "the same: growth of memory after the warm-up, API server / engine, MiB a minute"
        rows.append(Row(what, *(" / ".join(f"{slope:.1f}" for slope in of) for of in slopes), command))
    return rows


def start_cost(found: Result) -> list[Row]:
    last = list(found["measured"].values())[-1]["processes"]
    seconds = " / ".join(f"{process['plugin_own_cpu_s']:.2f}" for process in last.values())
    what = "the plugin's own CPU time at start, API server / engine / worker"
    return [Row(what, "-", f"{seconds} s", "make bench-start-cost")]


PARTS: tuple[Callable[[Result], list[Row]], ...] = (
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
    load,
    start_cost,
)


def committed() -> dict[str, Result]:
    """The committed result of every benchmark, by name."""
    names = [part.__name__ for part in PARTS]
    return {name: json.loads((ROOT / "benchmarks" / name / "results" / f"{name}.json").read_text()) for name in names}


def rows_of(results: Mapping[str, Result]) -> list[Row]:
    """The rows of those benchmarks that have a result."""
    return [row for part in PARTS if part.__name__ in results for row in part(results[part.__name__])]


def table(results: Mapping[str, Result]) -> str:
    """The table in Markdown, with the machines that it was measured on."""
    lines = ["| what | stock | mmcache | command |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.stock} | {row.mmcache} | `{row.command}` |" for row in rows_of(results)]
    note = f"Measured on {machines_of(results)}. Tiny random models: ratios and exactness matter, not milliseconds."
    return "\n".join([*lines, "", note, ""])


def machines_of(results: Mapping[str, Result]) -> str:
    """The machines of results, each once: cores, the processors that had so many, and vLLM's version."""
    seen: dict[tuple[str, str], set[str]] = {}
    for found in results.values():
        name, _, cores = found["machine"].rpartition(", ")  # as machine.py writes it
        seen.setdefault((cores, found["vllm"]), set()).add(re.sub(r"\((R|TM)\)|\s+(CPU|Processor)\b", "", name))
    return "; ".join(
        f"{cores} of {' or '.join(sorted(names))}, vLLM {version}" for (cores, version), names in sorted(seen.items())
    )


def between_marks(text: str, begin: str, content: str) -> str:
    """A page's text with `content` between the marks `begin` and END. Raises: ValueError where it lacks them."""
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page lacks the marks {begin.strip()} and {END.strip()}")
    return before + begin + content + END + after


def written(text: str) -> str:
    """The README's text with today's table between the marks."""
    return between_marks(text, BEGIN, table(committed()) + LINKS)


def main() -> None:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if parser.parse_args().write:
        README.write_text(written(README.read_text()))
    else:
        print(table(committed()))


if __name__ == "__main__":
    main()
