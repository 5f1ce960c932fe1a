# SPDX-License-Identifier: Apache-2.0
"""An estimate as one HTML page that asks nothing of any server, with a plot of how large the store should be.

Whatever comes out of a log is escaped. The page follows the reader's choice of light or dark.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from vllm_mmcache.traffic import report
from vllm_mmcache.traffic.report import Result

WIDTH, HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 44
MARGIN = 1.05
"""How far the plot goes, by the size at which the curve ends."""
PLOT_TITLE = "Share of features that are not stored, by the size of the store"
_MARKS = 4
"""Labels of an axis, besides that of its start."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1c20; --paper: #fff; --faint: #6b7280; --rule: #d7dae0; --line: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --paper: #15171b; --faint: #9aa1ac; --rule: #353a43; --line: #6db1ff; }
}
body { margin: 0 auto; max-width: 46rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-weight: 600; border-left: 4px solid var(--line); padding-left: .75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: normal; }
svg { width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 14px; }
svg .grid { stroke: var(--rule); } svg .curve { stroke: var(--line); stroke-width: 2; fill: none; }
svg .chosen { stroke: var(--ink); stroke-dasharray: 5 4; }
li { margin: .25rem 0; } footer { color: var(--faint); margin-top: 2rem; }
"""


def page(result: Result) -> str:
    """The whole page: verdict, what was read, what each side does, the plot, and what it all rests on."""
    return "\n".join(_page(result))


def _page(result: Result) -> Iterator[str]:
    estimate = result.estimate
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>mmcache estimate</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield "<h1>What vllm-mmcache would save</h1>"
    yield f'<p class="verdict">{escape(report.verdict(estimate))}</p>'
    yield from (f"<p>{escape(line)}</p>" for line in report.summary(result))
    if estimate.seen.images:
        yield "<h2>Images</h2>"
        rows = ((what, [f"{number:,}", f"{share:.0%}"]) for what, number, share in report.repeats(estimate))
        yield from _table(["", "images", "share"], rows)
        yield f"<p>{escape(_sentence(report.grown(estimate)))}</p>"
        yield "<h2>What each side does</h2>"
        yield from _table(["", *(report.NAMES[side] for side in result.sides)], report.work(result))
    if result.recorded.missed_tokens:
        yield "<h2>Why the server that recorded computed tokens of prompts</h2>"
        rows = (
            (reason, [f"{tokens:,}", f"{tokens / result.recorded.prompt_tokens:.0%}"])
            for reason, tokens in result.recorded.missed_tokens.most_common()
        )
        yield from _table(["reason", "tokens", "of all"], rows)
    if estimate.distances.needed:
        yield "<h2>How large the store should be</h2>"
        yield plot(estimate.distances.curve(), estimate.sizes.feature_bytes)
        yield f"<p>{escape(_sentence(report.to_keep(estimate)))}</p>"
    yield "<h2>What was assumed</h2>"
    yield from _list(report.assumptions(result))
    if unknown := list(report.limits(result)):
        yield "<h2>What the records do not say</h2>"
        yield from _list(unknown)
    yield "<footer>Made by mmcache estimate. Nothing of a request is in this page but counts.</footer>"
    yield "</body>\n</html>\n"


def plot(curve: Sequence[tuple[float, float]], chosen_bytes: float) -> str:
    """The share of features that a store of a size lacks, as SVG; chosen_bytes is marked where it lies in the plot."""
    most_bytes = curve[-1][0] * MARGIN
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(size: float, share: float) -> tuple[float, float]:
        return round(_LEFT + wide * size / most_bytes, 1), round(_TOP + high * (1 - share), 1)

    end_x, bottom = place(most_bytes, 0)
    parts = []
    for number in range(_MARKS + 1):
        x, y = place(most_bytes * number / _MARKS, number / _MARKS)
        size = report.shown(most_bytes * number / _MARKS)
        anchor = "end" if number == _MARKS else "middle"
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{end_x}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{number / _MARKS:.0%}</text>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="{anchor}">{size}</text>')
    x, y = place(*curve[0])
    path = f"M{x} {y}"
    for point in curve[1:]:
        x, y = place(*point)
        path += f"H{x}V{y}"
    parts.append(f'<path class="curve" d="{path}H{end_x}"/>')
    if chosen_bytes <= most_bytes:
        x, _ = place(chosen_bytes, 0)
        parts.append(f'<line class="chosen" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text x="{x + 6}" y="{_TOP + 12}">--features</text>')
    middle = _LEFT + wide / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">size of the store</text>')
    return (
        f'<figure style="margin:0"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{PLOT_TITLE}">'
        f"{''.join(parts)}</svg><figcaption>{PLOT_TITLE}.</figcaption></figure>"
    )


def _table(head: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    yield '<div class="scroll"><table>'
    yield "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
    for name, cells in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (name, *cells)) + "</tr>"
    yield "</table></div>"


def _list(sentences: Iterable[str]) -> Iterator[str]:
    yield "<ul>" + "".join(f"<li>{escape(one)}</li>" for one in sentences) + "</ul>"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
