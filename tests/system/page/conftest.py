# SPDX-License-Identifier: Apache-2.0
"""A browser for the tests of the page: Debian's chromium, started once.

Without one the tests are skipped with a reason, except where CI=1 says that they must run.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARTEFACTS = Path(__file__).parents[3] / ".artifacts" / "page"
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Its path."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        why = "no chromium on PATH: the page's tests in a browser are left out (as root: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator["Browser"]:
    """Chromium without a window.

    For one file at a time: as long as it is there, Playwright has an event loop in this thread, and asyncio.run fails.
    """
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # the machine may be busy; what comes never is told after a minute
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Containers have no user namespaces for chromium's own sandbox; the pages are ours.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A fresh tab; whatever it logs as an error fails the test, unless the test has taken it from `page.problems`."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, locale="en-GB", timezone_id="UTC")
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    outside: list[str] = []
    tab.on("request", lambda request: outside.append(request.url) if "127.0.0.1" not in request.url else None)
    tab.problems = problems  # type: ignore[attr-defined]
    yield tab
    context.close()
    assert problems == []
    assert [url for url in outside if not url.startswith("data:")] == []
