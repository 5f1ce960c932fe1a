# SPDX-License-Identifier: Apache-2.0
"""How the numbers of a result are shown: a row of the table, its cells, and its points in the plot."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

FAMILIES = {
    "qwen2-vl": "Qwen2-VL", "qwen2.5-vl": "Qwen2.5-VL", "qwen3-vl": "Qwen3-VL", "qwen3-vl-moe": "Qwen3-VL MoE",
    "qwen3.5": "Qwen3.5", "qwen3.5-moe": "Qwen3.5 MoE", "gemma3": "Gemma 3", "gemma4": "Gemma 4",
}  # fmt: skip
COMMANDS = {"gemma3_attention": "bench-gemma3", "gallery": "bench-features", "restart": "bench-features",
            "chaos": "chaos"}  # fmt: skip

Loaded = Mapping[str, Any]  # a result, as results.py writes it
Pair = tuple[float, float]  # stock, mmcache; stock's is 0 where there is none
Groups = list[list[Pair]]  # a cell's numbers, several where one stands for several cases
Cells = tuple[str, str]


class Point(NamedTuple):
    """What the plot shows of a row. Groups: time (less is better), work (less is better), reuse (shares of 1)."""

    group: str
    label: str
    stock: float
    mmcache: float


class Form(NamedTuple):
    """How numbers are shown in a row's two cells; its group in the plot, and what a point has of a number."""

    cells: Callable[[Groups], Cells]
    group: str = ""
    in_plot: Callable[[float], float] = float


def time(seconds: float) -> str:
    """In milliseconds, without the unit."""
    return f"{1000 * seconds:.1f}" if seconds < 0.02 else f"{1000 * seconds:.0f}"


def times(groups: Groups) -> Cells:
    """With the ratio to stock."""
    stock = " / ".join(time(pairs[0][0]) for pairs in groups)
    unit = " ms" if len(groups) == 1 else ""
    ours = " / ".join(f"{time(ours_s)}{unit} ({ours_s / stock_s:.2f})" for ((stock_s, ours_s), *_) in groups)
    return f"{stock} ms", ours if unit else f"{ours} ms"


def ratios(groups: Groups) -> Cells:
    """By stock's; the least and the most where there are several."""
    each = [sorted(ours / stock for stock, ours in pairs) for pairs in groups]
    return "1", " / ".join(f"{one[0]:.2f}" + (f" to {one[-1]:.2f}" if len(one) > 1 else "") for one in each)


def numbers(form: str, factor: float = 1) -> Callable[[Groups], Cells]:
    def cells(groups: Groups) -> Cells:
        stock, ours = (" / ".join(f"{factor * pairs[0][side]:{form}}" for pairs in groups) for side in (0, 1))
        return stock, ours

    return cells


def rates(groups: Groups) -> Cells:
    """With the ratio to stock."""
    stock, _ = numbers(".1f")(groups)
    return stock, " / ".join(f"{ours:.1f} ({ours / one:.1f} x)" for ((one, ours), *_) in groups)


def own(unit: str, factor: float, form: str) -> Callable[[Groups], Cells]:
    """Where stock has nothing of the kind; the most of several."""
    return lambda groups: ("-", " / ".join(f"{factor * max(pairs)[1]:{form}}" for pairs in groups) + unit)


TIME = Form(times, "time")
RATIO = Form(ratios, "time")
RATE = Form(rates, "time", lambda rate: 1 / rate)
COUNT = Form(numbers(",.0f"), "work")
SHARE = Form(numbers(".2f"), "reuse")
NUMBER = Form(numbers(".1f"))


@dataclass(frozen=True)
class Row:
    """A row of the table. `cases`: a number for each; where one begins with `*, `, one for each family.

    `text` may name options and what was counted, in braces. `what` may be a part and its whole, `a/b`, or several.
    `label`: in the plot, where a row without one is not. `sides`: whose numbers stand under stock and mmcache.
    """

    text: str
    benchmark: str
    cases: tuple[str, ...]
    what: str | tuple[str, ...]
    form: Form
    label: str = ""
    in_readme: bool = False
    sides: tuple[str, str] = ("stock", "mmcache")

    def groups(self, found: Loaded) -> dict[str, list[Pair]]:
        """The numbers that a result has for this row, by what their cell is called; empty where it has none."""
        whats = (self.what,) if isinstance(self.what, str) else self.what
        made: dict[str, list[Pair]] = {}
        for case in self.cases:
            named = {case: case if len(self.cases) > 1 else ""}
            if case.startswith("*, "):
                named = {case.replace("*", family, 1): name for family, name in FAMILIES.items()}
            for pattern, name in named.items():
                for what in whats:
                    if pairs := list(self._pairs(found["found"], pattern, what)):
                        made[f"{name} {what}" if len(whats) > 1 else name] = pairs
        return made

    def _pairs(self, found: Mapping[str, Mapping[str, Mapping[str, float]]], pattern: str, what: str) -> Iterator[Pair]:
        what, _, whole = what.partition("/")
        for case, counted in found.items():
            if fnmatchcase(case, pattern) and self.sides[1] in counted.get(what, {}):
                of = counted[whole] if whole else dict.fromkeys(counted[what], 1)
                if not any(of.values()):
                    continue  # a part of nothing
                stock, ours = (counted[what].get(side, 0) / of[side] if of.get(side) else 0.0 for side in self.sides)
                yield stock, ours

    def said(self, found: Loaded) -> str:
        """Its text, with the families that it is about."""
        counted = [sides for case, sides in found["found"].items() if case in self.cases]
        values = {what: sides.get("mmcache") for one in counted for what, sides in one.items()}
        families = [name for name in self.groups(found) if name in FAMILIES.values()]
        return self.text.format(**values | dict(found["options"])) + (f", {' / '.join(families)}" if families else "")

    def line(self, found: Loaded) -> str:
        """In Markdown; empty where the result says nothing of it."""
        if not (groups := list(self.groups(found).values())):
            return ""
        command = COMMANDS.get(self.benchmark, f"bench-{self.benchmark.replace('_', '-')}")
        return f"| {self.said(found)} | {' | '.join(self.form.cells(groups))} | `make {command}` |"

    def points(self, found: Loaded) -> Iterator[Point]:
        """Where a point stands for several cases it is the worst, by stock's."""
        if not self.label or not self.form.group:
            return
        label = self.label.format(**found["options"])
        for name, pairs in self.groups(found).items():
            stock, ours = map(self.form.in_plot, max(pairs, key=lambda pair: pair[1] / pair[0] if pair[0] else 0))
            yield Point(self.form.group, f"{label}, {name}" if name else label, stock, ours)
