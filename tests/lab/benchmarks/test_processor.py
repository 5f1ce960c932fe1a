# SPDX-License-Identifier: Apache-2.0
"""`make bench-processor`: it counts what happened, goes on where it was cut off, and says what was met."""

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
import wrapt
from PIL import Image

from benchmarks import pictures, probing, processor, results, rows, scenarios
from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import ROOT, Result, committed
from benchmarks.rows import FALLEN_OUT
from benchmarks.run import options_of
from benchmarks.scenarios import Scenario
from benchmarks.servers import counters
from tests.support.sizes import larger

PART = "rotation-mmcache"
TARGETS = rows.TARGETS["processor"]


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class EngineCoreRequest:
    """Named as vLLM's: what the probe counts."""


def numbers_of(folder: Path, clock: Clock) -> dict[str, probing.Numbers]:
    return {process: probing.Numbers(folder / f"{process}-1", clock.perf_counter) for process in probing.PROCESSES}


def since(before: dict[str, float], folder: Path, questions: int) -> dict[str, float]:
    """What each of the questions cost."""
    return probing.for_each({name: now - before[name] for name, now in probing.read(folder).items()}, questions)


def test_each_second_belongs_to_one_kind(tmp_path: Path, clock: Clock) -> None:
    numbers = numbers_of(tmp_path, clock)[probing.API]

    def decode() -> None:
        clock.now += 10

    def process() -> None:
        clock.now += 1
        wrapt.FunctionWrapper(decode, numbers.timed("decode_s"))()
        clock.now += 2

    clock.now += 100  # before: nobody's
    wrapt.FunctionWrapper(process, numbers.timed("processor_s"))()
    clock.now += 100
    found = probing.read(tmp_path)
    assert (found["decode_s"], found["processor_s"], found["hash_s"]) == (10, 3, 0)


def test_a_picture_is_decoded_once(tmp_path: Path, clock: Clock) -> None:
    numbers = numbers_of(tmp_path, clock)[probing.API]
    for tile in (["a tile"], []):
        numbers.load(lambda: None, SimpleNamespace(tile=tile), (), {})
    assert probing.read(tmp_path)["decodes"] == 1


def test_requests_are_counted_with_all_their_bytes(tmp_path: Path, clock: Clock) -> None:
    numbers = numbers_of(tmp_path, clock)
    before = probing.read(tmp_path)

    def encode(obj: object) -> list[Any]:
        clock.now += 1
        return [b"head", memoryview(bytearray(6)), bytearray(90)]

    def decode(frames: object) -> object:
        clock.now += 2
        return EngineCoreRequest() if frames else "another message"

    sent = wrapt.FunctionWrapper(encode, numbers["api"].encode)
    received = wrapt.FunctionWrapper(decode, numbers["engine"].decode)
    for frames in (sent(EngineCoreRequest()), sent("another message")):
        clock.now += 5 if frames else 0
        received(frames)
    received([])
    found = since(before, tmp_path, 1)
    assert found["sent_bytes"] == 100
    assert (found["encode_s"], found["receive_s"]) == (1, 4), "both were decoded as requests here"
    with pytest.raises(RuntimeError, match="2 questions, but 1 requests"):
        since(before, tmp_path, 2)


def test_the_way_is_that_of_the_requests(tmp_path: Path, clock: Clock) -> None:
    numbers = numbers_of(tmp_path, clock)
    before = probing.read(tmp_path)
    for moment in (10.0, 20.0):
        for name, number in {"requests": 1.0, "encode_s": 1.0, "sent_at": moment}.items():
            numbers["api"].add(name, number)
        for name, number in {"receive_s": 3.0, "received_at": moment + moment / 40}.items():
            numbers["engine"].add(name, number)
    found = since(before, tmp_path, 2)
    assert (found["transit_s"], found["transfer_s"]) == (0.375, 4.375)


def test_a_process_without_the_probe_does_not_look_cheap(tmp_path: Path) -> None:
    probing.Numbers(tmp_path / "api-1")
    with pytest.raises(RuntimeError, match="no numbers of engine, worker"):
        probing.read(tmp_path)
    probing.Numbers(tmp_path / "worker-4")
    probing.Numbers(tmp_path / "engine-2").add("hash_s", 1)
    probing.Numbers(tmp_path / "engine-3").add("hash_s", 2)
    assert probing.read(tmp_path)["hash_s"] == 3


def test_pictures_are_unlike_in_pixels() -> None:
    kind = processor.FORMATS["png"]._replace(size=(64, 48))
    contents = [pictures.picture(kind, number) for number in range(30)]
    pixels = {Image.open(io.BytesIO(content)).tobytes() for content in contents}
    assert len(pixels) == 30
    assert pictures.picture(kind, 3) == contents[3]
    assert len({scenarios.new(kind)()[0] for _ in range(4)}) == 4


VIDEO = """
import sys
import cv2
from benchmarks import pictures
content = pictures.video(1)
open(sys.argv[1], "wb").write(content)
frames = cv2.VideoCapture(sys.argv[1]).get(cv2.CAP_PROP_FRAME_COUNT)
assert frames == 64, frames
assert content != pictures.video(2)
"""


