# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser over example records: list, detail, live update, error states, keyboard, speed, dark."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.page_app import EXAMPLES, KEY, Server, add, filled, many
from tests.system.page.conftest import ARTEFACTS
from vllm_mmcache.components.observe.record.schema import Reason

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def server() -> Iterator[Server]:
    serving = Server(filled(EXAMPLES))
    yield serving
    serving.stop()


def enter(page: "Page", server: Server) -> None:
    """By the link with the key in it, which the tab's session keeps; once live, the page has looked at its anchor."""
    from playwright.sync_api import expect

    page.goto(server.page)
    expect(page.locator("#status")).to_have_class("live")


def text(page: "Page", selector: str) -> str:
    return page.locator(selector).inner_text()


def test_list_and_totals(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    page.goto(server.page)
    expect(page.locator("#status")).to_have_class("live")
    expect(page.locator("#list li")).to_have_count(len(EXAMPLES))
    rows = page.locator("#list li").all_inner_texts()
    assert EXAMPLES[-1].request_id in rows[0]  # newest first
    assert EXAMPLES[0].request_id in rows[-1]
    reused = sum(record.reused_tokens for record in EXAMPLES)
    assert f"{reused:,}" in text(page, "#sums")
    told = text(page, "#by-reason")
    for record in EXAMPLES:
        for miss in record.misses:
            assert miss.reason.replace("_", " ") in told.lower()
    assert "tower" in text(page, "#by-tier")
    assert "reused" in text(page, "#tokens-caption")
    page.screenshot(path=ARTEFACTS / "list.png", full_page=True)

    assert text(page, "#components") == "Components on: identity; mixed: features; off: observe."
    page.click("#why summary")
    assert "features is mixed: on in worker 0; off: <b>no</b> tower (worker 1)" in text(page, "#reasons")
    assert page.locator("#reasons b").count() == 0

    page.select_option("#filter", str(Reason.EVICTED))
    assert page.locator("#list li:visible").count() == 1


def test_detail_says_every_reason(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    enter(page, server)
    for record in EXAMPLES:
        page.locator("#list a", has_text=record.request_id).click()
        expect(page.locator("#detail-title")).to_have_text(f"Request {record.id}")
        told = text(page, "#misses")
        assert all(miss.text in told for miss in record.misses)
        segments = page.locator("#bar button")
        assert segments.count() == len(record.segments)
        widths = [segments.nth(n).bounding_box()["width"] for n in range(len(record.segments))]  # type: ignore[index]
        longest = max(range(len(record.segments)), key=lambda n: record.segments[n].tokens)
        assert widths[longest] == max(widths)
        for n, segment in enumerate(record.segments):
            segments.nth(n).hover()
            hovered = text(page, "#segment")
            assert f"{segment.reused_tokens:,} of {segment.tokens:,} token" in hovered
            why = None if segment.miss is None else record.misses[segment.miss].text
            assert (why in hovered) if why else ("Not reused" not in hovered)
        # Not colour alone: a mark says the same.
        marks = [re.sub("▣", "", mark) for mark in segments.all_inner_texts()]
        assert marks == [
            "✓" if s.reused_tokens == s.tokens else "~" if s.reused_tokens else "✗" for s in record.segments
        ]
    page.screenshot(path=ARTEFACTS / "detail.png", full_page=True)


def test_keyboard_alone(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    enter(page, server)
    expect(page.locator("#list li")).to_have_count(len(EXAMPLES))
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#list') !== null"):
            break
    steps = next(n for n, record in enumerate(reversed(EXAMPLES)) if n and len(record.segments) > 1)
    for _ in range(steps):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    chosen = EXAMPLES[-1 - steps].id
    expect(page.locator("#detail-title")).to_have_text(f"Request {chosen}")
    expect(page.locator("#detail")).to_be_focused()
    page.keyboard.press("Tab")  # the button that closes
    page.keyboard.press("Tab")  # the bar
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[...document.querySelectorAll('#bar button')].indexOf(document.activeElement)") == 1
    assert page.evaluate("document.activeElement.ariaLabel") == text(page, "#segment")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    assert chosen in page.evaluate("document.activeElement.href")


def test_live_update(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    assert server.store is not None
    enter(page, server)
    expect(page.locator("#list li")).to_have_count(len(EXAMPLES))
    before = text(page, "#sums")
    add(server.store, EXAMPLES[0].model_copy(update={"id": "5f3a91c2-new", "request_id": "chatcmpl-new"}))
    expect(page.locator("#list li").first).to_contain_text("chatcmpl-new")
    expect(page.locator("#sums")).not_to_have_text(before)
    assert page.locator("#list li").count() == len(EXAMPLES) + 1


def test_server_gone_and_back(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    page.goto(server.page)
    expect(page.locator("#status")).to_have_class("live")
    server.stop()
    expect(page.locator("#status")).to_contain_text("The server does not answer")
    assert page.locator("#list li").count() == len(EXAMPLES)  # what was shown stays
    page.screenshot(path=ARTEFACTS / "gone.png")
    server.start()
    expect(page.locator("#status")).to_have_class("live")
    assert all("Failed to load resource" in problem for problem in page.problems)  # type: ignore[attr-defined]
    page.problems.clear()  # type: ignore[attr-defined]


def test_unknown_request(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    enter(page, server)
    page.goto(f"{server.url}/mmcache#chatcmpl-<b>none</b>")
    expect(page.locator("#facts")).to_contain_text("no record 'chatcmpl-<b>none</b>'")
    assert page.locator("#facts b").count() == 0


@pytest.mark.parametrize("anchor", ["%", "%E0%A4%A", "%00%", "%%%"])
def test_anchors_that_are_none(server: Server, page: "Page", anchor: str) -> None:
    """They are left alone: the page goes on with what it does."""
    from playwright.sync_api import expect

    enter(page, server)
    for leave in (True, False):
        if leave:  # at the first look, and while the page is open
            page.goto("about:blank")
        page.goto(f"{server.url}/mmcache#{anchor}")
        expect(page.locator("#status")).to_have_class("live")
        expect(page.locator("#detail")).to_be_hidden()
    assert server.store is not None
    add(server.store, EXAMPLES[0].model_copy(update={"id": "5f3a91c2-new", "request_id": "chatcmpl-new"}))
    expect(page.locator("#list li").first).to_contain_text("chatcmpl-new")


def test_an_id_that_a_client_chose(server: Server, page: "Page") -> None:
    """Of a record or of requests; the newest of those that carry it is shown, and that there are others."""
    from playwright.sync_api import expect

    assert server.store is not None
    for number in (98, 99):
        add(server.store, EXAMPLES[0].model_copy(update={"id": f"5f3a91c2-{number}", "request_id": "chatcmpl-mine"}))
    enter(page, server)
    page.goto(f"{server.url}/mmcache#chatcmpl-mine")
    expect(page.locator("#detail-title")).to_have_text("Request 5f3a91c2-99")
    expect(page.locator("#facts")).to_contain_text("2 requests carry the id that was asked for; this is the newest")
    page.fill("#find", "-mine")
    expect(page.locator("#count")).to_have_text(f"2 requests of {len(EXAMPLES) + 2}")
    page.fill("#find", "5f3a91c2-98")
    expect(page.locator("#count")).to_have_text(f"1 request of {len(EXAMPLES) + 2}")


def test_nothing_is_recorded(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    server.store = None
    page.goto(server.page)
    expect(page.locator("#status")).to_contain_text("nothing is recorded")
    expect(page.locator("#components")).to_contain_text("mixed: features")  # said all the same
    page.close()  # asks no more
    page.problems.clear()  # type: ignore[attr-defined]


def test_key(page: "Page") -> None:
    from playwright.sync_api import expect

    serving = Server(filled(EXAMPLES))
    page.goto(f"{serving.url}/mmcache")
    expect(page.locator("#key")).to_be_focused()
    assert page.locator("#list li").count() == 0
    page.keyboard.type("another key")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("The admin key is wrong.")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#list li")).to_have_count(len(EXAMPLES))
    expect(page.locator("#key-form")).to_be_hidden()
    page.problems.clear()  # type: ignore[attr-defined]
    page.close()
    serving.stop()


def test_the_key_in_a_link(server: Server, page: "Page") -> None:
    """It opens the page, does not stay in the address, and reaches the server in no address."""
    from playwright.sync_api import expect

    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.url}/mmcache/#key={KEY}")  # through the redirect
    expect(page.locator("#list li")).to_have_count(len(EXAMPLES))
    assert KEY not in page.url
    page.reload()
    expect(page.locator("#list li")).to_have_count(len(EXAMPLES))
    assert not [url for url in asked if KEY in url.partition("#")[0]]
    page.evaluate("sessionStorage.setItem('mmcache-key', 'another')")
    page.reload()
    expect(page.locator("#key")).to_be_focused()
    page.goto(server.page)  # in the same tab
    expect(page.locator("#list li")).to_have_count(len(EXAMPLES))
    page.problems.clear()  # type: ignore[attr-defined]  # the 401


def test_without_an_admin_key(page: "Page") -> None:
    from playwright.sync_api import expect

    serving = Server(filled(EXAMPLES), None)
    page.goto(f"{serving.url}/mmcache")
    expect(page.locator("#status")).to_contain_text("MMCACHE_ADMIN_KEY")
    assert page.locator("#list li").count() == 0
    page.close()
    page.problems.clear()  # type: ignore[attr-defined]
    serving.stop()


def test_a_thousand_requests(page: "Page") -> None:
    from playwright.sync_api import expect

    serving = Server(filled(many(1000)))
    page.goto(serving.page)
    expect(page.locator("#list li")).to_have_count(1000)
    painted_ms = page.evaluate(
        """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({
             first: performance.getEntriesByName('first-contentful-paint')[0].startTime, all: performance.now()}))))"""
    )
    page.screenshot(path=ARTEFACTS / "thousand.png")
    print(f"first paint {painted_ms['first']:.0f} ms, all rows {painted_ms['all']:.0f} ms")
    (ARTEFACTS / "thousand.txt").write_text(f"{painted_ms}\n")
    assert 0 < painted_ms["first"] < painted_ms["all"]  # the target is 1,000 ms; times are reported, not asserted
    assert serving.store is not None
    add(serving.store, EXAMPLES[0].model_copy(update={"id": "5f3a91c2-new", "request_id": "chatcmpl-new"}))
    expect(page.locator("#list li").first).to_contain_text("chatcmpl-new")
    assert page.locator("#list li").count() == 1000  # the oldest goes
    page.close()  # first: a page that is open asks a server that is gone, and says so
    serving.stop()


def test_dark_room(browser: "Browser", server: Server) -> None:
    """Light text on dark paper, with the contrast that WCAG AA asks for."""
    from playwright.sync_api import expect

    for scheme in ("dark", "light"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(server.page)
        expect(page.locator("#status")).to_have_class("live")
        page.goto(f"{server.url}/mmcache#{EXAMPLES[2].id}")
        expect(page.locator("#bar button").first).to_be_visible()
        for selector in ("body", ".hint", "#list a", "#segment", "#misses strong"):
            ink, paper = page.evaluate(
                """selector => { let e = document.querySelector(selector); const ink = getComputedStyle(e).color;
                   while (e && getComputedStyle(e).backgroundColor === 'rgba(0, 0, 0, 0)') e = e.parentElement;
                   return [ink, getComputedStyle(e ?? document.body).backgroundColor] }""",
                selector,
            )
            assert contrast(ink, paper) >= 4.5, (scheme, selector)
            assert (luminance(ink) > luminance(paper)) == (scheme == "dark")
        page.screenshot(path=ARTEFACTS / f"{scheme}.png", full_page=True)
        page.close()


PHONE = {"width": 390, "height": 844}
# What does not fit where it stands: on the page as a whole, or a text that is cut off.
CUT_OFF = """() => [...document.querySelectorAll("body *")].filter((e) => {
  const style = getComputedStyle(e);
  const scrolls = style.overflowX === "auto" || style.overflowY === "auto";
  const outside = e.getBoundingClientRect().right > innerWidth + 1 && !e.closest("#bar, .scroll");
  const looked_at = e.checkVisibility() && !e.closest("button") && !scrolls && style.display !== "inline";
  return looked_at && (outside || e.scrollWidth > e.clientWidth + 1);
}).map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)"""


def test_nothing_is_cut_off(server: Server, page: "Page") -> None:
    """On a phone and on a desktop, in the list and in a record of as many segments as a long conversation has."""
    from playwright.sync_api import expect

    assert server.store is not None
    parts = [part for example in EXAMPLES for part in example.segments if part.miss is None] * 3
    long = EXAMPLES[0].model_copy(
        update={"id": "5f3a91c2-long", "request_id": "chatcmpl-8f2116f2edadcaf1", "segments": tuple(parts)}
    )
    add(server.store, long)
    for size in (PHONE, {"width": 1280, "height": 900}):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        enter(page, server)
        expect(page.locator("#list li")).to_have_count(len(EXAMPLES) + 1)
        assert page.evaluate(CUT_OFF) == []
        page.locator("#list a", has_text=long.request_id).click()
        expect(page.locator("#bar button")).to_have_count(len(parts))
        assert page.evaluate(CUT_OFF) == []
        assert page.locator("#list .why:visible").count() == len(EXAMPLES) + 1
        page.screenshot(path=ARTEFACTS / f"{size['width']}.png", full_page=True)
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    for selector, name, value in (
        ("#list a", "grid-template-columns", "2rem 2rem 2rem"),
        ("#segment", "width", "40rem"),
    ):
        page.locator(selector).first.evaluate("(e, [name, value]) => e.style.setProperty(name, value)", [name, value])
        assert page.evaluate(CUT_OFF) != [], "negative control"
        page.locator(selector).first.evaluate("(e, name) => e.style.removeProperty(name)", name)
    assert page.evaluate(CUT_OFF) == []


def test_words_are_explained(server: Server, page: "Page") -> None:
    enter(page, server)
    page.click("#words summary")
    told = text(page, "#meanings")
    for meaning in ("the vision tower computed the features", "only whole blocks are kept"):
        assert meaning in told
    labels = set(page.locator("#overview .shares li > span:first-child").all_inner_texts())
    assert labels - set(page.locator("#meanings dt").all_inner_texts()) == {"reused"}  # which says itself


def test_charts_can_be_told_from_the_paper(browser: "Browser", server: Server) -> None:
    """Each colour of a chart, with the contrast that WCAG asks of graphics."""
    from playwright.sync_api import expect

    for scheme in ("dark", "light"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(server.page)
        expect(page.locator("#status")).to_have_class("live")
        paper, *colours = page.evaluate(
            """() => [document.body, ...Array.from({length: 8}, (_, n) => {
                 const e = document.createElement("i"); e.className = `c${n}`; return document.body.appendChild(e) })
               ].map((e) => getComputedStyle(e).backgroundColor)"""
        )
        assert len(set(colours)) == 8
        assert [colour for colour in colours if contrast(colour, paper) < 3] == [], scheme
        page.close()
    assert contrast("rgb(168, 50, 126)", "rgb(20, 23, 28)") < 3, "light's colours would be too dark there"


def luminance(colour: str) -> float:
    """WCAG's relative luminance of `rgb(r, g, b)`."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
