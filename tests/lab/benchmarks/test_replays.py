# SPDX-License-Identifier: Apache-2.0
"""The replays have the shape of their traces, ask every side the same, and are counted rightly."""

from argparse import Namespace
from collections import Counter
from itertools import pairwise
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import replays, workloads
from benchmarks.results import Result
from benchmarks.workloads import Asks, computer_use, image_service
from vllm_mmcache.exactness.conversations import user
from vllm_mmcache.prove import workloads as prove


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sizes of the pictures that were asked for; none is drawn, but each is another one."""
    sizes: list[tuple[int, int]] = []

    def url_of(kind: Any, number: int) -> str:
        sizes.append(kind.size)
        return f"data:picture {number}"

    monkeypatch.setattr(workloads, "url_of", url_of)
    return sizes


def put(asks: Asks, text: str = "answer") -> list[list[Any]]:
    asked: list[list[Any]] = []

    def ask(tag: bool | str, conversation: list[Any]) -> Any:
        assert tag is True
        asked.append(conversation)
        return SimpleNamespace(text=text)

    list(prove.put(ask, asks))
    return asked


@pytest.mark.slow
def test_the_image_service_has_the_shape_of_its_trace(drawn: list[tuple[int, int]]) -> None:
    asked = put(image_service(4000, again=0.0))
    counts = sorted(len(replays.pictures_of(conversation)) for conversation in asked)
    assert 0.78 < counts.count(1) / len(counts) < 0.82
    assert quantiles(counts, n=100)[98] == 9
    assert 1.5 < mean(counts) < 1.75
    tokens = [width * height / 1024 for width, height in drawn]
    assert 520 < median(tokens) < 560
    assert 1150 < quantiles(tokens, n=100)[98] <= max(tokens) <= 1300
    words = [len(conversation[-1]["content"][-1]["text"].split()) for conversation in asked]
    assert 95 < median(words) < 120
    assert 1500 < quantiles(words, n=10)[8] <= max(words) <= 1920


@pytest.mark.slow
def test_images_come_again_as_often_as_is_said(drawn: list[tuple[int, int]]) -> None:
    new = [len(set(map(str, replays.pictures_of(one)))) for one in put(image_service(500, again=0.0))]
    assert len(drawn) == sum(new)
    drawn.clear()
    asked = put(image_service(500, again=0.5))
    shown = sum(len(replays.pictures_of(one)) for one in asked)
    assert 0.4 < len(drawn) / shown < 0.6
    assert put(image_service(500, again=0.5)) == asked, "the same for every side"
    assert put(image_service(500, again=0.5, seed=1)) != asked


@pytest.mark.parametrize("live", [1, 3, 5])
def test_computer_use_keeps_its_last_screenshots(live: int, drawn: list[tuple[int, int]]) -> None:
    asked = put(computer_use(12, live))
    assert [len(replays.pictures_of(one)) for one in asked] == [min(live, step + 1) for step in range(12)]
    assert len(drawn) == 12, "a new one each step"
    for before, after in pairwise(asked):
        assert replays.pictures_of(after)[-1] not in replays.pictures_of(before)
    gone = [part["text"] for part in replays.parts_of(asked[-1]) if part.get("text", "").startswith("[screenshot")]
    assert gone == [f"[screenshot {step} removed]" for step in range(12 - live)]
    assert asked[5][: 2 + 2 * (6 - live)] == asked[6][: 2 + 2 * (6 - live)], "what is before the oldest live one stays"
    assert put(computer_use(12, live), "other")[3] != asked[3], "the answer is part of what is asked next"


@pytest.mark.parametrize("live", [1, 3])
def test_screenshots_are_removed_several_at_once(live: int, drawn: list[tuple[int, int]]) -> None:
    """Between two removals a prompt begins with the whole of the one before it."""
    asked = put(computer_use(14, live, removed_at_once=5))
    assert [len(replays.pictures_of(one)) for one in asked] == [
        step + 1 - (step + 1 - live) // 5 * 5 if step >= live else step + 1 for step in range(14)
    ]
    grown = [after[: len(before)] == before for before, after in pairwise(asked)]
    assert [step for step, has in enumerate(grown, 1) if not has] == [live + 4, live + 9]
    one_by_one = put(computer_use(14, live))
    assert sum(after[: len(before)] == before for before, after in pairwise(one_by_one)) == live - 1


def test_prompts_at_once_are_of_one_kind() -> None:
    asks = ((tag, [number]) for number, tag in enumerate(["a", "b", "a", False, "b", "a", "a", "b"]))
    assert list(workloads.at_once(asks, 2)) == [  # type: ignore[arg-type]
        ("a", [[0], [2]]), ("b", [[1], [4]]), ("a", [[5], [6]])
    ]  # fmt: skip


class Engine:
    """A stand-in that caches nothing and answers with one token; a word is a token, an image four."""

    block_tokens = 2

    def ask(self, messages: list[Any], max_tokens: int) -> list[Any]:
        parts = replays.parts_of(messages)
        words = " ".join(part["text"] if part["type"] == "text" else "# # # #" for part in parts).split()
        ids = tuple(0 if word == "#" else sum(word.encode()) for word in words)
        return [SimpleNamespace(prompt_ids=ids, token_ids=(7,), num_cached_tokens=0, text="")]

    def image_spans(self, answer: Any) -> list[tuple[int, int]]:
        starts = [at for at, one in enumerate(answer.prompt_ids) if one == 0][::4]
        return [(start, start + 4) for start in starts]


def test_the_best_possible() -> None:
    """A shared prefix in whole blocks, and images count by their pixels."""
    from vllm_mmcache.exactness.conversations import picture

    cat, dog = picture(1, (8, 8)), picture(2, (8, 8))
    asked = [
        user("a b c", cat, "d"),
        user("a b c", cat, "e"),  # 7 are the same
        user("a b c", dog, "d"),  # 3 are
        user("a b c", cat, "d"),  # all the same, less the last token: 7
        user("a b c", cat, dog),  # 7
    ]

    def asks() -> Asks:
        for number, message in enumerate(asked):
            yield number > 0 and "case", [message]

    work = SimpleNamespace(done=Counter())
    found = replays.requests(Engine(), work, asks(), 1)  # type: ignore[arg-type]
    assert [one["best_tokens"] for one in found] == [0, 6, 2, 6, 6]
    assert [one["tag"] for one in found] == [False, *["case"] * 4]


def test_numbers_of_a_case() -> None:
    def asked(time_s: float, answer: int, tag: bool | str = True) -> dict[str, Any]:
        return {**dict.fromkeys(replays.COUNTED, 3), "tag": tag, "time_s": time_s, "answer": [answer]}

    result = Result()
    sides = {
        "stock": [asked(99.0, 0, False), asked(1.0, 1), asked(3.0, 2)],
        "mmcache": [asked(99.0, 5, False), asked(0.5, 1), asked(0.5, 3)],
    }
    replays.add(result, "gemma3, again", sides)
    found = result.found["gemma3, again"]
    assert found["time_s"] == {"stock": 2.0, "mmcache": 0.5}
    assert found["tower_runs"] == {"stock": 6, "mmcache": 6}
    assert found["other_answers"] == {"mmcache": 1}
    assert found["pairs_ratio"] == {"mmcache": (0.5 / 1.0 + 0.5 / 3.0) / 2}, "each by the same request of stock"
    assert found["requests"] == {"stock": 2, "mmcache": 2}
    replays.add(result, "gemma3", {side: [asked(1.0, 0, ""), asked(2.0, 1, "kind")] for side in ("stock", "mmcache")})
    assert result.found["gemma3, kind"]["time_s"] == {"stock": 2.0, "mmcache": 2.0}, "of the case that is named"
    assert set(result.found) == {"gemma3, again", "gemma3, kind"}


def test_cold_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture comes twice, and a first round of the four cases does not count."""
    monkeypatch.setattr(workloads, "picture", lambda number, size: (number, size))
    monkeypatch.setattr(workloads, "user", lambda *parts: parts)
    asked = list(workloads.cold("gemma3", 1))
    pictures = [part[0] for _, (parts,) in asked for part in parts if isinstance(part, tuple)]
    assert [bool(tag) for tag, _ in asked] == [False] * 4 + [True] * 4
    assert len({tag for tag, _ in asked if tag}) == 4
    assert len(set(pictures)) == len(pictures) == 2 * 2 * (1 + 4)
    later = [parts for _, (parts,) in workloads.cold("gemma3", 16, workloads.AT_ONCE_FROM)]
    assert not {part[0] for parts in later for part in parts if isinstance(part, tuple)} & set(pictures)
    assert not {parts[0] for parts in later} & {parts[0] for _, (parts,) in asked}


def test_options_reach_the_cases() -> None:
    options = Namespace(windows=[3], steps=2, removed_at_once=[1, 5])
    named = ["3 live", "3 live, removed 5 at once"]
    assert list(replays.REPLAYS["computer_use"].asks(options, "qwen3-vl")) == named
