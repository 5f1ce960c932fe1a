# SPDX-License-Identifier: Apache-2.0
"""Records of a server's `--observe` as requests: they say of images what a log of the same requests says."""

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.unit.traffic.logs import Request, chat, image, said, text, user
from tests.unit.traffic.recording import ANSWER, Server
from tests.unit.traffic.test_estimate import FULL, ROOMY, conversation, played
from vllm_mmcache.cli import app
from vllm_mmcache.components.observe.record import file
from vllm_mmcache.traffic import records
from vllm_mmcache.traffic.estimate import SIDES, Estimate, Sizes
from vllm_mmcache.traffic.logs import Log
from vllm_mmcache.traffic.requests import NoPrompt

EXAMPLES = Path("tests/support/example_records.json")
SYSTEM = {"role": "system", "content": "You look at pictures, and say what there is." * 4}

AGENT = conversation(1, 2, 3, 4)
AGENTS = [
    request
    for pair in zip(conversation(1, 2, 3), conversation(1, 9, 3, name="b"), strict=True)
    for request in (chat(SYSTEM, *request["messages"]) for request in pair)
]
TENANTS = conversation(1, 2, cache_salt="a") + conversation(1, 3, cache_salt="b")
ONE_PICTURE = [chat(user(image(1), text(letter * 40))) for letter in "abcabc"]
ROTATION = [chat(user(text(f"turn {turn:03}"), image(number))) for turn, number in product(range(3), range(5))]
WINDOW = [
    chat(*turns) for turns in (
        [user(image(1)), said(ANSWER), user(image(2))],
        [user(image(1)), said(ANSWER), user(image(2)), said(ANSWER), user(image(3))],
        [user(text("(it is gone)")), said(ANSWER), user(image(2)), said(ANSWER), user(image(3)), said("x" * 40)],
    )
]  # fmt: skip
WORKLOADS = {"agent": AGENT, "agents": AGENTS, "tenants": TENANTS, "one picture": ONE_PICTURE, "rotation": ROTATION,
             "window": WINDOW}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def recorded(path: Path, requests: list[Request], sizes: Sizes = ROOMY, **server: Any) -> tuple[Estimate, Log]:
    Server(path, FULL, **server).ask_all(requests)
    log, estimate = Log([path]), Estimate(FULL, sizes)
    estimate.add_all(log.prompts())
    return estimate, log


def of_images(estimate: Estimate) -> dict[str, Any]:
    """What both forms of the same traffic must agree about."""
    seen = asdict(estimate.seen)
    names = ("requests", "conversations", "images", "image_tokens", "new", "in_conversation", "across_conversations",
             "across_tenants", "of_unknown_size", "grown", "rewritten")  # fmt: skip
    found = {name: seen[name] for name in names} | {"tenants": len(estimate.seen.tenants)}
    for side in SIDES:
        done = estimate.done[side]
        found[side] = done.decoded, done.processed, done.encoded, done.processed_pixels
    return found


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("sizes", [ROOMY, replace(ROOMY, kv_tokens=60, encoder_tokens=20, feature_bytes=3_000)])
def test_a_log_and_the_records_of_the_same_requests_agree(name: str, sizes: Sizes, path: Path) -> None:
    """About images, which come again where, and how often the vision tower runs."""
    from_records, log = recorded(path, WORKLOADS[name], sizes)
    one, other = of_images(from_records), of_images(played(WORKLOADS[name], sizes=sizes))
    if name == "window":  # records can't tell that a conversation goes on
        for found in (one, other):
            found["seen before"] = found.pop("in_conversation") + found.pop("across_conversations")
            del found["conversations"], found["grown"], found["rewritten"]
    assert one == other
    assert not log.unused


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_the_server_did_is_what_stock_is_said_to_do(name: str, path: Path) -> None:
    """On a server with room for all, and up to the KV of answers, which an estimate does not count."""
    estimate, log = recorded(path, WORKLOADS[name], replace(ROOMY, block_tokens=4), block_tokens=4)
    stock, server = estimate.done["stock"], log.recorded
    assert (server.decoded, server.processed, server.encoded) == (stock.decoded, stock.processed, stock.encoded)
    assert server.prompt_tokens == estimate.seen.prompt_tokens
    of_answers = server.reused_tokens - stock.reused_tokens
    assert 0 <= of_answers <= 4 * estimate.seen.grown  # whole blocks
    assert server.missed_tokens.total() == server.prompt_tokens - server.reused_tokens
    assert server.on_stock


