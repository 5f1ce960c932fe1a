# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of measurements: which numbers of a result one shows, in its cells and in the plot."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from benchmarks.catalogue import CATALOGUE, command
from benchmarks.results import Result

FAMILIES = {
    "qwen2-vl": "Qwen2-VL", "qwen2.5-vl": "Qwen2.5-VL", "qwen3-vl": "Qwen3-VL", "qwen3-vl-moe": "Qwen3-VL MoE",
    "qwen3.5": "Qwen3.5", "qwen3.5-moe": "Qwen3.5 MoE", "gemma3": "Gemma 3", "gemma4": "Gemma 4",
}  # fmt: skip
# Of the plot, by form.
GROUPS = {"time": "time", "ratio": "time", "rate": "time", "count": "work", "error": "work", "share": "reuse"}
FALLEN_OUT = "rotation, fallen out"

Loaded = Mapping[str, Any]  # a result, as results.py writes it
Pair = tuple[float, float]  # stock, mmcache; stock's is 0 where there is none
Groups = list[list[Pair]]  # a cell's numbers, several where one stands for several cases


class Point(NamedTuple):
    """What the plot shows of a row. Groups: time (less is better), work (less is better), reuse (shares of 1)."""

    group: str
    label: str
    stock: float
    mmcache: float


def cells(form: str, groups: Groups) -> tuple[str, str]:
    """What stands under stock and mmcache.

    A form is one of GROUPS, or of numbers: `.1f`, `1e-6*.1f` for millions, `own .2f s` with a unit where stock has
    nothing of the kind, which shows the most of several.
    """
    firsts = [pairs[0] for pairs in groups]
    if form == "time":  # in milliseconds, with the ratio to stock
        unit, end = (" ms", "") if len(groups) == 1 else ("", " ms")
        stock = " / ".join(f"{1000 * s:.{int(s < 0.02)}f}" for s, _ in firsts)
        ours = (f"{1000 * our:.{int(our < 0.02)}f}{unit} ({our / s:.2f})" for s, our in firsts)
        return f"{stock} ms", " / ".join(ours) + end
    if form == "ratio":  # to stock; the least and the most where there are several
        each = [sorted(our / s for s, our in pairs) for pairs in groups]
        return "1", " / ".join(f"{one[0]:.2f}" + (f" to {one[-1]:.2f}" if len(one) > 1 else "") for one in each)
    if form == "rate":
        return cells(".1f", groups)[0], " / ".join(f"{our:.1f} ({our / s:.1f} x)" for s, our in firsts)
    named = {"count": ",.0f", "error": ".2g", "share": ".2f"}.get(form, form)
    own, factor, said, unit = re.fullmatch(r"(own )?(?:(\S+)\*)?(\S+)( \w+)?", named).groups("")  # type: ignore[union-attr]
    shown = [max(pairs) for pairs in groups] if own else firsts
    of_stock, of_ours = (" / ".join(f"{float(factor or 1) * pair[side]:{said}}" for pair in shown) for side in (0, 1))
    return "-" if own else of_stock, of_ours + unit


