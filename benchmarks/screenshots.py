# SPDX-License-Identifier: Apache-2.0
"""Screenshots of small pages by a real browser, as an agent takes them: Playwright's own bytes, PNG or JPEG.

    python -m benchmarks.screenshots FOLDER PAGE WIDTH HEIGHT png|jpeg NUMBER ...

Number n shows step n of an agent's work: scrolled further, and with more typed in. The pages lie in pages/; their fonts
are Matplotlib's, their photographs those of scikit-image, so a browser of one version draws the same on each machine.
What was rendered is kept in .artifacts/screenshots, by the pages and the version of the browser. Rendering has a
process of its own: Playwright keeps an event loop in the thread that uses it.
"""

import functools
import hashlib
import mimetypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.results import ROOT

FOLDER = ROOT / ".artifacts" / "screenshots"
PAGES = Path(__file__).parent / "pages"
FIND = ROOT / "scripts" / "find_chromium"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # those of scripts/find_chromium
JPEG_QUALITY = 85
AT_ONCE = 20  # are rendered where one is missing: most of the time is the browser's start
TIMEOUT_S = 300


Page = Literal["text", "photographs", "form"]
Format = Literal["png", "jpeg"]


class Screenshot(NamedTuple):
    """One kind of screenshot. Units: size is (width, height) in pixels."""

    page: Page
    size: tuple[int, int]
    format: Format

    @property
    def mime(self) -> str:
        return f"image/{self.format}"

    @property
    def name(self) -> str:
        return f"{self.page}-{self.size[0]}x{self.size[1]}"


def screenshot(kind: Screenshot, number: int) -> bytes:
    """The file of step `number`. Raises: RuntimeError where no browser is installed, or where it fails."""
    path = _path(kind, number)
    if not path.exists():
        first = number // AT_ONCE * AT_ONCE
        missing = [str(one) for one in range(first, first + AT_ONCE) if not _path(kind, one).exists()]
        command = [sys.executable, "-m", "benchmarks.screenshots", str(path.parent), kind.page]
        command += [*map(str, kind.size), kind.format]
        done = subprocess.run([*command, *missing], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"no screenshot of {kind.name}: {done.stderr[-2000:]}")
    return path.read_bytes()


def render(kind: Screenshot, numbers: Iterable[int], folder: Path) -> None:
    """Write those screenshots of one kind."""
    folder.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import Route, sync_playwright

    def answer(route: Route) -> None:
        name = route.request.url.partition("//")[2].partition("/")[2].partition("?")[0]
        if (path := _files().get(name)) is None:
            route.fulfill(status=404)
        else:
            route.fulfill(body=path.read_bytes(), content_type=mimetypes.guess_type(path.name)[0] or "font/ttf")

    with sync_playwright() as playwright:
        # Containers have no user namespaces for chromium's own sandbox; the pages are ours.
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        width, height = kind.size
        context = browser.new_context(viewport={"width": width, "height": height}, locale="en-GB", timezone_id="UTC")
        tab = context.new_page()
        tab.route("**/*", answer)
        for number in numbers:
            tab.goto(f"http://pages/{kind.page}.html?step={number}", wait_until="load")
            tab.evaluate("document.fonts.ready")
            quality = JPEG_QUALITY if kind.format == "jpeg" else None
            content = tab.screenshot(type=kind.format, quality=quality, animations="disabled")
            path = folder / f"{number}.{kind.format}"
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(content)
            part.replace(path)
        browser.close()


def version() -> str:
    """Names what the screenshots are made of: the pages, their fonts and photographs, and the browser's version."""
    return _version(browser_path())


@functools.cache
def _version(browser: str) -> str:
    said = subprocess.run([browser, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    digest = hashlib.sha256(f"{said} {JPEG_QUALITY}".encode())
    for name, path in sorted(_files().items()):
        digest.update(name.encode() + path.read_bytes())
    return f"{said}, {digest.hexdigest()[:12]}"


def browser_path() -> str:
    """The browser that is there, or that root has installed now. Raises: RuntimeError where there is none."""
    path = _on_path()
    if path is None:
        subprocess.run([FIND], check=False)
        path = _on_path()
    if path is None:
        raise RuntimeError("no browser for the screenshots: install chromium (scripts/find_chromium, as root)")
    return path


def _on_path() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@functools.cache
def _files() -> dict[str, Path]:
    """All that a page may ask for, by its name there."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = {path.name: path for path in PAGES.iterdir() if path.is_file()}
    found |= {
        f"fonts/{name}.ttf": fonts / f"{name}.ttf" for name in ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono")
    }
    return found | {f"photographs/{path.name}": path for path in photographs()}


@functools.cache
def photographs() -> list[Path]:
    """Real photographs, which the package scikit-image brings.

    CC0 or in the public domain, as skimage/data/_fetchers.py says of each: NASA's astronaut and Hubble's deep field, a
    rocket's start (SpaceX), a cat (Stefan van der Walt) and a cup of coffee (Rachel Michetti).
    """
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    names = ("astronaut.png", "hubble_deep_field.jpg", "rocket.jpg", "chelsea.png", "coffee.png")
    return [folder / name for name in names]


def _path(kind: Screenshot, number: int) -> Path:
    return FOLDER / version().rpartition(" ")[2] / kind.name / f"{number}.{kind.format}"


if __name__ == "__main__":
    folder, page, width, height, form, *numbers = sys.argv[1:]
    render(Screenshot(page, (int(width), int(height)), form), map(int, numbers), Path(folder))  # type: ignore[arg-type]
