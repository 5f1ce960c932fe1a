# SPDX-License-Identifier: Apache-2.0
"""`make bench-processor`: it counts what happened, goes on where it was cut off, and its page is its result."""

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from benchmarks import results
from benchmarks.catalogue import BENCHMARKS
from benchmarks.processor import measure, page, pictures, probe, scenarios
from benchmarks.processor.asking import together
from benchmarks.processor.targets import targets
from benchmarks.results import ROOT, Result, committed
from benchmarks.run import options_of
from benchmarks.servers import counters
from tests.sizes import larger

PART = "rotation-mmcache"


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


class EngineCoreRequest:
    """Named as vLLM's: what the probe counts."""


def numbers_of(folder: Path) -> dict[str, probe.Numbers]:
    return {process: probe.Numbers(folder / f"{process}-1") for process in probe.PROCESSES}


def test_each_second_belongs_to_one_kind(tmp_path: Path, clock: Clock) -> None:
    numbers = numbers_of(tmp_path)[probe.API]

    def decode() -> None:
        clock.now += 10

    def process() -> None:
        clock.now += 1
        probe.timed(numbers, "decode", decode)()
        clock.now += 2

    clock.now += 100  # before: nobody's
    probe.timed(numbers, "processor", process)()
    clock.now += 100
    found = probe.read(tmp_path)[probe.API]
    assert (found["decode"], found["processor"], found["hash"]) == (10, 3, 0)


def test_requests_are_counted_with_all_their_bytes(tmp_path: Path, clock: Clock) -> None:
    numbers = numbers_of(tmp_path)
    before = probe.read(tmp_path)

    def encode(_: object, obj: object) -> list[Any]:
        clock.now += 1
        return [b"head", memoryview(bytearray(6)), bytearray(90)]

    def decode(_: object, frames: object) -> object:
        clock.now += 2
        return EngineCoreRequest() if frames else "another message"

    sent, received = probe.counted_encode(numbers["api"], encode), probe.counted_decode(numbers["engine"], decode)
    for frames in (sent(None, EngineCoreRequest()), sent(None, "another message")):
        clock.now += 5 if frames else 0
        received(None, frames)
    received(None, [])
    found = probe.difference(before, probe.read(tmp_path), 1)
    assert found["sent_bytes"] == 100
    assert (found["encode"], found["receive"]) == (1, 4), "both were decoded as requests here"
    with pytest.raises(RuntimeError, match="2 questions, but 1 requests"):
        probe.difference(before, probe.read(tmp_path), 2)


def test_the_way_is_that_of_the_last_request(tmp_path: Path) -> None:
    numbers = numbers_of(tmp_path)
    before = probe.read(tmp_path)
    for moment in (10.0, 20.0):
        numbers["api"].add(sent=1, encode=1.0, sent_moment=moment)
        numbers["engine"].add(receive=3.0, received_moment=moment + 0.25)
    found = probe.difference(before, probe.read(tmp_path), 2)
    assert (found["transit"], found["transfer"]) == (0.25, 4.25)


def test_a_process_without_the_probe_does_not_look_cheap(tmp_path: Path) -> None:
    probe.Numbers(tmp_path / "api-1")
    with pytest.raises(RuntimeError, match="no numbers of engine, worker"):
        probe.read(tmp_path)
    probe.Numbers(tmp_path / "worker-4")
    probe.Numbers(tmp_path / "engine-2").add(hash=1)
    probe.Numbers(tmp_path / "engine-3").add(hash=2)
    assert probe.read(tmp_path)["engine"]["hash"] == 3


def test_pictures_are_unlike_in_pixels() -> None:
    kind = pictures.FORMATS["png"]._replace(size=(64, 48))
    contents = [pictures.unlike(kind, number) for number in range(30)]
    pixels = {Image.open(io.BytesIO(content)).tobytes() for content in contents}
    assert len(pixels) == 30
    assert pictures.unlike(kind, 3) == contents[3]
    first, second = (pictures.some(kind, 2) for _ in range(2))
    assert len({url for url, _ in first + second}) == 4


VIDEO = """
import sys
import cv2
from benchmarks.processor import pictures
content = pictures.video(1)
open(sys.argv[1], "wb").write(content)
frames = cv2.VideoCapture(sys.argv[1]).get(cv2.CAP_PROP_FRAME_COUNT)
assert frames == pictures.FRAMES, frames
assert content != pictures.video(2)
"""


def test_a_video_has_its_frames(tmp_path: Path) -> None:
    """In a process of its own: OpenCV stays out of this one."""
    subprocess.run([sys.executable, "-c", VIDEO, str(tmp_path / "video.mp4")], cwd=ROOT, check=True, timeout=60)


def part(median_s: float, **more: Any) -> dict[str, Any]:
    return {"median_s": median_s, "api_server_cpu_s": 0.1, "engine_cpu_s": 0.1, "sent_bytes": 1, **more}