def test_another_picture_is_another_one(path: Path, tmp_path: Path) -> None:
    """Negative control: of requests that differ in one picture, other things are said."""
    same, _ = recorded(path, ONE_PICTURE)
    other, _ = recorded(tmp_path / "other", [*ONE_PICTURE[:-1], chat(user(image(2), text("c" * 40)))])
    assert (same.seen.new, other.seen.new) == (1, 2)
    assert of_images(same) != of_images(other)


def test_without_the_nearest_request_nothing_is_known_to_begin_alike(path: Path) -> None:
    """Negative control: what is said to be reused comes from there."""
    recorded(path, AGENTS)
    lines = [json.loads(line) | {"nearest": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    estimate = Estimate(FULL, ROOMY)
    estimate.add_all(Log([path]).prompts())
    assert estimate.done["stock"].reused_tokens == 0
    assert estimate.seen.conversations == len(AGENTS)


def test_several_answers_are_one_request(path: Path) -> None:
    Server(path, FULL).ask_all(AGENT, num_answers=3)
    log, estimate = Log([path]), Estimate(FULL, ROOMY)
    estimate.add_all(log.prompts())
    assert of_images(estimate) == of_images(played(AGENT))
    assert log.unused == {"another answer to a request that is counted": 2 * len(AGENT)}


def test_conversations_that_go_on_from_different_answers_share_no_answer(path: Path) -> None:
    def line(name: str, nearest: str | None, common: int) -> str:
        segment = {"kind": "message", "start": 0, "tokens": 16, "role": "user", "turn": 0, "image": None}
        return json.dumps(
            {"format": 1, "id": name, "time_s": 1.0, "prompt_tokens": 16 + common, "reused_tokens": 0,
             "block_tokens": 4, "segments": [segment, {**segment, "start": 16, "tokens": common, "turn": 1}],
             "nearest": {"id": nearest, "common_tokens": 16 + common} if nearest else None}
        )  # fmt: skip

    def reused(*lines: str) -> int:
        path.write_text("\n".join(lines))
        estimate = Estimate(FULL, ROOMY)
        estimate.add_all(Log([path]).prompts())
        return estimate.done["stock"].reused_tokens

    first = line("a-1.0", None, 0)
    assert reused(first, line("a-2", "a-1.0", 8), line("a-3", "a-1.1", 8)) == 16 + 16
    assert reused(first, line("a-2", "a-1.0", 8), line("a-3", "a-1.0", 8)) == 16 + 20


@pytest.mark.parametrize("is_compressed", [False, True], ids=["plain", "gzip"])
def test_the_examples_are_read(is_compressed: bool, tmp_path: Path) -> None:
    """Each field that a record can have is there; also as one JSON list, which is how they are kept."""
    examples = json.loads(EXAMPLES.read_bytes())
    for written in (EXAMPLES.read_bytes(), b"".join(json.dumps(one).encode() + b"\n" for one in examples)):
        path = tmp_path / "records"
        path.write_bytes(gzip.compress(written) if is_compressed else written)
        log = Log([path])
        found = list(log.prompts())
        assert len(found) == len(examples)
        assert not log.unused
        assert log.recorded.prompt_tokens == sum(one["prompt_tokens"] for one in examples)
        assert not log.recorded.on_stock
        assert sum(getattr(part, "tokens", 0) for prompt in found for turn in prompt.turns for part in turn) == sum(
            one["prompt_tokens"] for one in examples
        )


def test_the_file_before_is_read_first(path: Path) -> None:
    """Where the server has turned its file over; and nothing is lost while it has not begun a new one."""
    Server(path, FULL, budget_bytes=40_000).ask_all(ROTATION + AGENT)
    assert records.older(path) == file.before(path)
    assert records.older(path).exists()
    whole = [record.id for record in file.read_records(path)]
    log = Log([path])
    assert len(list(log.prompts())) == len(whole) == log.recorded.requests
    first = log.recorded.first
    assert first is not None
    assert first.id == whole[0]
    for paths in ([path, records.older(path)], [records.older(path), path]):  # as a shell sorts them, and in order
        twice = Log(paths)
        assert (len(list(twice.prompts())), twice.unused) == (len(whole), {})
    path.unlink()
    assert 0 < len(list(Log([path]).prompts())) < len(whole)
    assert len(list(Log([records.older(path), path.parent / "none"][:1]).prompts())) < len(whole)


def test_an_older_log_of_requests_is_not_read_unasked(path: Path) -> None:
    path.write_text(json.dumps(AGENT[0]) + "\n")
    records.older(path).write_text(json.dumps(AGENT[1]) + "\n")
    assert len(list(Log([path]).prompts())) == 1


def spoilt(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(EXAMPLES.read_bytes())[0]
    change(record)
    return record


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (spoilt(lambda record: record.update(format=2)), "another format"),
        (spoilt(lambda record: record.update(prompt_tokens="many")), "no whole record"),
        (spoilt(lambda record: record.pop("id")), "no whole record"),
        (spoilt(lambda record: record.update(segments=[])), "without segments"),
    ],
)
def test_what_is_no_record_is_counted(record: dict[str, Any], why: str, path: Path) -> None:
    path.write_text(json.dumps(record) + "\n" + json.dumps(AGENT[0]) + "\n")
    log = Log([path])
    assert len(list(log.prompts())) == 1
    assert [why in reason for reason in log.unused] == [True]
    assert log.recorded.first is None
    with pytest.raises(NoPrompt, match=why):
        records.read(record)


def test_what_the_command_says(path: Path) -> None:
    recorded(path, AGENT, block_tokens=8)
    shown = CliRunner().invoke(app, ["estimate", str(path)], catch_exceptions=False).stdout
    assert "4 of them recorded by a server of some/model" in shown
    assert "images decoded                                        10            10             4" in shown
    assert "why the server that recorded computed tokens" in shown
    assert "new_content" in shown
    assert "hits in blocks of 8 tokens" in shown
    assert "not in the records: the size and format of the images' files" in shown
    assert "components of the plugin on" not in shown
    found = json.loads(CliRunner().invoke(app, ["estimate", str(path), "--json"]).stdout)
    assert found["recorded"]["encoded"] == found["stock"]["encoded"] == 4
    assert len(found["not_known"]) == 4


def test_layers_with_states_are_found_in_the_records(path: Path) -> None:
    """Whatever --model says of them."""
    recorded(path, ONE_PICTURE)

    def saved() -> int:
        found = json.loads(CliRunner().invoke(app, ["estimate", str(path), "--json", "--block-tokens", "1"]).stdout)
        return int(found["mmcache"]["reused_tokens"] - found["stock"]["reused_tokens"])

    assert saved() == 0
    path.write_text(path.read_text().replace('"full_attention"', '"sliding_window"'))
    assert saved() > 0


def test_digests_that_may_be_those_of_several_pictures() -> None:
    some, many = (records.Recorded(digests={str(n).encode() for n in range(number)}) for number in (1_000, 100_000))
    assert some.mistaken < 0.001
    assert 1 < many.mistaken < 1.2


@pytest.mark.parametrize(
    ("kinds", "state_blocks", "keeps_all_kv"),
    [
        (["full_attention"], 0, True),
        (["full_attention", "sliding_window"], 0, False),
        (["full_attention", "mamba", "mamba", "mamba"], 3, False),
        (["full_attention", "full_attention", "mamba"], 0.5, False),
    ],
)
def test_what_a_state_takes(kinds: list[str], state_blocks: float, keeps_all_kv: bool) -> None:
    """A page of each group of recurrent layers, where a block of tokens takes one of each group with attention."""
    record = msgspec.convert(
        {
            "format": 1, "id": "a", "time_s": 0.0, "prompt_tokens": 1, "reused_tokens": 0, "block_tokens": 16,
            "segments": [], "groups": [{"kind": kind} for kind in kinds],
        },
        records.Record,
    )  # fmt: skip
    assert (record.state_blocks, record.keeps_all_kv) == (state_blocks, keeps_all_kv)


def test_states_that_records_tell_of_take_room(path: Path) -> None:
    """Of the same requests, as a model with windows and one with Mamba layers would have recorded them."""
    Server(path, FULL).ask_all(AGENTS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    reused = []
    for kinds in (["full_attention", "sliding_window"], ["full_attention", *["mamba"] * 3]):
        groups = {"groups": [{"kind": kind} for kind in kinds]}
        path.write_text("".join(json.dumps(line | groups) + "\n" for line in lines))
        done = CliRunner().invoke(app, ["estimate", str(path), "--kv-tokens", "150", "--json"])
        reused.append(json.loads(done.stdout)["mmcache"]["reused_tokens"])
    assert reused == [392, 200]
