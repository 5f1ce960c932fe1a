# SPDX-License-Identifier: Apache-2.0
"""The model that sees, on the engine: right words cold, the same words from the caches, wrong words from wrong images.

A cold run has a cache salt of its own, which keeps its KV blocks and its images apart from all others'. The negative
controls break the identity of images on purpose; the answers then name what is in another picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.oracle import step_deltas
from mmcache_tools.harness.tolerances import TOLERANCE
from mmcache_tools.zoo.seeing.pictures import Thing, stream
from mmcache_tools.zoo.seeing.prompts import SYSTEMS, Conversation, Turn, converse, held_out, right_answer

from vllm_mmcache.exactness.answers import Answer

pytestmark = pytest.mark.engine

SEEING = EngineConfig("seeing", num_seqs=64)
SHARE_RIGHT = 0.98
NUM_HELD_OUT = 500
NUM_PAIRS = 200
_SALTS = (f"cold {number}" for number in itertools.count())


def ask(rig: ZooRig, asked: Sequence[Conversation], cold: bool = False) -> list[Answer]:
    """An answer to each, as long as the right one and its end of turn; submitted together."""
    tokenizer = rig.oracle.processor.tokenizer
    lengths = [len(tokenizer(one.answer)["input_ids"]) + 1 for one in asked]
    salts = [next(_SALTS) for _ in asked] if cold else None
    answers = rig.ask_rendered([rig.render(one.messages()) for one in asked], lengths, salts)
    if cold:
        assert not any(answer.num_cached_tokens for answer in answers)
    return answers


def words(rig: ZooRig, answer: Answer) -> str | None:
    """What was said up to the end of the turn; None if it was not ended."""
    tokenizer = rig.oracle.processor.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if end not in answer.token_ids:
        return None
    return str(tokenizer.decode(answer.token_ids[: answer.token_ids.index(end)]))


def rights(rig: ZooRig, asked: Sequence[Conversation], answers: Sequence[Answer]) -> list[bool]:
    return [words(rig, answer) == one.answer for one, answer in zip(asked, answers, strict=True)]


def test_names_what_it_sees(pool: EnginePool) -> None:
    rig = pool.get(SEEING)
    asked = [held_out(number) for number in range(NUM_HELD_OUT)]
    right = rights(rig, asked, ask(rig, asked, cold=True))
    print(f"{sum(right)} of {len(right)} right")
    assert sum(right) >= SHARE_RIGHT * NUM_HELD_OUT


def pairs(name: str) -> list[tuple[Conversation, Conversation]]:
    """An earlier question about a picture A, and a later one about A and a new picture B.

    In half of them B comes in the next turn, else beside A in the same. After the long system prompt A is at tokens 56
    to 65, so all but the last of its tokens are in blocks of 32 that are full before B.
    """
    made = []
    for number in range(NUM_PAIRS):
        random = stream(name, number)
        if number % 2:
            later = converse(random, ["name", "with_last"], SYSTEMS[1])
            earlier = Conversation(later.turns[:1], SYSTEMS[1])
        else:
            later = converse(random, ["both"], SYSTEMS[1])
            both = later.turns[0]
            alone = Turn("What is in the picture?", both.pictures[:1], str(both.things[0]), both.things[:1])
            earlier = Conversation((alone,), SYSTEMS[1])
        made.append((earlier, later))
    return made


def test_cached_picture_and_new_picture(pool: EnginePool) -> None:
    """200 pairs: picture A from the caches, then A and B compared; word for word and to 1e-3 as cold."""
    rig = pool.get(SEEING)
    earlier, later = zip(*pairs("semantic"), strict=True)
    assert all(rights(rig, earlier, ask(rig, earlier)))
    cached = ask(rig, later)
    for answer in cached:
        (_, end_of_a), *_ = rig.image_spans(answer)
        assert answer.num_cached_tokens >= end_of_a // rig.block_tokens * rig.block_tokens > 0
    cold = ask(rig, later, cold=True)
    assert [answer.token_ids for answer in cached] == [answer.token_ids for answer in cold]
    deltas = [
        abs(value - step[token])
        for one, other in zip(cached, cold, strict=True)
        for mine, step in zip(one.logprobs, other.logprobs, strict=True)
        for token, value in mine.items()
        if token in step
    ]
    assert len(deltas) > NUM_PAIRS * 8
    right = rights(rig, later, cached)
    print(f"{sum(right)} of {NUM_PAIRS} right, largest |delta logprob| {max(deltas):.1e}")
    assert max(deltas) <= TOLERANCE
    assert right == rights(rig, later, cold)
    assert sum(right) >= SHARE_RIGHT * NUM_PAIRS


def assert_as_cold(rig: ZooRig, asked: Sequence[Conversation]) -> None:
    """Without what a negative control has broken, all is well."""
    right = rights(rig, asked, ask(rig, asked))
    assert right == rights(rig, asked, ask(rig, asked, cold=True))
    assert sum(right) > 0.9 * len(right)


def named_first(conversation: Conversation) -> Thing:
    return conversation.turns[0].things[0]


def test_block_keys_without_images_give_wrong_words(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with images left out of the block keys, picture A is named as the one that was cached."""
    from vllm_mmcache.components.block_keys.hasher import BlockHasher

    rig = pool.get(SEEING)
    monkeypatch.setattr(BlockHasher, "_image_extras", lambda self, request, start, num_blocks: [b""] * num_blocks)
    asked = [converse(stream("blind keys", number), ["both"], SYSTEMS[1]) for number in range(60)]
    poison = converse(stream("blind keys"), ["both"], SYSTEMS[1])
    assert all(rights(rig, [poison], ask(rig, [poison])))
    others = [one for one in asked if named_first(one) != named_first(poison)]
    assert len(others) > 50
    answers = ask(rig, others)
    assert all(answer.num_cached_tokens >= 64 for answer in answers)
    said = [words(rig, answer) or "" for answer in answers]
    right = rights(rig, others, answers)
    wrong_name = [text.startswith(f"{named_first(poison)}, ") for text in said]
    print(f"{sum(right)} of {len(right)} right, {sum(wrong_name)} name the cached picture: {said[0]!r}")
    assert sum(right) <= 0.1 * len(right)
    assert sum(wrong_name) >= 0.8 * len(right)
    monkeypatch.undo()
    rig = pool.get(SEEING)
    assert_as_cold(rig, others)


