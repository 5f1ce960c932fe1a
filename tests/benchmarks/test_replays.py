# SPDX-License-Identifier: Apache-2.0
"""The replays have the shape of their traces, ask every side the same, and are counted rightly."""

from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import engines, replays, workloads
from benchmarks.results import Result
from benchmarks.workloads import Asks, Mark, computer_use, image_service, marked
from vllm_mmcache.prove.scenarios import user

ANSWER: Any = SimpleNamespace(text="answer")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sizes of the pictures that were asked for; none is drawn, but each is another one."""
    sizes: list[tuple[int, int]] = []

    def url_of(kind: Any, number: int) -> str:
        sizes.append(kind.size)
        return f"picture {number}"

    monkeypatch.setattr(workloads, "url_of", url_of)
    return sizes


def put(asks: Asks, text: str = "answer") -> Iterator[list[Any]]:
    mark, conversation = next(asks)
    while True:
        assert mark.counts
        yield conversation
        try:
            mark, conversation = asks.send(SimpleNamespace(text=text))  # type: ignore[arg-type]
        except StopIteration:
            return


def test_the_image_service_has_the_shape_of_its_trace(drawn: list[tuple[int, int]]) -> None:
    asked = list(put(image_service(4000, again=0.0)))
    counts = sorted(len(engines.pictures_of(conversation)) for conversation in asked)
    assert 0.78 < counts.count(1) / len(counts) < 0.82
    assert quantiles(counts, n=100)[98] == 9
    assert 1.5 < mean(counts) < 1.75
    tokens = [width * height / 1024 for width, height in drawn]
    assert 520 < median(tokens) < 560
    assert 1150 < quantiles(tokens, n=100)[98] <= max(tokens) <= 1300
    words = [len(conversation[-1]["content"][-1]["text"].split()) for conversation in asked]
    assert 95 < median(words) < 120
    assert 1500 < quantiles(words, n=10)[8] <= max(words) <= 1920


def test_images_come_again_as_often_as_is_said(drawn: list[tuple[int, int]]) -> None:
    new = [len(set(map(str, engines.pictures_of(one)))) for one in put(image_service(500, again=0.0))]
    assert len(drawn) == sum(new)
    drawn.clear()
    asked = list(put(image_service(500, again=0.5)))
    shown = sum(len(engines.pictures_of(one)) for one in asked)
    assert 0.4 < len(drawn) / shown < 0.6
    assert list(put(image_service(500, again=0.5))) == asked, "the same for every side"
    assert list(put(image_service(500, again=0.5, seed=1))) != asked


@pytest.mark.parametrize("live", [1, 3, 5])
def test_computer_use_keeps_its_last_screenshots(live: int, drawn: list[tuple[int, int]]) -> None:
    asked = list(put(computer_use(12, live)))
    assert [len(engines.pictures_of(one)) for one in asked] == [min(live, step + 1) for step in range(12)]
    assert len(drawn) == 12, "a new one each step"
    for before, after in pairwise(asked):
        assert engines.pictures_of(after)[-1] not in engines.pictures_of(before)
    gone = [part["text"] for part in engines.parts_of(asked[-1]) if part.get("text", "").startswith("[screenshot")]
    assert gone == [f"[screenshot {step} removed]" for step in range(12 - live)]
    assert asked[5][: 2 + 2 * (6 - live)] == asked[6][: 2 + 2 * (6 - live)], "what is before the oldest live one stays"
    assert list(put(computer_use(12, live), "other"))[3] != asked[3], "the answer is part of what is asked next"


class Engine:
    """A stand-in that caches nothing and answers with one token; a word is a token, an image four."""

    block_tokens = 2
    added_bos = ""

    def render(self, messages: list[Any]) -> tuple[str, tuple[Any, ...]]:
        parts = engines.parts_of(messages)
        text = " ".join(part["text"] if part["type"] == "text" else "# # # #" for part in parts)
        return text, tuple(part["image"] for part in parts if part["type"] == "image")

    def ask_rendered(self, rendered: Any, lengths: Any, salts: Any) -> list[Any]:
        ((text, images),) = rendered
        ids = tuple(0 if word == "#" else sum(word.encode()) for word in text.split())
        return [SimpleNamespace(prompt_ids=ids, images=images, token_ids=(7,), num_cached_tokens=0, text="")]

    def image_spans(self, answer: Any) -> list[tuple[int, int]]:
        starts = [at for at, one in enumerate(answer.prompt_ids) if one == 0][::4]
        return [(start, start + 4) for start in starts]


def test_the_best_possible() -> None:
    """A shared prefix in whole blocks, of the same tenant, and images count by their pixels."""
    from vllm_mmcache.prove.scenarios import picture

    cat, dog = picture(1, (8, 8)), picture(2, (8, 8))
    asked = [
        (None, user("a b c", cat, "d")),
        (None, user("a b c", cat, "e")),  # 7 are the same
        (None, user("a b c", dog, "d")),  # 3 are
        ("other", user("a b c", cat, "d")),  # nobody of this tenant was here
        ("other", user("a b c", cat, "d")),  # all the same, less the last token: 7
        ("other", user("a b c", cat, dog)),  # 7, but another set of images
    ]

    def asks() -> Asks:
        for number, (salt, message) in enumerate(asked):
            yield Mark(number > 0, salt, "case"), [message]

    work = SimpleNamespace(tower_runs=0, decodes=0)
    found = list(engines.requests(Engine(), work, asks(), 1))  # type: ignore[arg-type]
    assert [one["best_tokens"] for one in found] == [0, 6, 2, 0, 6, 6]
    assert [one["whole_request_tokens"] for one in found] == [0, 6, 0, 0, 6, 0]
    assert [one["counts"] for one in found] == [False, *[True] * 5]


def test_numbers_of_a_case() -> None:
    def asked(time_s: float, answer: int, counts: bool = True) -> dict[str, Any]:
        one = dict.fromkeys(replays.COUNTED, 3)
        return {**one, "counts": counts, "case": "", "time_s": time_s, "answer": [answer], "counters": {"hits": 1.0}}

    result = Result()
    sides = {
        "stock": [asked(99.0, 0, counts=False), asked(1.0, 1), asked(3.0, 2)],
        "mmcache": [asked(99.0, 5, counts=False), asked(0.5, 1), asked(0.5, 3)],
    }
    replays.add(result, "gemma3, again", sides)
    found = result.found["gemma3, again"]
    assert found["time_s"] == {"stock": 2.0, "mmcache": 0.5}
    assert found["tower_runs"] == {"stock": 6, "mmcache": 6}
    assert found["other_answers"] == {"mmcache": 1}
    assert result.details["gemma3, again"]["counters"] == {"hits": 2.0}


def test_questions_are_marked() -> None:
    def questions() -> Any:
        yield False, ["first"]
        yield True, ["again"]

    asks = marked(questions())
    assert next(asks) == (Mark(False), ["first"])
    assert asks.send(ANSWER) == (Mark(True), ["again"])
    with pytest.raises(StopIteration):
        asks.send(ANSWER)


def test_cold_prompts_and_rooms_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each room is off in its own variant alone, and one that is off by itself stays off."""
    from vllm_mmcache import rooms

    monkeypatch.setattr(workloads, "picture", lambda number, size: (number, size))
    monkeypatch.setattr(workloads, "user", lambda *parts: parts)
    monkeypatch.setattr(rooms, "_is_on", {"features": True, "image_checkpoints": False})
    seen, pictures = set(), []
    for mark, (parts,) in workloads.rooms_in_turn("gemma3", 1, replays.ROOMS):
        seen.add((mark.counts, mark.case.split(", ")[2], rooms._is_on["features"], rooms._is_on["image_checkpoints"]))
        pictures += [part[0] for part in parts if isinstance(part, tuple)]
    variants = {("all rooms", True), ("without features", False), ("without image_checkpoints", True)}
    assert seen == {(counts, name, on, False) for counts in (False, True) for name, on in variants}
    assert len(set(pictures)) == len(pictures) == 3 * 2 * 2 * (1 + 4)


def test_options_reach_the_cases() -> None:
    wanted = replays.REPLAYS["computer_use"].wanted
    assert [case for case in replays.REPLAYS["computer_use"].cases if wanted(Namespace(windows=[3]), case)] == [
        "3 live"
    ]
    wanted = replays.REPLAYS["image_questions"].wanted
    assert not wanted(Namespace(unique=0), "every picture once, KV for a tenth")
