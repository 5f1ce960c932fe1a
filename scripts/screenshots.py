# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the page /mmcache that are in docs/images, and checks the Grafana dashboard on the way.

    python -m scripts.screenshots [--seconds 60]

Serves a tiny model of the zoo with random weights, so what is answered means nothing, and puts the load of a few
clients on it: agents whose conversations grow by screenshots, second questions, and tenants with images of their own. A
real Prometheus reads its metrics meanwhile. Exit code 1 if a query of docs/grafana.json fails or a panel is empty.
"""

import argparse
import contextlib
import io
import itertools
import json
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from mmcache_tools.harness.server import Server
from mmcache_tools.zoo import build_cached
from PIL import Image

from benchmarks.pictures import url_of
from benchmarks.screenshots import Page, Screenshot, browser_path, screenshot
from benchmarks.servers import ask, request, zoo_server
from benchmarks.workloads import PAGES, sent
from scripts.dashboard import DASHBOARD, problems_left, prometheus

REPO = Path(__file__).parents[1]
IMAGES = REPO / "docs" / "images"
MOST_BYTES = 200_000
COLOURS = 256
MOST_IMAGES = 8
SIZE = (768, 576)  # 432 tokens of Qwen3-VL
TURNS = 4
PICTURES = 40  # of each page, before they come again
PAUSE_S = 0.3
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SYSTEM = {"role": "system", "content": "You use a computer for somebody else. Say what to click next. " * 12}


@contextlib.contextmanager
def observed_server(folder: Path) -> Iterator[tuple[Server, str]]:
    """A server of a tiny model with the page, the audit and a store below `folder`, and the admin key of its page."""
    key = secrets.token_hex(16)
    # The audit takes each request that it has time for: of a minute's, one in a thousand would be none.
    audit = {"MMCACHE_AUDIT": "1", "MMCACHE_AUDIT_TIME": "1"}
    env = {"MMCACHE_STORE": str(folder / "store"), "MMCACHE_ADMIN_KEY": key, **audit}
    model = build_cached("qwen3-vl", folder / "zoo")
    with zoo_server(model, "mmcache", images=MOST_IMAGES, args=("--observe",), env=env) as server:
        yield server, key


def load(url: str, seconds: float) -> None:
    """Two agents and a reader of photographs at once, for that long; each ends what it has begun."""
    for page, number in itertools.product(PAGES, range(PICTURES)):
        screenshot(Screenshot(page, SIZE, "png"), number)  # the browser draws it now: no client waits for it
    end = time.monotonic() + seconds
    with ThreadPoolExecutor() as pool:
        clients = [
            pool.submit(_agent, url, "form", "tenant-1", end),
            pool.submit(_agent, url, "text", "tenant-2", end),
            pool.submit(_reader, url, "tenant-3", end),
        ]
        for client in clients:
            client.result()


def _agent(url: str, page: Page, tenant: str, end: float) -> None:
    """Conversations that grow by a screenshot a turn, each with a second look at its last screenshots behind it."""
    steps = itertools.cycle(range(PICTURES))
    while True:
        talk, screens = [SYSTEM, sent(f"Book a room for {next(steps)} nights.")], list[str]()
        for _ in range(TURNS):
            screens.append(url_of(Screenshot(page, SIZE, "png"), next(steps)))
            talk.append(sent("This is the screen now.", screens[-1], "What is to be clicked?"))
            talk.append({"role": "assistant", "content": _said(url, tenant, talk)})
        _said(url, tenant, [*talk[:-2], sent("The screen again:", screens[-1], "Is it the right page?")])
        _said(url, tenant, [sent("What is different?", *screens[-2:])])
        if time.monotonic() > end:
            return


def _reader(url: str, tenant: str, end: float) -> None:
    """Two questions about each photograph, now and then one about a screenshot that another tenant has sent, too."""
    for number in itertools.cycle(range(PICTURES)):
        page: Page = "form" if number % 3 == 2 else "photographs"
        shown = url_of(Screenshot(page, SIZE, "png"), number)
        for question in ("What is this?", "Which colours are there?"):
            _said(url, tenant, [SYSTEM, sent(shown, question)])
        if time.monotonic() > end:
            return


def _said(url: str, tenant: str, talk: list[dict[str, Any]]) -> str:
    """The answer; after it the client thinks for a moment, in which the engine may have nothing to do."""
    body = json.dumps(request(talk, max_tokens=8, cache_salt=tenant)).encode()
    answer = ask(url, [body]).text
    time.sleep(PAUSE_S)
    return answer


def pictures() -> dict[str, tuple[str, str, Literal["light", "dark"]]]:
    """Name of each picture -> what it shows, for which device and which colours."""
    kinds = itertools.product(("overview", "request"), SIZES, SCHEMES)
    return {f"page-{what}-{device}-{scheme}.png": (what, device, scheme) for what, device, scheme in kinds}


def take(url: str, key: str, folder: Path) -> list[Path]:
    """Take the pictures: the page from top to bottom, or the record of one request."""
    from playwright.sync_api import sync_playwright

    shown = instructive(url, key)
    with sync_playwright() as playwright:
        # Containers have no user namespaces for chromium's own sandbox; the page is ours.
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for name, (what, device, scheme) in pictures().items():
            width, height = SIZES[device]
            tab = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-GB", timezone_id="UTC"
            )
            tab.goto(f"{url}/mmcache#key={key}")
            tab.wait_for_selector("#status.live")
            tab.wait_for_selector("#list li")
            if what == "request":
                tab.goto(f"{url}/mmcache#{shown}")
                tab.wait_for_selector("#bar button")
                content = tab.locator("#detail").screenshot(animations="disabled")
            else:
                content = tab.screenshot(animations="disabled", full_page=True)
            # A palette needs a third of the bytes; chosen so, it keeps also those colours of which there is little.
            picture = Image.open(io.BytesIO(content)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
            picture.save(folder / name, optimize=True)
            tab.close()
        browser.close()
    return [folder / name for name in pictures()]


def instructive(url: str, key: str) -> str:
    """The id of a request that shows much at once: a few images, and most reasons why something was not reused."""
    asked = urllib.request.Request(
        f"{url}/mmcache/records?full=1&limit=1000", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        records = json.load(answer)["records"]

    def worth(record: dict[str, Any]) -> tuple[bool, int]:
        images = sum(segment["kind"] == "image" for segment in record["segments"])
        return 2 <= images <= 3, len({miss["reason"] for miss in record["misses"]})

    return str(max(records, key=worth)["id"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long the load is put on the server (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where the pictures go (docs/images)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        observed_server(Path(folder)) as (server, key),
        prometheus(server.url) as metrics,
    ):
        load(server.url, options.seconds)
        wrong = problems_left(metrics, json.loads(DASHBOARD.read_text()))
        taken = take(server.url, key, options.folder)
    for path in taken:
        size = path.stat().st_size
        print(f"{path.name}: {size} bytes")
        if size > MOST_BYTES:
            wrong.append(f"{path.name} is larger than {MOST_BYTES} bytes")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