@pytest.mark.process
def test_a_video_has_its_frames(tmp_path: Path) -> None:
    """In a process of its own: OpenCV stays out of this one."""
    subprocess.run([sys.executable, "-c", VIDEO, str(tmp_path / "video.mp4")], cwd=ROOT, check=True, timeout=60)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Measures with one part that needs no server."""

    def scenario(scenario: Scenario, options: argparse.Namespace, sides: tuple[str, ...]) -> Result:
        if options.images == 13:
            raise RuntimeError("an engine died")
        fallen_out = {"time_s": 1.0, "sent_bytes": 50, "encoded_bytes": 100, "seen": options.images}
        result = Result()
        result.add_sides({"mmcache": {(FALLEN_OUT, what): number for what, number in fallen_out.items()}
                         | {("rotation, held", "time_s"): 0.9}})  # fmt: skip
        return result

    monkeypatch.setattr(processor, "PARTS", {one: processor.PARTS[one] for one in (PART, "many")})
    monkeypatch.setattr(processor, "measure_scenario", scenario)
    monkeypatch.setattr(processor, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(processor, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path)

    def run(*arguments: str) -> Result:
        options, _ = options_of("processor", ["--parts", PART, *arguments])
        return processor.measure(options)

    return run


@pytest.mark.process
def test_a_run_goes_on_where_it_was_cut_off(
    run: Callable[..., Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def seen(result: Result) -> float:
        return result.found[FALLEN_OUT]["seen"]["mmcache"]

    assert seen(run("--short")) == BENCHMARKS["processor"].short["images"]
    run("--short", "--videos", "7")
    assert "was measured before" in capsys.readouterr().out, "a size that this part does not use"
    run("--short", "--again")
    assert "was measured before" not in capsys.readouterr().out
    assert run("--images", "20").details[PART]["options"] == {"images": 20, "rounds": 2, "cache_gib": 0.25}
    kept = {
        "found": {
            "many, alone": {"time_s": {"stock": 1.0}},
            FALLEN_OUT: {"counted no more": {"stock": 1.0, "mmcache": 2.0}},
            "old": {"ratio": {"mmcache": 1}},
        },
        "details": {"many": 1},
        "options": {**BENCHMARKS["processor"].options, "images": 20},
    }
    (tmp_path / "processor.json").write_text(json.dumps(kept))
    failed = run("--images", "13")
    assert failed.problems == [f"failed: {PART}: RuntimeError: an engine died"]
    assert failed.found == {}, "what was committed is of another size"
    found = run("--images", "20")
    assert seen(found) == 20
    assert list(found.details) == ["many", PART], "one part leaves the others"
    assert found.found[FALLEN_OUT]["counted no more"] == {"stock": 1.0}, "and nothing older of its own"
    assert found.problems == []
    ratios = {case: counted["ratio"] for case, counted in found.found.items() if "ratio" in counted}
    assert ratios == {
        TARGETS[0].text: {"mmcache": 1 / 0.9, "at most": 1.05},
        TARGETS[3].text: {"mmcache": 0.5, "at most": 1},
    }


def test_every_part_says_what_it_uses() -> None:
    used = {one for part in processor.PARTS.values() for one in part.sizes}
    assert used == set(BENCHMARKS["processor"].options) - {"parts", "again"}


def test_every_target_is_of_the_committed_result() -> None:
    content = committed("processor")
    assert set(content["details"]) <= set(processor.PARTS)
    for target in TARGETS:
        number, by = (content["found"][case][what][side] for case, what, side in (target.number, target.by))
        assert content["found"][target.text]["ratio"] == {"mmcache": number / by, "at most": target.limit}
        assert target.ratio(content["found"]) == number / by


def test_labels_of_a_counter_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'mmcache:made_total{process="api"} 2.0\nmmcache:made_total{process="worker"} 3.0\nmmcache:other_total 1.0\n'
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(text.encode()))
    assert counters("http://nowhere") == {"made": 5.0, "other": 1.0}


@larger
@pytest.mark.engine
def test_a_short_rotation(tmp_path: Path) -> None:
    command = ["benchmarks.run", "processor", "--short", "--again", "--parts", PART, "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "processor.json").read_text())["found"]
    unknown, again, held = (
        {what: sides["mmcache"] for what, sides in found[f"rotation, {name}"].items()}
        for name in ("unknown", "fallen out", "held")
    )
    assert unknown["questions"] == again["questions"] == BENCHMARKS["processor"].short["images"]
    assert unknown["sent_bytes"] > 5 * again["encoded_bytes"], "pixels of an unknown picture"
    assert again["sent_bytes"] > 5 * held["sent_bytes"], "what fell out is sent again, as pixels or as its file"
    assert held["sent_bytes"] < 10_000 < again["encoded_bytes"], "a picture in the cache is sent as nothing"
    assert all(unknown[kind] > 0 for kind in (*probing.KINDS, "transit_s"))
    assert held["processor_s"] == held["decode_s"] == 0
    assert 0 < held["api_server_cpu_s"] < unknown["api_server_cpu_s"]