@dataclass(frozen=True)
class Row:
    """A row of the table. `cases`: a number for each; where one begins with `*, `, one for each family.

    `text` may name options and what was counted, in braces. What is counted may be a part and its whole, `a/b`.
    `form`: see cells(). `label`: in the plot, where a row without one is not. `sides`: whose numbers
    stand under stock and mmcache.
    """

    benchmark: str
    text: str
    cases: list[str]
    whats: list[str]
    form: str
    label: str = ""
    in_readme: bool = False
    sides: tuple[str, str] | list[str] = ("stock", "mmcache")

    @property
    def group(self) -> str:
        """Of the plot."""
        return GROUPS.get(self.form, "")

    def groups(self, found: Loaded) -> dict[str, list[Pair]]:
        """The numbers that a result has for this row, by what their cell is called; empty where it has none."""
        made: dict[str, list[Pair]] = {}
        for case in self.cases:
            named = {case: case if len(self.cases) > 1 else ""}
            if case.startswith("*, "):
                named = {case.replace("*", family, 1): name for family, name in FAMILIES.items()}
            for (pattern, name), what in ((one, what) for one in named.items() for what in self.whats):
                if pairs := list(self._pairs(found["found"], pattern, what)):
                    made[f"{name} {what}" if len(self.whats) > 1 else name] = pairs
        return made

    def _pairs(self, found: Mapping[str, Mapping[str, Mapping[str, float]]], pattern: str, what: str) -> Iterator[Pair]:
        what, _, whole = what.partition("/")
        for case, counted in found.items():
            if fnmatchcase(case, pattern) and self.sides[1] in counted.get(what, {}):
                of = counted[whole] if whole else dict.fromkeys(counted[what], 1)
                if any(of.values()):  # not a part of nothing
                    stock, ours = (counted[what].get(one, 0) / of[one] if of.get(one) else 0.0 for one in self.sides)
                    yield stock, ours

    def line(self, found: Loaded) -> str:
        """In Markdown, with the families that it is about; empty where the result says nothing of it."""
        if not (groups := self.groups(found)):
            return ""
        counted = [sides for case, sides in found["found"].items() if case in self.cases]
        values = {what: sides.get("mmcache") for one in counted for what, sides in one.items()} | dict(found["options"])
        families = " / ".join(name for name in groups if name in FAMILIES.values())
        said = self.text.format(**values) + (f", {families}" if families else "")
        return f"| {said} | {' | '.join(cells(self.form, list(groups.values())))} | `make {command(self.benchmark)}` |"

    def points(self, found: Loaded) -> Iterator[Point]:
        """Where a point stands for several cases it is the worst, by stock's."""
        if self.label and self.group:
            label = self.label.format(**found["options"])
            for name, pairs in self.groups(found).items():
                worst = max(pairs, key=lambda pair: pair[1] / pair[0] if pair[0] else 0)
                stock, ours = (1 / number for number in worst) if self.form == "rate" else map(float, worst)
                yield Point(self.group, f"{label}, {name}" if name else label, stock, ours)


class Target(NamedTuple):
    """A bound: the plugin's number of a case by another one's. Each is (case, what is counted, side).

    A case that has a `*` stands for several, of which the worst counts; without `by` the number is a ratio by itself.
    """

    text: str
    number: list[str]
    by: list[str]
    limit: float

    def ratio(self, found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> float | None:
        """What was measured, to compare with the limit; None where it was not."""
        case, what, side = self.number
        of, whole, other = self.by or (case, "", "")
        ratios = list[float]()
        for name in [name for name in found if fnmatchcase(name, case)]:
            number = found[name].get(what, {}).get(side)
            by = found.get(name if of == case else of, {}).get(whole, {}).get(other) if self.by else 1.0
            if number is not None and by:
                ratios.append(number / by)
        return max(ratios, default=None)


def spread(members: list[Any]) -> Iterator[list[Any]]:
    """Rows or targets, those that stand for several as these."""
    for member in members:
        if isinstance(member[0], str):
            yield member
            continue
        values, *several = member
        for at in range(len(next(iter(values.values())))):
            yield from json.loads(re.sub("<(.*?)>", lambda name: values[name[1]][at], json.dumps(several)))  # noqa: B023


def rows() -> Iterator[Row]:
    for name, members in CATALOGUE["rows"].items():
        for text, cases, whats, *rest in spread(members):
            more = rest.pop() if isinstance(rest[-1], dict) else {}
            listed: list[Any] = [[one] if isinstance(one, str) else one for one in (cases, whats)]
            yield Row(name, text, *listed, *rest, **more)
        yield from (
            Row(name, f"{target.text} (at most {target.limit:g})", [target.text], ["ratio"], "own .3f")
            for target in TARGETS.get(name, ())
        )


TARGETS = {name: tuple(Target(*one) for one in spread(targets)) for name, targets in CATALOGUE["targets"].items()}
"""By benchmark."""
ROWS = tuple(rows())


def add_targets(benchmark: str, result: Result) -> None:
    """Keep the ratio of each target of a benchmark, as far as it was measured."""
    for target in TARGETS.get(benchmark, ()):
        if (ratio := target.ratio(result.found)) is not None:
            result.add(target.text, "ratio", {"mmcache": ratio, "at most": target.limit})