def test_targets_are_met_and_missed() -> None:
    ours = {"again": part(1.0, sent_bytes=50, api_server_cpu_s=0.02), "held": part(0.99), "encoded_bytes": 100}
    found = {PART: {"found": ours}, "rotation-stock": {"found": {"again": part(4.0)}}}
    assert [one.is_met for one in targets(found)] == [True, True, True]
    ours |= {"held": part(0.9), "encoded_bytes": 49}
    found["rotation-stock"]["found"]["again"]["api_server_cpu_s"] = 0.079
    assert [one.is_met for one in targets(found)] == [False, False, False]
    assert targets({"video-stock": {"found": {"left_out": "no video"}}, "video-mmcache": {"found": {}}}) == []


def test_rounds_are_put_together() -> None:
    spent = dict.fromkeys((*probe.KINDS, "transit", "transfer"), 0.5)
    more = {"api_server_cpu_s": 1.0, "engine_cpu_s": 0.0, "counted": {"made": 1.0, "idle": 0.0}}
    one = {"questions": 1, "seconds": [1.0], "spent": spent | {"sent_bytes": 40.0}, **more}
    three = {"questions": 3, "seconds": [2.0, 3.0, 4.0], "spent": spent | {"sent_bytes": 80.0}, **more}
    found = together([one, three])
    assert (found["questions"], found["median_s"], found["sent_bytes"]) == (4, 2.5, 70)
    assert found["counted"] == {"made": 2.0}
    with pytest.raises(ValueError, match="nothing was asked"):
        together([])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Measures with one part that needs no server."""

    def rotation(options: argparse.Namespace) -> dict[str, Any]:
        if options.images == 13:
            raise RuntimeError("an engine died")
        again = {"again": part(1.0), "unknown": part(2.0), "held": part(1.0)}
        return {**again, "encoded_bytes": 100, "seen": options.images}

    monkeypatch.setattr(measure, "PARTS", {PART: rotation, "many": scenarios.PARTS["many"]})
    monkeypatch.setattr(measure, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(measure, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path)

    def run(*arguments: str) -> Result:
        options, _ = options_of("processor", ["--parts", PART, *arguments])
        return measure.measure(options)

    return run


def test_a_run_goes_on_where_it_was_cut_off(
    run: Callable[..., Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--short").details[PART]["found"]["seen"] == BENCHMARKS["processor"].short["images"]  # type: ignore[index]
    run("--short", "--known", "7")
    assert "was measured before" in capsys.readouterr().out, "a size that this part does not use"
    run("--short", "--again")
    assert "was measured before" not in capsys.readouterr().out
    assert run("--images", "20").details[PART]["sizes"] == {"images": 20, "rounds": 2, "cache_gib": 0.25}
    failed = run("--images", "13")
    assert failed.problems == [f"failed: {PART}"]
    assert failed.details[PART]["found"]["seen"] == 20, "a failure leaves the result before it"
    assert "an engine died" in capsys.readouterr().out
    (tmp_path / "processor.json").write_text(json.dumps({"details": {"many": {"from": "another run"}}}))
    found = run("--images", "20")
    assert list(found.details) == [PART, "many"], "one part leaves the others"
    assert found.problems == []
    assert [counted["ratio"]["mmcache"] for counted in found.found.values()] == [1.0, 0.01]


def test_every_part_says_what_it_uses() -> None:
    words = {name.partition("-")[0] for name in scenarios.PARTS}
    assert words == set(scenarios.USED)
    sizes = {name for names in scenarios.USED.values() for name in names}
    assert sizes == set(BENCHMARKS["processor"].options) - {"parts", "again"}


def test_labels_of_a_counter_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'mmcache:made_total{process="api"} 2.0\nmmcache:made_total{process="worker"} 3.0\nmmcache:other_total 1.0\n'
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(text.encode()))
    assert counters("http://nowhere") == {"made": 5.0, "other": 1.0}


def test_the_page_shows_the_committed_result() -> None:
    text = page.PAGE.read_text()
    assert page.written(text) == text, "run: python -m benchmarks.processor.page --write"
    found = committed("processor")["details"]
    changed = json.loads(json.dumps(found))
    changed[PART]["found"]["again"]["median_s"] += 1
    assert page.text(changed) != page.text(found)
    for one in changed.values():
        one["sizes"] = {name: BENCHMARKS["processor"].options[name] for name in one["sizes"]}
    assert "short run" not in page.text(changed)
    changed[PART]["sizes"]["images"] -= 1
    assert "short run" in page.text(changed)


@larger
@pytest.mark.engine
def test_a_short_rotation(tmp_path: Path) -> None:
    command = ["benchmarks.run", "processor", "--short", "--again", "--parts", PART, "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "processor.json").read_text())["details"][PART]["found"]
    unknown, again, held = (found[name] for name in ("unknown", "again", "held"))
    assert unknown["questions"] == again["questions"] == BENCHMARKS["processor"].short["images"]  # type: ignore[index]
    assert unknown["sent_bytes"] > 5 * found["encoded_bytes"], "pixels of an unknown picture"
    assert again["sent_bytes"] > 5 * held["sent_bytes"], "what fell out is sent again, as pixels or as its file"
    assert held["sent_bytes"] < 10_000 < found["encoded_bytes"], "a picture in the cache is sent as nothing"
    assert all(unknown["spent_s"][kind] > 0 for kind in (*probe.KINDS, "transit"))
    assert held["spent_s"]["processor"] == held["spent_s"]["decode"] == 0
    assert 0 < held["api_server_cpu_s"] < unknown["api_server_cpu_s"]
