# SPDX-License-Identifier: Apache-2.0
"""The plot of `mmcache estimate --png`. Matplotlib looks for the machine's fonts when it is used for the first time."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.unit.traffic.test_page import TWICE
from vllm_mmcache.cli import app
from vllm_mmcache.traffic import png

pytestmark = pytest.mark.process


def test_a_png_where_matplotlib_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, plot = tmp_path / "log.jsonl", tmp_path / "plot.png"
    log.write_text("\n".join(map(json.dumps, TWICE)))
    asked = ["estimate", str(log), "--encoder-tokens", "1", "--png", str(plot)]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, done.exception) == (0, None)
    with Image.open(plot) as drawn:
        colours = drawn.convert("RGB").getcolors(100_000)
    assert colours is not None
    assert len(colours) > 10, "more than a white page"
    where = str(tmp_path / "none" / "plot.png")
    assert "can't be written" in str(CliRunner().invoke(app, [*asked[:-1], where]).exception)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in str(CliRunner().invoke(app, asked).exception)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    without = CliRunner().invoke(app, asked)
    assert ("pip install matplotlib" in str(without.exception), without.stdout) == (True, ""), "before anything is read"


def test_no_png_without_images(tmp_path: Path) -> None:
    """The rest of the answer comes all the same."""
    (tmp_path / "log").write_text(json.dumps(TWICE[0]))
    done = CliRunner().invoke(app, ["estimate", str(tmp_path / "log"), "--png", str(tmp_path / "plot.png")])
    assert (done.exit_code, done.exception) == (0, None)
    assert "is not written" in done.stderr
    assert "1 request in 1 conversation" in done.stdout
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(("chosen", "is_marked"), [(70.0, True), (1e9, False)])
def test_the_png_marks_what_was_chosen(chosen: float, is_marked: bool, tmp_path: Path) -> None:
    pictures = []
    for name, size in (("chosen", chosen), ("far", 1e9)):
        png.write(tmp_path / name, [(0.0, 1.0), (50.0, 0.75), (100.0, 0.5)], size)
        pictures.append((tmp_path / name).read_bytes())
    assert (pictures[0] != pictures[1]) == is_marked
