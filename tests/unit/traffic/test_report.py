# SPDX-License-Identifier: Apache-2.0
"""What an estimate says: counts, assumptions, and a verdict that may be no."""

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.traffic.logs import Request, chat, image, text, user
from tests.unit.traffic.test_estimate import conversation
from vllm_mmcache.cli import app

SECRET = "Bearer of-nobody-else"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def estimate(log: Path, requests: list[Request], *arguments: str) -> str:
    lines = [json.dumps({"headers": {"authorization": SECRET}, "body": one}) + "\n" for one in requests]
    log.write_text("".join(lines))
    done = CliRunner().invoke(app, ["estimate", str(log), *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    assert SECRET not in done.stdout
    return done.stdout


def test_an_agent(log: Path) -> None:
    said = estimate(log, conversation(1, 2, 3, 4, 5))
    assert "5 requests in 1 conversation of 1 tenant" in said
    assert "Worth trying: it would save" in said.splitlines()[-1]
    assert "images decoded                                        15             5" in said


def test_as_json(log: Path) -> None:
    found = json.loads(estimate(log, conversation(1, 2, 3), "--json", "--tower-tokens-s", "100"))
    assert (found["stock"]["decoded"], found["mmcache"]["decoded"]) == (6, 3)
    assert found["seen"]["tenants"] == 1
    assert found["stock"]["vision_tower_s"] > 0
    assert "prefill_s" not in found["stock"]
    assert found["verdict"].startswith("Worth trying")


def test_new_pictures_alone(log: Path) -> None:
    said = estimate(log, [chat(user(image(number), text("What?"))) for number in range(20)])
    assert said.splitlines()[-1].startswith("Do not use it")


def test_no_pictures(log: Path) -> None:
    said = estimate(log, [chat(user(text("What?")))])
    assert said.splitlines()[-1] == "There are no images in these requests: vllm-mmcache would do nothing for them."


def test_nothing_at_all(log: Path) -> None:
    for content in ("", '{"log": "no request"}\n'):
        log.write_text(content)
        done = CliRunner().invoke(app, ["estimate", str(log)])
        assert "No requests were found" in done.stdout
        assert done.exit_code == 2
        done = CliRunner().invoke(app, ["estimate", str(log), "--json"])
        assert "No requests were found" in json.loads(done.stdout)["error"]
        assert done.exit_code == 2


def test_images_that_were_taken_out(log: Path) -> None:
    gone = {"type": "image_url", "image_url": {"url": "<image removed>"}}
    said = estimate(log, [chat(user(gone, text(f"{number}"))) for number in range(10)])
    assert "not counted: 10 images without content or a name in the log" in said
    assert said.splitlines()[-1].startswith("Nothing can be said: of 10 images the log has 10 neither")
    few = estimate(log, [chat(user(gone)), *conversation(*range(30))])
    assert "not counted: 1 image without" in few
    assert few.splitlines()[-1].startswith("Worth trying")


def test_what_else_is_not_counted(log: Path) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    later = {"input": [{"role": "user", "content": "And?"}], "previous_response_id": "resp_1"}
    said = estimate(log, [*conversation(1), chat(user(sound, sound)), later])
    assert "not counted: 2 parts of videos, sounds or documents" in said
    assert "not counted: 1 request without the turns before it (previous_response_id)" in said


def test_the_tower_is_timed_by_its_own_tokens(log: Path) -> None:
    """One large image, again and again, beside new small ones."""
    requests = [
        chat(user(image(0, (2048, 2048)), image(number, (64, 64)), text(f"{number}"))) for number in range(1, 9)
    ]
    options = ("--json", "--tower-tokens-s", "1", "--encoder-tokens", "1", "--kv-tokens", "1")
    found = json.loads(estimate(log, requests, *options))
    large, small = 4096, 64
    assert found["mmcache"]["vision_tower_s"] == large + 8 * small
    assert found["stock"]["vision_tower_s"] == 8 * (large + small)


def test_sizes_with_and_without_units(log: Path) -> None:
    said = estimate(log, conversation(1), "--processor-cache", "8", "--features", "0")
    assert "processor cache of 8.0GiB, features in 0B" in said


def test_what_was_not_used_is_said(log: Path) -> None:
    said = estimate(log, [*conversation(1), {"no": "request"}, {"none": 1}])
    assert "not used: 2 lines (none of 'messages', 'input', 'prompt' and 'conversations': 2)" in said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "none"], "choose one of"),
        (["--features", "much"], "is no size"),
        (["--features", "8"], "has no unit"),
        (["--html", "/nowhere/page.html"], "there is no directory /nowhere"),
        (["--processor-cache", ""], "size"),
    ],
)
def test_wrong_options(log: Path, arguments: list[str], why: str) -> None:
    log.write_text("")
    failed = CliRunner().invoke(app, ["estimate", str(log), *arguments])
    assert why in str(failed.exception)
    assert not Counter(failed.stdout)
