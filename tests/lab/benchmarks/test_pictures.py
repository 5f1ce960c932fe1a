# SPDX-License-Identifier: Apache-2.0
"""Pictures are the same in every run, each shows something else, and screenshots are a browser's."""

import io
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import screenshots
from benchmarks.pictures import PHOTOGRAPH, SMALL, Pictured, picture, url_of, variant
from benchmarks.screenshots import BROWSERS, Screenshot, screenshot
from benchmarks.server_scenarios import PICTURES
from benchmarks.workloads import PAGES


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for screenshots; without a browser the test is skipped, except where CI=1."""
    if not any(map(shutil.which, BROWSERS)):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no browser on PATH: run scripts/find_chromium")
    monkeypatch.setattr(screenshots, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "kind", [SMALL, PHOTOGRAPH, PHOTOGRAPH._replace(size=(320, 192))], ids=["noise", "photo", "size"]
)
def test_each_number_shows_something_else(kind: Pictured) -> None:
    files = [picture(kind, number) for number in range(12)]
    assert files == [picture(kind, number) for number in range(12)], "the same in every run"
    assert len({pixels(one).tobytes() for one in files}) == 12, "and not by its bytes alone"
    if kind.size:
        assert {Image.open(io.BytesIO(one)).size for one in files} == {kind.size}
    assert url_of(kind, 0).startswith(f"data:{kind.mime};base64,")
    assert (pixels(variant(files[0], "again")) == pixels(files[0])).all()


@pytest.mark.process
def test_screenshots_are_those_of_a_browser(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps differ in what they show, pages in how well they compress, and what was rendered is not rendered again."""
    monkeypatch.setattr(screenshots, "AT_ONCE", 2)
    found = {page: [screenshot(Screenshot(page, (640, 360), "png"), step) for step in (0, 1)] for page in PAGES}
    for first, second in found.values():
        assert pixels(first).shape == (360, 640, 3)
        assert (pixels(first) != pixels(second)).any()
    assert len(found["photographs"][0]) > 2 * len(found["text"][0]) > 4 * len(found["form"][0])
    assert (pixels(found["form"][0]) > 250).mean() > 0.9, "mostly white"
    files = list(kept.rglob("*.png"))
    assert len(files) == 6
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("rendered again"))
    assert screenshot(Screenshot("text", (640, 360), "png"), 1) == found["text"][1]


@pytest.mark.process
def test_a_browser_that_fails_is_told(kept: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)no screenshot of lost-8x8: .*lost\.html"):
        screenshot(Screenshot("lost", (8, 8), "png"), 0)  # type: ignore[arg-type]
    assert not list(kept.rglob("*.png"))


@pytest.mark.process
def test_a_browser_is_installed_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the script that knows how; where it can't, the benchmark says what is missing."""
    name = "browser-of-this-test"
    installs = tmp_path / "installs"
    installs.write_text(f"#!/bin/sh\ncp /bin/true {tmp_path}/{name}\n")
    installs.chmod(0o755)
    monkeypatch.setattr(screenshots, "BROWSERS", (name,))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(screenshots, "FIND", "/bin/true")
    with pytest.raises(RuntimeError, match="no browser for the screenshots: install chromium"):
        screenshots.browser_path()
    monkeypatch.setattr(screenshots, "FIND", installs)
    assert screenshots.browser_path() == str(tmp_path / name)


def test_every_page_is_measured() -> None:
    pages = {one.page for one in PICTURES.values() if isinstance(one, Screenshot)}
    assert pages == set(PAGES) == {path.stem for path in screenshots.PAGES.glob("*.html")}