def test_one_identity_for_all_images_gives_wrong_words(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with one digest for all images, everything is what was seen first, and the same."""
    from vllm.multimodal.hasher import MultiModalHasher

    rig = pool.get(SEEING)
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", classmethod(lambda cls, *args, **kwargs: "0" * 64))
    first = converse(stream("one identity"), ["name"])
    assert all(rights(rig, [first], ask(rig, [first])))
    seen = named_first(first)
    every = [converse(stream("one identity", number), ["both"]) for number in range(60)]
    asked = [one for one in every if seen not in one.turns[0].things]
    assert len(asked) > 50
    said = [words(rig, answer) for answer in ask(rig, asked)]
    print(f"{said[0]!r} in place of {asked[0].answer!r}")
    assert not any(rights(rig, asked, ask(rig, asked)))
    wrong = right_answer("both", [seen, seen])
    assert sum(text == wrong for text in said) >= SHARE_RIGHT * len(said)
    monkeypatch.undo()
    rig = pool.get(SEEING)
    assert_as_cold(rig, asked)


def test_transformers_says_the_same(pool: EnginePool) -> None:
    """The engine's log-probabilities are those of Transformers, also with trained weights."""
    rig = pool.get(SEEING)
    asked = [held_out(number) for number in range(12)]
    answers = ask(rig, asked, cold=True)
    worst = 0.0
    for answer in answers:
        _, expected = rig.oracle.log_probabilities(answer.prompt, answer.images, answer.token_ids)
        worst = max(worst, *step_deltas(answer, expected))
        assert expected.argmax(-1).tolist() == list(answer.token_ids)
    print(f"largest |delta logprob| {worst:.1e}")
    assert worst <= TOLERANCE
