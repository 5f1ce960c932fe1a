# SPDX-License-Identifier: Apache-2.0
"""The page of an estimate: whole, of its own, for every screen, and with a plot that says what the numbers say."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.unit.traffic.logs import chat, image, text, user
from tests.unit.traffic.test_estimate import FULL, ROOMY, conversation, played
from tests.unit.traffic.test_records import AGENT, recorded
from vllm_mmcache.cli import app
from vllm_mmcache.traffic import page, report
from vllm_mmcache.traffic.estimate import Distances
from vllm_mmcache.traffic.records import Recorded
from vllm_mmcache.traffic.report import Result, Speeds

TWICE = [chat(user(text(f"{turn}"), image(number))) for turn, number in product(range(2), range(4))]
STORED = replace(ROOMY, encoder_tokens=1)
"""vLLM's encoder cache holds no image, so that the store is asked."""
VOID = {"meta", "br", "hr", "img", "link"}


class Tags(HTMLParser):
    """Whether all that is opened is closed; and what asks for something from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe") or {"src", "href", "style"} & dict(attrs).keys() - {"style"}:
            self.asks.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def looked_at(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


def test_all_that_the_text_says_is_there() -> None:
    result = Result(played(TWICE), Counter({"not JSON": 2}), speeds=Speeds(100.0, 1000.0))
    html = page.page(result)
    looked_at(html)
    said = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).replace("&#x27;", "'")
    assert report.verdict(result.estimate) in said
    assert all(one in said for one in report.assumptions(result))
    assert "2 lines (not JSON: 2)" in said
    for what, numbers in report.work(result):
        assert " ".join([what, *numbers]) in said


def test_records_are_said_to_be_such(tmp_path: Path) -> None:
    estimate, log = recorded(tmp_path / "records", AGENT)
    html = page.page(Result(estimate, recorded=log.recorded))
    looked_at(html)
    assert "<td>new_content</td>" in html
    assert "What the records do not say" in html
    assert "recorded" not in page.page(Result(played(AGENT)))


def test_nothing_is_asked_of_any_server() -> None:
    html = page.page(Result(played(TWICE)))
    assert looked_at(html).asks == []
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|url\(|@import", html)
    assert looked_at(html.replace("</body>", '<img src="https://example.com/a"></body>')).asks == ["img"]


def test_every_screen() -> None:
    html = page.page(Result(played(TWICE, sizes=STORED)))
    assert 'name="viewport" content="width=device-width' in html
    assert "prefers-color-scheme: dark" in html
    assert f'viewBox="0 0 {page.WIDTH} {page.HEIGHT}"' in html


def test_what_a_log_says_is_escaped() -> None:
    recorded = Recorded(requests=1, prompt_tokens=5)
    recorded.models["<script>alert(1)</script>"] += 1
    recorded.missed_tokens["<b>"] += 5
    html = page.page(Result(played(TWICE), Counter({"<i>": 1}), recorded))
    looked_at(html)
    assert "&lt;script&gt;" in html
    assert not re.search("<script|<b>|<i>", html)


@pytest.mark.parametrize("requests", [[], [chat(user(text("a")))], conversation(1)], ids=["none", "texts", "one"])
def test_there_may_be_little_to_say(requests: list[dict[str, object]]) -> None:
    html = page.page(Result(played(requests)))
    looked_at(html)
    assert "<svg" not in html


def points(svg: str) -> list[tuple[float, float]]:
    """Of a curve: where its steps end."""
    found = re.search(r'class="curve" d="M([\d.]+) ([\d.]+)((?:H[\d.]+V[\d.]+)*)H', svg)
    assert found
    steps = re.findall(r"H([\d.]+)V([\d.]+)", found[3])
    return [(float(x), float(y)) for x, y in [(found[1], found[2]), *steps]]


def test_the_plot_falls_where_the_curve_falls() -> None:
    curve = [(0.0, 1.0), (50.0, 0.75), (100.0, 0.5)]
    svg = page.plot(curve, 1e9)
    figure = ElementTree.fromstring(svg)
    assert figure.tag == "figure"
    drawn = points(svg)
    assert len(drawn) == 3
    assert all(left < right and high < low for (left, high), (right, low) in pairwise(drawn))
    assert drawn[1][0] - drawn[0][0] == pytest.approx(drawn[2][0] - drawn[1][0], abs=0.2)
    assert drawn[2][1] - drawn[0][1] == pytest.approx((page.HEIGHT - 60) / 2, abs=0.2)
    assert 'class="chosen"' not in svg
    assert 'class="chosen"' in page.plot(curve, 70.0)


def test_the_curve_is_that_of_a_cache() -> None:
    estimate = played(TWICE, sizes=STORED)
    size = 10 * FULL.feature_bytes
    assert estimate.distances.curve() == [(0.0, 1.0), (4.0 * size, 0.5)]
    assert Distances().curve() == []
    distances = Distances()
    for number in range(1000):
        distances.use(number % 37, 1 + number % 3)
        distances.use(0, 1)
    curve = distances.curve(10)
    assert 2 < len(curve) <= 11
    assert all(a < b and lost > kept for (a, lost), (b, kept) in pairwise(curve))
    assert curve[-1] == (max(distances.needed), pytest.approx(1 - len(distances.needed) / 2000))


def test_the_command_writes_it(tmp_path: Path) -> None:
    log, html = tmp_path / "log.jsonl", tmp_path / "page.html"
    log.write_text(json.dumps(TWICE[0]))
    done = CliRunner().invoke(app, ["estimate", str(log), "--html", str(html), "--json"])
    assert done.exit_code == 0
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    failed = CliRunner().invoke(app, ["estimate", str(log), "--html", str(tmp_path / "none" / "page.html")])
    assert "can't be written" in str(failed.exception)
