# SPDX-License-Identifier: Apache-2.0
"""The demo's comparer, with its negative controls: an answer that differs must be seen and give exit status 1.

No server is started, except one that must fail at once.
"""

import io
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mmcache_tools.demo.conversation import Answer, Message, Turn, photographs, script, unseen, user_message
from mmcache_tools.demo.run import Row, compare, dialogue, exit_status, hold_plugin, hold_stock, table
from mmcache_tools.harness import server
from rich.console import Console

from vllm_mmcache.base.errors import EnvironmentProblem

COLD = Answer("abc", ("token_id:1", "token_id:2"), (-0.5, -1.5), 0.1, 100, 0)


def make_row(stock: Answer = COLD, plugin: Answer | None = COLD) -> Row:
    return Row(Turn("question"), [], stock, COLD, plugin)


def test_equal_answers_give_zero() -> None:
    close = replace(COLD, logprobs=(-0.5005, -1.5), first_token_s=0.01, num_cached_tokens=96)
    assert compare(COLD, close) is None
    assert exit_status([make_row(), make_row(close, close)]) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(COLD, tokens=("token_id:1", "token_id:3")), "token 1 differs"),
        (replace(COLD, tokens=("token_id:1",), logprobs=(-0.5,)), "token 1 differs"),
        (replace(COLD, tokens=(), logprobs=()), "token 0 differs"),
        (replace(COLD, logprobs=(-0.5, -1.502)), "log-probabilities off by 0.002"),
        (replace(COLD, logprobs=(-0.5, math.nan)), "log-probabilities off by nan"),
        (replace(COLD, logprobs=(-0.5,)), "1 log-probabilities, cold 2"),
        (replace(COLD, num_prompt_tokens=101), "prompt has 101 tokens, cold 100"),
    ],
)
def test_a_differing_answer_is_seen(wrong: Answer, said: str) -> None:
    assert compare(COLD, wrong) == said
    for bad in (make_row(plugin=wrong), make_row(stock=wrong)):
        assert exit_status([make_row(), bad]) == 1
        assert bad.differences()
        console = Console(width=80, file=io.StringIO())
        console.print(table([make_row(), bad]))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "yes" in shown
        assert "NO" in shown


def test_wrong_words_are_seen() -> None:
    """Also where they are those of the cold run: the model was trained to know better."""
    turn = Turn("What is in the picture?", (), "red circle")
    right = replace(COLD, text="red circle")
    wrong = replace(COLD, text="blue star")
    assert exit_status([Row(turn, [], right, right, right)]) == 0
    for row, who in ((Row(turn, [], right, right, wrong), "mmcache"), (Row(turn, [], wrong, right, right), "stock")):
        assert row.differences() == []
        assert row.wrong_words() == [who]
        assert exit_status([Row(turn, [], right, right, right), row]) == 1
    assert make_row(wrong, wrong).wrong_words() == [], "nobody knows what is right for a model with random weights"
    console = Console(width=80, file=io.StringIO())
    console.print(dialogue([Row(turn, [], right, right, right), Row(turn, [], right, right, wrong)]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [("yes" in line, "NO" in line) for line in lines if "What is" in line] == [(True, False), (False, True)]


def test_nothing_compared_is_no_success() -> None:
    empty = replace(COLD, tokens=(), logprobs=())
    assert compare(empty, empty) is not None
    assert exit_status([]) == 1
    assert exit_status([make_row(), make_row(plugin=None)]) == 1


class FakeClient:
    """Answers each prompt with the number of its messages, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[Message]]] = []

    def ask(self, messages: list[Message], salt: str | None = None) -> Answer:
        self.asked.append(("warm", messages))
        return replace(COLD, text=f"answer {len(messages)}")

    def ask_cold(self, messages: list[Message]) -> Answer:
        self.asked.append(("cold", messages))
        return replace(COLD, text=f"answer {len(messages)}")


@pytest.mark.slow
def test_stock_and_plugin_get_the_same_prompts_and_cold_runs_come_last() -> None:
    stock, plugin = FakeClient(), FakeClient()
    turns = script("qwen3-vl")[:3]
    rows = hold_stock(stock, turns, lambda rows: None)  # type: ignore[arg-type]
    hold_plugin(plugin, rows, lambda rows: None)  # type: ignore[arg-type]
    assert [kind for kind, _ in stock.asked] == ["warm"] * 3 + ["cold"] * 3
    assert [prompt for _, prompt in stock.asked[:3]] == [prompt for _, prompt in plugin.asked]
    assert [prompt for _, prompt in stock.asked[3:]] == [prompt for _, prompt in plugin.asked]
    assert [message["role"] for message in plugin.asked[2][1]] == ["user", "assistant"] * 2 + ["user"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-vl", "seeing"])
def test_pictures_join_on_turns_1_3_6_9_and_are_unseen_in_a_cold_run(family: str) -> None:
    turns = script(family)
    assert len(turns) == 12
    assert [number for number, turn in enumerate(turns, 1) if turn.pictures] == [1, 3, 6, 9]
    names = [picture.name for turn in turns for picture in turn.pictures]
    if family == "qwen3-vl":
        assert names == [photograph.name for photograph in photographs()]
    assert len({picture.data_url for turn in turns for picture in turn.pictures}) == 5
    message = user_message(turns[0])
    ids = [part.get("uuid") for _ in range(2) for part in unseen([message])[0]["content"] if "image_url" in part]
    assert len(set(ids)) == 2
    assert "uuid" not in message["content"][0]


@pytest.mark.slow
def test_shapes_are_asked_for_in_words_that_were_trained() -> None:
    from mmcache_tools.demo.conversation import SHAPES_SCRIPT
    from mmcache_tools.zoo.seeing.prompts import KINDS

    turns = script("seeing")
    for turn, (kind, question, names) in zip(turns, SHAPES_SCRIPT, strict=True):
        num_new, _, wordings = KINDS[kind]
        assert question in wordings
        assert len(names) == num_new
        assert tuple(picture.name for picture in turn.pictures) == names
    assert [turns[i].right for i in (0, 1, 2, 5, 8)] == [
        "red circle", "red", "red circle, blue star: different", "green ring, green ring: same",
        "red circle, red circle: same",
    ]  # fmt: skip


@pytest.mark.process
def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentProblem, match=r"ended with status 2 .* see .*x\.log") as caught,
        server.serve(tmp_path / "no" / "model", log_path=tmp_path / "x.log"),
    ):
        pass
    assert "no model directory" in caught.value.__notes__[0]
    assert "\n" not in str(caught.value)


@pytest.mark.process
def test_stop_ends_the_whole_group() -> None:
    # A leader that ends at once, and a child that ignores the polite signal, as a busy engine might.
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
    )
    leader = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", leader], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert len(server.living(process.pid)) == 2
    start = time.monotonic()
    server.stop(process, timeout_s=1.0)
    assert time.monotonic() - start < 600  # the child is not waited for
    deadline = time.monotonic() + 60
    while server.living(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.living(process.pid) == []
    process.stdout.close()
