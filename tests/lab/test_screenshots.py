# SPDX-License-Identifier: Apache-2.0
"""scripts/dashboard.py and scripts/screenshots.py without a server: variables, panels that may be empty, and the files.

With one: tests/system/page/test_panels.py.
"""

import json
import re

from PIL import Image

from scripts.dashboard import DASHBOARD, QUIET, filled_in, step_s
from scripts.screenshots import IMAGES, MOST_BYTES, REPO, SCHEMES, SIZES, pictures

PANELS = json.loads(DASHBOARD.read_text())["panels"]


def test_no_variable_is_left() -> None:
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    assert all("$" in query for query in queries)
    assert not [query for query in queries if "$" in filled_in(query)]
    assert filled_in('rate(x{job=~"$job"}[$__rate_interval])', "a|b") == 'rate(x{job=~"a|b"}[5s])'
    assert step_s(60) == 1, "no shorter than the distance of two scrapes"


def test_only_panels_may_be_empty() -> None:
    assert QUIET.keys() < {panel["title"] for panel in PANELS}


def test_the_pictures_are_those_that_the_script_takes() -> None:
    assert {path.name for path in IMAGES.iterdir()} == set(pictures())
    for name in pictures():
        path = IMAGES / name
        assert path.stat().st_size <= MOST_BYTES
        with Image.open(path) as picture:
            device = next(width for device, (width, _) in SIZES.items() if device in name)
            assert picture.format == "PNG"
            assert picture.width <= device


def test_each_picture_is_in_a_page_with_words_in_its_place() -> None:
    pages = "\n".join(path.read_text() for path in (REPO / "docs").glob("*.md"))
    assert set(re.findall(r"images/([\w-]+\.png)", pages)) == set(pictures())
    shown = re.findall(r'<img\s+alt="([^"]*)"\s+src="images/', pages)
    assert len(shown) == len(re.findall("<img", pages)) == len(pictures()) / len(SCHEMES)
    assert all(len(words.split()) > 5 for words in shown)
