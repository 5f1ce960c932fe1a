# SPDX-License-Identifier: Apache-2.0
"""What is done before vLLM parses a body grows with its length at most, and slower than json.loads does. In counts.

Python's own steps are counted as bytecodes; what C does in one step, as the bytes that it is given.
"""

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.bad_bodies import PATH, bad_bodies, chat, image
from vllm_mmcache.components.image_extraction.extract import MIN_TEXT_BYTES, extract
from vllm_mmcache.components.image_extraction.request_shapes import WALKERS
from vllm_mmcache.content.base64_scan import find_texts

SIZE = 300_000
BODIES = dict(bad_bodies(SIZE))

# json.loads takes 0.75 ns for a byte of a long string, and more for all else; a bytecode takes 10 to 20 ns.
BYTES_PER_BYTECODE = 16
BYTECODES_FOR_NOTHING = 25_000  # 0.3 ms


def bytecodes(work: Callable[[], object]) -> int:
    """How many bytecodes it runs, in all Python functions that it calls."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # what other tests have left would be taken down in the midst of it, and be counted
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


class Watched(bytes):
    """Bytes that count how many of them are looked through, and how often somebody asks."""

    num_asked = 0
    num_bytes = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:
        end = len(self) if end is None else end
        found = super().find(sub, start, end)
        self.num_asked += 1
        self.num_bytes += (end if found < 0 else found) - start
        return found

    def rfind(self, sub: Any, start: Any = 0, end: Any = None) -> int:
        end = len(self) if end is None else end
        found = super().rfind(sub, start, end)
        self.num_asked += 1
        self.num_bytes += end - (start if found < 0 else found)
        return found


@pytest.mark.parametrize("name", BODIES)
def test_looking_for_images(name: str) -> None:
    """At most two questions for as many bytes as an image has at least, and each byte is looked at twice at most."""
    body = Watched(BODIES[name])
    found = list(find_texts(body, MIN_TEXT_BYTES))
    assert body.num_asked <= 2 * (len(body) // MIN_TEXT_BYTES + 1)
    assert body.num_bytes <= 2 * len(body)
    assert len(found) <= len(body) // MIN_TEXT_BYTES


@pytest.fixture(scope="module")
def extracted_before() -> None:
    """Settings are read when they are first asked for."""
    assert extract(chat(image(100_000)), WALKERS[PATH])


@pytest.mark.usefixtures("extracted_before")
@pytest.mark.parametrize("name", BODIES)
def test_all_that_is_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = BODIES[name]
    parsed = 0
    loads = json.loads

    def counted(text: Any) -> Any:
        nonlocal parsed
        parsed += len(text)
        return loads(text)

    monkeypatch.setattr(json, "loads", counted)
    seen = bytecodes(lambda: extract(body, WALKERS[PATH]))
    assert seen <= BYTECODES_FOR_NOTHING + len(body) // BYTES_PER_BYTECODE
    assert parsed <= len(body) + 100 * (len(body) // MIN_TEXT_BYTES)


@pytest.mark.slow
def test_the_count_can_fail() -> None:
    """A loop over the needles, which is what this was, is far above the bound; and counts are the same each time."""
    body = BODIES["needles that lead to nothing"]

    def loop() -> None:
        at = body.find(b'"data')
        while at >= 0:
            at = body.find(b'"data', at + 1)

    assert bytecodes(loop) > BYTECODES_FOR_NOTHING + len(body) // BYTES_PER_BYTECODE
    assert bytecodes(loop) == bytecodes(loop)


@pytest.mark.parametrize("num_images", [1, 5, 40])
def test_images_of_good_bodies_are_extracted(num_images: int) -> None:
    """The bounds leave what they are there for: images and a long talk beside them."""
    text = '{"type":"text","text":"' + "word " * 100 + '"}'
    extracted = extract(chat(*[image(100_000), text, text] * num_images), WALKERS[PATH])
    assert extracted is not None
    assert len(extracted.payloads) == num_images
