# SPDX-License-Identifier: Apache-2.0
"""Files of requests, in the forms that people have them in; what is wrong in one is counted, and the rest is used."""

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.traffic.logs import Request, chat, image, text, user
from vllm_mmcache.base.errors import RecordsError
from vllm_mmcache.traffic.logs import WRAPPERS, Log
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
    path.write_text("no json\n" + lines([*REQUESTS, {"no": "request"}]) + '{"messages": [7]}\n{"cut": \n[[[\n"text"\n')
    log = Log([path])
    assert len(list(log.prompts())) == len(REQUESTS)
    assert log.unused == {
        "not JSON": 3,
        "none of 'messages', 'input', 'prompt' and 'conversations'": 1,
        "a message that is no JSON object": 1,
        "no JSON object": 1,
    }


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    """Before any is read; a directory, and a path without a name, too."""
    (tmp_path / "log").write_text(lines(REQUESTS))
    for wrong in (tmp_path / "none", tmp_path, Path("."), Path("/")):
        read = Log([tmp_path / "log", wrong])
        with pytest.raises(RecordsError, match=re.escape(str(wrong))):
            next(read.prompts())
        assert read.num_bytes == 0


@pytest.mark.parametrize("spoil", [lambda data: data[:-20], lambda data: data[:-8] + bytes(8)], ids=["cut", "damaged"])
def test_what_comes_before_the_cut_is_used(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A log that is still being compressed ends somewhere."""
    rng = random.Random(0)
    requests = [*REQUESTS, chat(user(text(str(rng.random()) * 1000)))]
    (tmp_path / "1.gz").write_bytes(spoil(gzip.compress(lines(requests).encode())))
    (tmp_path / "2").write_text(lines(REQUESTS))
    read = Log([tmp_path / "1.gz", tmp_path / "2"])
    assert len(list(read.prompts())) >= 2 * len(REQUESTS)
    assert read.unused == {"behind where a compressed file is cut or damaged": 1}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("prompt", [None, "as text"])
def test_a_prompt_beside_a_request_is_no_request(name: str, prompt: str | None, tmp_path: Path) -> None:
    """And it is one beside a wrapper that holds none, such as an answer's text."""
    (tmp_path / "log").write_text(lines([{"prompt": prompt, name: one} for one in REQUESTS]))
    assert list(Log([tmp_path / "log"]).prompts()) == [prompt_of(one) for one in REQUESTS]
    for beside in ("It is a cat.", {"temperature": 0}):
        (tmp_path / "log").write_text(lines([{"prompt": prompt, name: beside}]))
        assert len(list(Log([tmp_path / "log"]).prompts())) == (prompt is not None)


def test_a_name_that_is_wrong_is_said_though_an_older_log_is_there(tmp_path: Path) -> None:
    (tmp_path / "log.1").write_text(lines(REQUESTS))
    with pytest.raises(RecordsError, match="log can't be read"):
        list(Log([tmp_path / "log.1", tmp_path / "log"]).prompts())


def test_a_damaged_file_beside_a_log_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(lines(REQUESTS))
    (tmp_path / "log.1").write_bytes(gzip.compress(lines(REQUESTS).encode())[:12])
    assert len(list(Log([tmp_path / "log"]).prompts())) == len(REQUESTS)
