# SPDX-License-Identifier: Apache-2.0
"""The conversations whose answers must be those of a cold run, whatever the caches hold.

Each scenario puts its questions to an engine that starts cold, asserts what must hit and what must miss, and
returns the answers; `ZooRig.assert_exact` compares them with the oracle. Pictures are small (64 tokens each) and the
text before them fills more than one block, also the 160-token block of qwen3.5 where a hit is demanded.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

from PIL import Image

from mmcache_tools.harness.engines import ZooRig
from vllm_mmcache.exactness.answers import Answer, Message
from vllm_mmcache.exactness.conversations import assistant, filler, one, picture, user

Scenario = Callable[[ZooRig], list[Answer]]


def full_blocks(rig: ZooRig, num_tokens: int) -> int:
    """`num_tokens` rounded down to complete KV blocks, in tokens."""
    return num_tokens // rig.block_tokens * rig.block_tokens


def num_shared(one_answer: Answer, other: Answer) -> int:
    """Length in tokens of the common prefix of two prompts; meaningful where their pictures are equal."""
    pairs = zip(one_answer.prompt_ids, other.prompt_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def same_again(rig: ZooRig) -> list[Answer]:
    """Cold, then the same request once more, which must hit."""
    ask = user(filler(180), picture(0), "What is in this picture?" + filler(20))
    cold = one(rig, ask)
    again = one(rig, ask)
    assert cold.num_cached_tokens == 0
    assert again.num_cached_tokens > 0
    if rig.keeps_all_kv:
        assert again.num_cached_tokens >= rig.image_spans(again)[0][1] // rig.block_tokens * rig.block_tokens
    assert again.token_ids == cold.token_ids
    return [cold, again]


def text_only(rig: ZooRig) -> list[Answer]:
    """No picture at all, twice: the tools and the text model are right even where pictures are not."""
    ask = user("Compare the two." + filler(200))
    answers = [one(rig, ask), one(rig, ask)]
    assert answers[1].num_cached_tokens > 0
    return answers


def text_turn(rig: ZooRig) -> list[Answer]:
    """A text turn follows a picture, then one more."""
    turns = [user(filler(100), picture(1), "Describe it." + filler(80))]
    answers = [one(rig, *turns)]
    for question in ("How many of them can you see?", "And what is at the edge?" + filler(30)):
        turns += [assistant(answers[-1].text), user(question)]
        answers.append(one(rig, *turns))
        if rig.keeps_all_kv:
            assert answers[-1].num_cached_tokens >= full_blocks(rig, rig.image_spans(answers[-1])[0][1])
    return answers


def image_on_later_turn(rig: ZooRig) -> list[Answer]:
    """The second and third turn bring a picture each."""
    turns = [user("You look at pictures." + filler(150))]
    answers = [one(rig, *turns)]
    for number in (2, 3):
        turns += [assistant(answers[-1].text), user("Here is one:", picture(number), "What is it?" + filler(20))]
        answers.append(one(rig, *turns))
        if rig.keeps_all_kv:
            assert answers[-1].num_cached_tokens > 0
    return answers


def other_image_after_cached(rig: ZooRig) -> list[Answer]:
    """Picture A is cached; then A and B are compared, then A and A. Reported against vLLM as 'identical'."""
    first = user(filler(120), picture(4), "Describe the image." + filler(40))
    answers = [one(rig, first)]
    turns = [first, assistant(answers[0].text)]
    question = "Are the two images identical? Answer yes or no."
    different = one(rig, *turns, user(picture(5), question))
    identical = one(rig, *turns, user(picture(4), question))
    second = rig.image_spans(identical)[1]
    assert identical.num_cached_tokens <= second[0], "blocks of picture B were taken for A"
    assert identical.token_ids != different.token_ids
    return [*answers, different, identical]


def swapped_image(rig: ZooRig) -> list[Answer]:
    """Another picture of equal size in the same place must miss from its start on, and back again hit."""

    def ask(image: Image.Image) -> Answer:
        return one(rig, user(filler(170), image, "What is in this picture?" + filler(40)))

    first, second, third = ask(picture(6)), ask(picture(7)), ask(picture(6))
    start = rig.image_spans(second)[0][0]
    assert second.num_cached_tokens <= start, f"{second.num_cached_tokens} cached, the new picture starts at {start}"
    if rig.keeps_all_kv:
        assert second.num_cached_tokens > 0
        assert third.num_cached_tokens > start
    return [first, second, third]


def swapped_order(rig: ZooRig) -> list[Answer]:
    """A, B and then B, A: a miss from the first picture on."""

    def ask(*images: Image.Image) -> Answer:
        return one(rig, user(filler(60), images[0], "before", images[1], "after" + filler(60)))

    forward, backward = ask(picture(8), picture(9)), ask(picture(9), picture(8))
    assert backward.num_cached_tokens <= rig.image_spans(backward)[0][0]
    assert forward.token_ids != backward.token_ids
    return [forward, backward]


def same_image_twice(rig: ZooRig) -> list[Answer]:
    """One picture twice in a prompt, next to each other and apart, then only once."""
    a = picture(10)
    near = user(filler(50), a, a, "Compare." + filler(30))
    apart = user(filler(50), a, filler(20), a, "Compare." + filler(30))
    single = user(filler(50), a, "Compare." + filler(30))
    return [one(rig, ask) for ask in (near, apart, near, single)]


def transposed_image(rig: ZooRig) -> list[Answer]:
    """30x100 and 100x30 pixels of equal raw bytes are two pictures."""
    raw = b"".join(hashlib.sha256(bytes([i % 251, i // 251])).digest() for i in range(30 * 100 * 3 // 32 + 1))
    tall = Image.frombytes("RGB", (30, 100), raw[: 30 * 100 * 3])
    wide = Image.frombytes("RGB", (100, 30), raw[: 30 * 100 * 3])
    assert tall.tobytes() == wide.tobytes()
    answers = [one(rig, user(filler(80), image, "Which?" + filler(80))) for image in (tall, wide, tall)]
    assert answers[1].num_cached_tokens <= rig.image_spans(answers[1])[0][0]
    return answers


def ends_around_block_edge(rig: ZooRig) -> list[Answer]:
    """The picture ends at a block's edge, one token to either side, and in the middle; each cold, hit, swapped."""
    block = rig.block_tokens
    probe_prompt, probe_images = rig.render([user("See" + filler(1), picture(11), "So?")])
    probe = rig.oracle.encode(probe_prompt, probe_images)["input_ids"][0].tolist()
    end = len(probe) - probe[::-1].index(rig.image_token_id)
    answers = []
    for remainder in (0, 1, block // 2, block - 1):
        num_words = 1 + (remainder - end) % block
        first = one(rig, user("See" + filler(num_words, remainder), picture(11), "So?"))
        assert rig.image_spans(first)[0][1] % block == remainder
        question = "And what else?" + filler(40)
        hit = one(rig, user("See" + filler(num_words, remainder), picture(11), question))
        swapped = one(rig, user("See" + filler(num_words, remainder), picture(12), question))
        if rig.keeps_all_kv:
            assert hit.num_cached_tokens == full_blocks(rig, num_shared(first, hit))
        assert swapped.num_cached_tokens <= rig.image_spans(swapped)[0][0]
        answers += [first, hit, swapped]
    return answers


def eight_at_once(rig: ZooRig) -> list[Answer]:
    """Eight requests in one batch: shared prefixes, a duplicate, other pictures, other lengths; then all again."""
    shared = filler(90)
    asks = [
        [user(shared, picture(13), "One." + filler(10))],
        [user(shared, picture(14), "One." + filler(10))],
        [user(shared, picture(13), "Two." + filler(50))],
        [user(shared, picture(13), "One." + filler(10))],
        [user("Text only." + filler(140))],
        [user(picture(15, (300, 160)), picture(13), "Three.")],
        [user(shared, picture(13), "One."), assistant("a cat"), user(picture(14), "Four.")],
        [user(picture(14), picture(15, (300, 160)), "Five." + filler(120))],
    ]
    lengths = [4, 8, 12, 6, 9, 5, 7, 11]
    return rig.ask(*asks, max_tokens=lengths) + rig.ask(*asks[::-1], max_tokens=lengths)


def preempted(rig: ZooRig) -> list[Answer]:
    """More requests than the KV cache holds: some are preempted and computed again, blocks are evicted."""
    before = rig.num_preemptions()
    asks = [[user(picture(16 + i % 3), f"Go on.{filler(10 + i, i)}")] for i in range(8)]
    first = rig.ask(*asks, max_tokens=90)
    assert rig.num_preemptions() > before, "nothing was preempted: the KV cache is too large for this test"
    second = rig.ask(*asks[::-1], max_tokens=8)
    return first + second


def preempted_soon(rig: ZooRig) -> list[Answer]:
    """Prompts that end just before a block does: their answers want a block each at once, and there are too few."""

    def ask(number: int, num_words: int) -> list[Message]:
        return [user(picture(number % 3), "Go on." + filler(num_words, number))]

    prompt, images = rig.render(ask(0, 1))
    num_words = 1 + (-4 - len(rig.oracle.encode(prompt, images)["input_ids"][0])) % rig.block_tokens
    before = rig.num_preemptions()
    answers = rig.ask(*(ask(number, num_words) for number in range(5)), max_tokens=8)
    assert {len(answer.prompt_ids) % rig.block_tokens for answer in answers} == {rig.block_tokens - 4}
    assert rig.num_preemptions() > before, "nothing was preempted: the KV cache is too large for this test"
    return answers


MAIN: tuple[Scenario, ...] = (
    same_again, text_only, text_turn, image_on_later_turn, other_image_after_cached, swapped_image, swapped_order,
    same_image_twice, transposed_image, ends_around_block_edge, eight_at_once,
)  # fmt: skip
