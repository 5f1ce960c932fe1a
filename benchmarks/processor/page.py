# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/processor.md, made from the committed result.

python -m benchmarks.processor.page          # print them
python -m benchmarks.processor.page --write  # put them into the page; a test compares
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.catalogue import BENCHMARKS
from benchmarks.processor.pictures import SIZES
from benchmarks.processor.targets import TIERS, targets
from benchmarks.results import ROOT, committed
from benchmarks.sides import SIDES
from benchmarks.summary import between_marks, machines_of

PAGE = ROOT / "docs" / "processor.md"
BEGIN = "<!-- made by python -m benchmarks.processor.page -->\n"
SHOWN = {"stock": "stock", "mmcache": "mmcache"}
MIB, MEGA = 1 << 20, 1e6
COSTS = ("decode", "processor", "hash", "transfer")

Found = Mapping[str, Any]
Row = Sequence[str]


def text(found: Found) -> str:
    """What the page says of a result: the targets, then a table for each scenario that was run."""
    made = (bounds(found), rotation(found), restart(found), costs(found), many(found), video(found), memory(found))
    short = (
        ""
        if is_whole(found)
        else "**Some parts are of a short run beside other work, which only shows that it works.**\n"
    )
    return "\n".join([*filter(None, (short, *made)), f"Measured on {machines_of(found)}, commit {commits(found)}.\n"])


def is_whole(found: Found) -> bool:
    """Whether every part has its full size."""
    whole = BENCHMARKS["processor"].options
    return all(size == whole[name] for part in found.values() for name, size in part["sizes"].items())


def commits(found: Found) -> str:
    return ", ".join(dict.fromkeys(part["commit"] for part in found.values()))


def table(title: str, head: Row, rows: Iterable[Row]) -> str:
    """Nothing without a row."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"{title}:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, ""])


def bounds(found: Found) -> str:
    rows = [(one.what, one.shown, f"{one.limit}", "yes" if one.is_met else "**no**") for one in targets(found)]
    return table("What was asked for", ("ratio", "measured", "at most", "met"), rows)


def rotation(found: Found) -> str:
    rows = []
    for part in ("rotation-stock", "rotation-mmcache", "rotation-stock-all", "rotation-mmcache-all"):
        if part in found:
            one, side = found[part]["found"], part.split("-")[1]
            again = "again, in the cache" if part.endswith("-all") else "again, fallen out of the cache"
            for name, what in (("unknown", "unknown"), ("again", again)):
                rows.append((SHOWN[side], what, *asked(one[name]), f"{one[name]['sent_bytes'] / MEGA:.2f}"))
    sizes = [found[part]["found"]["encoded_bytes"] for part in found if part.startswith("rotation")]
    images = [found[part]["sizes"]["images"] for part in found if part.startswith("rotation")]
    title = f"{images[0]} pictures of 1280x720 ({sizes[0] / MEGA:.2f} MB encoded) in rotation" if images else ""
    head = ("side", "picture", "first token, ms", "CPU of API server, ms", "CPU of engine, ms", "to the engine, MB")
    return table(title, head, rows)


def asked(one: Found) -> tuple[str, str, str]:
    """Milliseconds of one question: to the first token, and of CPU in both processes."""
    return ms(one["median_s"]), ms(one["api_server_cpu_s"]), ms(one["engine_cpu_s"])


def restart(found: Found) -> str:
    rows = []
    for tier, place in TIERS.items():
        for side in SIDES:
            if part := found.get(f"restart-{tier}-{side}"):
                one = part["found"]
                rows.append((place, SHOWN[side], ms(one["first"]["median_s"]), ms(one["again"]["median_s"])))
    head = ("features in", "side", "first question after the restart, ms", "the next about the same picture, ms")
    return table("After a restart, the KV cache holding nothing of it", head, rows)


def costs(found: Found) -> str:
    """Milliseconds of each kind of work for one picture: stock / plugin."""
    rows = []
    for form in ("png", "jpeg"):
        parts = [found.get(f"costs-{form}-{side}") for side in SIDES]
        if not all(parts):
            continue
        for width, height in SIZES:
            sides = [part["found"][f"{width}x{height}"] for part in parts if part]
            what = f"{form.upper()} {width * height / MEGA:.1f} MP, {sides[0]['encoded_bytes'] / MEGA:.1f} MB"
            for when in ("unknown", "again"):
                pairs = [[side[when]["spent_s"][kind] for side in sides] for kind in COSTS]
                pairs.append([side[when]["median_s"] for side in sides])
                sent = " / ".join(f"{side[when]['sent_bytes'] / MEGA:.1f}" for side in sides)
                rows.append((what, when, *(" / ".join(map(ms, pair)) for pair in pairs), sent))
    head = ("picture", "asked", *COSTS, "first token", "to the engine, MB")
    return table("What one picture costs, milliseconds, stock / mmcache", head, rows)


def many(found: Found) -> str:
    rows, at_once = [], 0
    for name, seen in (("many", "1920x1080"), ("many-small", "640x352")):
        if part := found.get(name):
            at_once = part["sizes"]["at_once"]
            rows += [
                (SHOWN[side], seen, f"{one['at_once']['median_s']:.2f}", f"{one['alone']['median_s']:.3f}",
                 ms(one["api_server_cpu_s"]["median_s"])) for side, one in part["found"].items()
            ]  # fmt: skip
    head = ("side", "for the tower", f"{at_once} at once: last first token, s", "one alone, s",
            "CPU of API server, ms each")  # fmt: skip
    return table("Unknown pictures of 1920x1080", head, rows)


def video(found: Found) -> str:
    rows = []
    for side in SIDES:
        if part := found.get(f"video-{side}"):
            one = part["found"]
            if "left_out" in one:
                rows.append((SHOWN[side], "not run: the model takes no video", "", ""))
            else:
                rows.append((SHOWN[side], *(ms(one[name]["median_s"]) for name in ("first", "again", "restarted"))))
    return table("A video of 64 frames, first token, ms", ("side", "first", "from the second time", "after a restart"),
                 rows)  # fmt: skip


def memory(found: Found) -> str:
    rows = []
    for side in SIDES:
        if part := found.get(f"memory-{side}"):
            for process, seen in part["found"]["images_mib"].items():
                (first, start), (half, middle), (last, end) = seen[0], seen[len(seen) // 2], seen[-1]
                grown = (end - middle) * MIB / (last - half)
                name = process.replace("_", " ")
                rows.append((SHOWN[side], name, f"{start:.0f}", f"{end:.0f}", f"{last - first:,}", f"{grown:,.0f}"))
    head = ("side", "process", "at the start, MiB", "at the end, MiB", "images", "bytes an image, second half")
    return table("Memory while images become known", head, rows)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:.0f}"


def written(page: str) -> str:
    """The page's text with today's tables between the marks."""
    return between_marks(page, BEGIN, text(committed("processor")["details"]))


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processor.page", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put them into docs/processor.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(text(committed("processor")["details"]))


if __name__ == "__main__":
    main()
