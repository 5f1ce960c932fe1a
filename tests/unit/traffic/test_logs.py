# SPDX-License-Identifier: Apache-2.0
"""Files of requests, in the forms that people have them in; what is wrong in one is counted, and the rest is used."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.traffic.logs import Request, chat, image, text, user
from vllm_mmcache.base.errors import RecordsError
from vllm_mmcache.traffic.logs import Log
from vllm_mmcache.traffic.requests import prompt_of

REQUESTS = [chat(user(image(n), text(f"Question {n}"))) for n in range(3)]


def lines(requests: list[Request]) -> str:
    return "".join(json.dumps(one) + "\n" for one in requests)


def har(requests: list[Request]) -> str:
    entries = [
        {"request": {"headers": [{"name": "authorization", "value": "Bearer secret"}], "postData": {"text": text}}}
        for text in map(json.dumps, requests)
    ]
    return json.dumps({"log": {"entries": entries}}, indent=1)


@pytest.mark.parametrize(
    "written",
    [
        lines,
        lambda requests: "\n\n" + lines(requests),
        lambda requests: lines([{"custom_id": "1", "method": "POST", "body": one} for one in requests]),
        lambda requests: lines([{"request": json.dumps(one)} for one in requests]),
        json.dumps,
        lambda requests: json.dumps(requests, indent=2),
        har,
        lambda requests: lines([{"log": json.dumps(one) + "\n", "stream": "stdout"} for one in requests]),
        lambda requests: lines([{"type": "log", "level": "info", "body": one} for one in requests]),
        lambda requests: "\ufeff" + json.dumps(requests),
        lambda requests: lines([{"latency": float("nan"), "note": "\ud800", "body": one} for one in requests]),
    ],
    ids=[
        "lines",
        "blank lines",
        "OpenAI's batch",
        "request as text",
        "a list",
        "a list over lines",
        "HAR",
        "Docker",
        "lines of a log",
        "byte order mark",
        "Python's JSON",
    ],
)
@pytest.mark.parametrize("is_compressed", [False, True], ids=["plain", "gzip"])
def test_forms(written: Callable[[list[Request]], str], is_compressed: bool, tmp_path: Path) -> None:
    path, content = tmp_path / "log", written(REQUESTS).encode()
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    log = Log([path])
    assert list(log.prompts()) == [prompt_of(one) for one in REQUESTS]
    assert not log.unused
    assert log.num_bytes == len(content)


def test_what_is_wrong_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("no json\n" + lines([*REQUESTS, {"prompt": "old"}]) + '{"messages": [7]}\n{"cut": \n[[[\n"text"\n')
    log = Log([path])
    assert len(list(log.prompts())) == len(REQUESTS)
    assert log.unused == {
        "not JSON": 3, "neither 'messages' nor 'input'": 1, "a message that is no JSON object": 1, "no JSON object": 1
    }  # fmt: skip


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="none"):
        list(Log([tmp_path / "none"]).prompts())
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(lines(REQUESTS).encode())[:-20])
    with pytest.raises(RecordsError, match=r"cut\.gz"):
        list(Log([cut]).prompts())
