# SPDX-License-Identifier: Apache-2.0
"""What each side does for requests that are small enough to be counted by hand."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.traffic.logs import Request, chat, image, said, text, user
from vllm_mmcache.traffic import estimate as estimates
from vllm_mmcache.traffic.estimate import TURN_TOKENS, Distances, Estimate, Lru, Sizes
from vllm_mmcache.traffic.models import MODELS, Model
from vllm_mmcache.traffic.requests import prompt_of

IMAGE_TOKENS = 10
FULL = Model("tiny", fixed=IMAGE_TOKENS, feature_bytes=100)
WINDOWS = replace(FULL, keeps_all_kv=False)
ROOMY = Sizes(block_tokens=1)


def played(requests: list[Request], model: Model = FULL, sizes: Sizes = ROOMY) -> Estimate:
    estimate = Estimate(model, sizes)
    estimate.add_all(prompt_of(one) for one in requests)
    return estimate


def counts(estimate: Estimate) -> dict[str, tuple[int, int, int, int]]:
    """Decoded, processed, encoded and reused, by side."""
    return {
        side: (done.decoded, done.processed, done.encoded, done.reused_tokens) for side, done in estimate.done.items()
    }


def conversation(*images: int, name: str = "a", **more: Any) -> list[Request]:
    """Turns, each with one more picture."""
    requests, messages = [], list[Request]()
    for number in images:
        messages.append(user(image(number), text(f"{name * 8}")))
        requests.append(chat(*messages, **more))
        messages.append(said("12345678"))
    return requests


TURN = TURN_TOKENS + 1 + IMAGE_TOKENS + 2
"""Tokens of a user's turn, with the role's name; of an answer, TURN_TOKENS + 2 + 2."""


def test_a_conversation_that_grows() -> None:
    estimate = played(conversation(1, 2, 3))
    reused = TURN + (2 * TURN + TURN_TOKENS + 4)
    assert counts(estimate) == {"stock": (6, 3, 3, reused), "mmcache": (3, 3, 3, reused)}
    seen = estimate.seen
    assert (seen.requests, seen.conversations, seen.images, seen.new, seen.in_conversation) == (3, 1, 6, 3, 3)
    assert (seen.grown, seen.rewritten) == (2, 0)


def test_another_conversation_about_the_same_pictures() -> None:
    estimate = played(conversation(1, 2) + conversation(1, 2, name="b"))
    assert (estimate.seen.conversations, estimate.seen.across_conversations) == (2, 2)
    assert counts(estimate)["mmcache"][:3] == (2, 2, 2)


def test_tenants_share_nothing() -> None:
    estimate = played(conversation(1, cache_salt="a") + conversation(1, cache_salt="b"))
    assert (estimate.seen.across_tenants, len(estimate.seen.tenants)) == (1, 2)
    assert counts(estimate)["mmcache"] == (2, 2, 2, 0)
    assert counts(estimate)["stock"] == (2, 1, 1, 0)


def test_another_picture_in_its_place_is_no_hit() -> None:
    same, other = (
        played([chat(user(image(number), text("aaaa"))) for number in numbers]) for numbers in ((1, 1), (1, 2))
    )
    assert counts(same)["stock"][3] == TURN_TOKENS + 1 + IMAGE_TOKENS
    assert counts(other)["stock"][3] == TURN_TOKENS + 1


def test_a_hit_ends_where_texts_begin_to_differ() -> None:
    """As far as the last text at that place is still cached; a prompt is never reused to its last token."""
    words = ["Question 1? " + "a" * 40, "Question 2? " + "a" * 40]
    requests = [chat(user(image(1), text(one))) for one in words]
    beginning = TURN_TOKENS + 1 + IMAGE_TOKENS
    alike = round(len("Question ") / 4)
    assert counts(played(requests))["stock"][3] == beginning + alike
    assert counts(played(requests[:1] * 2))["stock"][3] == beginning + len(words[0]) // 4 - 1
    small = replace(ROOMY, kv_tokens=beginning)
    assert counts(played(requests, sizes=small))["stock"][3] == beginning
    assert counts(played([requests[0], chat(user(image(1), text("x" * 40))), requests[1]]))["stock"][3] == 2 * beginning


def test_tokens_around_an_image_are_of_the_prompt_alone() -> None:
    """The vision tower makes none of them."""
    with_marks = replace(FULL, mark_tokens=3)
    one, other = (played(conversation(1, 2), model) for model in (FULL, with_marks))
    assert other.seen.prompt_tokens - one.seen.prompt_tokens == 3 * 3
    assert other.seen.image_tokens == one.seen.image_tokens
    assert other.done["stock"].encoded_tokens == one.done["stock"].encoded_tokens


def test_a_window_that_drops_the_first_picture() -> None:
    whole = conversation(1, 2)[-1]
    dropped = chat(user(text("(an older picture)"), text("a" * 8)), *whole["messages"][1:])
    estimate = played([whole, chat(whole["messages"][0], said("x")), dropped])
    seen = estimate.seen
    assert (seen.conversations, seen.grown, seen.rewritten, seen.dropped) == (1, 0, 2, 2)
    reworded = chat(*dropped["messages"][:-1], user(image(2), text("b" * 8)))
    assert (played([whole, dropped, reworded]).seen.rewritten, played([dropped, reworded]).seen.dropped) == (2, 0)


def test_a_window_that_drops_the_oldest_turns() -> None:
    """As many agents' do; the control is another conversation in the same words about other pictures."""
    longer, other = (conversation(*pictures)[-1]["messages"] for pictures in ((1, 2, 3), (4, 5, 6)))
    seen = played([chat(*longer[:3]), chat(*longer[2:])]).seen
    assert (seen.conversations, seen.rewritten) == (2, 0), "nothing but one turn in common"
    seen = played([chat(*longer[:3]), chat(*longer[1:])]).seen
    assert (seen.conversations, seen.rewritten, seen.dropped, seen.in_conversation) == (1, 1, 1, 1)
    assert played([chat(*longer[:3]), chat(*other[1:])]).seen.conversations == 2


def test_hybrids_hit_at_ends_of_pictures_with_the_plugin_alone() -> None:
    """The second question about one picture."""
    requests = [chat(user(image(1), text(words))) for words in ("a" * 40, "b" * 40)]
    assert counts(played(requests, WINDOWS)) == {
        "stock": (2, 1, 1, 0),
        "mmcache": (1, 1, 1, TURN_TOKENS + 1 + IMAGE_TOKENS),
    }
    assert counts(played(requests, FULL))["stock"][3] == TURN_TOKENS + 1 + IMAGE_TOKENS


@pytest.mark.parametrize(("kv_tokens", "reused"), [(144, 0), (145, TURN_TOKENS + 1 + IMAGE_TOKENS)])
def test_recurrent_states_take_room_in_the_kv_cache(kv_tokens: int, reused: int) -> None:
    """Two prompts have 45 tokens together and leave two states of 20 each; and one state belongs to what runs."""
    requests = [chat(user(image(number), text(letter * 40))) for number, letter in ((1, "a"), (2, "b"), (1, "c"))]
    states = replace(WINDOWS, state_blocks=20)
    sizes = replace(ROOMY, kv_tokens=kv_tokens)
    assert counts(played(requests, states, sizes))["mmcache"][3] == reused
    assert counts(played(requests, WINDOWS, sizes))["mmcache"][3] == TURN_TOKENS + 1 + IMAGE_TOKENS


def test_a_state_that_is_used_outlives_one_that_is_not() -> None:
    """A picture is asked about again and again, and others once; its state stays."""
    states = replace(WINDOWS, state_blocks=20)
    sizes = replace(ROOMY, kv_tokens=180)
    requests = [chat(user(image(number), text(f"{number}" * 40))) for number in (1, 2, 1, 3, 1, 4, 1)]
    for place, request in enumerate(requests):
        request["messages"][0]["content"][1]["text"] = f"{place}" * 40
    assert counts(played(requests, states, sizes))["mmcache"][3] == 3 * (TURN_TOKENS + 1 + IMAGE_TOKENS)


def test_a_hit_renews_the_state_that_it_ends_at() -> None:
    """Also where no image and no prompt ends: what three requests begin with stays, what others leave goes."""
    beginning = text("a" * 40)
    asked = [[beginning], [text("x" * 80)], [beginning, text("b" * 40)], [text("y" * 80)], [beginning, text("c" * 40)]]
    requests = [chat(user(*parts)) for parts in asked]
    sizes = replace(ROOMY, kv_tokens=150)
    reused = played(requests, replace(WINDOWS, state_blocks=20), sizes).done["mmcache"].reused_tokens
    assert reused == 2 * (TURN_TOKENS + 1 + 10)


def test_stock_hits_where_it_has_stopped_before_to_find_a_state() -> None:
    """The third question about one picture: the second one has left a state where it differs from the first."""
    requests = [chat(user(image(1), text(letter * 40))) for letter in "abc"]
    beginning = TURN_TOKENS + 1 + IMAGE_TOKENS
    assert counts(played(requests, WINDOWS))["stock"][3] == beginning
    assert counts(played(requests, WINDOWS))["mmcache"][3] == 2 * beginning


@pytest.mark.parametrize("window_tokens", [24, 25])
def test_a_prompt_no_longer_than_the_window_is_kept_whole(window_tokens: int) -> None:
    requests = [chat(user(image(1), text(letter * 40))) for letter in "ab"]  # 25 tokens each
    reused = counts(played(requests, replace(WINDOWS, window_tokens=window_tokens)))["stock"][3]
    assert reused == (TURN_TOKENS + 1 + IMAGE_TOKENS if window_tokens == 25 else 0)


def test_a_hit_is_whole_blocks() -> None:
    """One that ends inside a picture needs the picture's features."""
    requests = [chat(user(image(1), text(letter * 40))) for letter in "ab"]
    for model in (FULL, WINDOWS):
        estimate = played(requests, model, Sizes(block_tokens=8, encoder_tokens=1))
        assert counts(estimate)["mmcache"][3] == 8
        assert list(estimate.distances.needed) == [IMAGE_TOKENS * FULL.feature_bytes]
    assert not played(requests, FULL, Sizes(block_tokens=5, encoder_tokens=1)).distances.needed


def test_the_plugin_asks_the_encoder_cache_first() -> None:
    """What lies there needs no store."""
    rounds = [chat(user(text(f"{turn}"), image(number))) for turn, number in product(range(3), range(4))]
    for encoder_tokens, encoded in (4 * IMAGE_TOKENS, 4), (3 * IMAGE_TOKENS, 12):
        estimate = played(rounds, sizes=Sizes(encoder_tokens=encoder_tokens, feature_bytes=0))
        assert [(done.encoded, done.encoded_tokens) for done in estimate.done.values()] == [
            (encoded, IMAGE_TOKENS * encoded)
        ] * 2


def test_an_image_under_its_uuid_alone_is_the_one_that_came_with_it() -> None:
    """For the same tenant; and for another one it is an image that nobody has seen."""
    whole = image(1) | {"uuid": "u"}
    alone = {"type": "image_url", "image_url": None, "uuid": "u"}
    first, again = user(whole, text("a")), user(alone, text("a"))
    estimate = played([chat(first), chat(again, said("b"), user(text("c"))), chat(again, cache_salt="other")])
    assert (estimate.seen.new, estimate.seen.in_conversation, estimate.seen.grown) == (2, 1, 1)
    assert (estimate.seen.of_unknown_size, estimate.seen.unknown_images) == (1, 0)


def test_an_image_under_its_uuid_alone_is_not_decoded_on_stock_either() -> None:
    """While its processor cache has it; the control is one that it has no room for."""
    whole, alone = image(1) | {"uuid": "u"}, {"type": "image_url", "image_url": None, "uuid": "u"}
    requests = [chat(user(whole, text("a"))), *(chat(user(alone, text(f"{number}"))) for number in range(3))]
    for processor_bytes, done in ((4 << 30, 1), (0, 4)):
        estimate = played(requests, sizes=replace(ROOMY, processor_bytes=processor_bytes))
        assert counts(estimate)["stock"][:2] == (done, done)
        assert counts(estimate)["mmcache"][:2] == (1, 1)
        assert estimate.seen.file_bytes == played(requests[:1]).seen.file_bytes > 0
    gone = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,[REDACTED]"}, "uuid": "u"}
    redacted = [chat(user(gone, text(f"{number}"))) for number in range(4)]
    assert counts(played(redacted))["stock"][:2] == (4, 1), "it was sent each time, and the log has lost it"


def test_images_without_content_are_no_repeats() -> None:
    gone = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,[REDACTED]"}}
    estimate = played([chat(user(gone, text(f"{number}"))) for number in range(10)] + conversation(1))
    assert (estimate.seen.images, estimate.seen.unknown_images) == (1, 10)
    assert counts(estimate)["stock"][:3] == (1, 1, 1)
    assert estimate.seen.prompt_tokens > 10 * IMAGE_TOKENS


def test_other_media_are_no_text() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}}
    other = {"type": "input_audio", "input_audio": {"data": "B" * 100_000, "format": "wav"}}
    estimate = played([chat(user(one, text("What?"))) for one in (sound, other, sound)])
    assert estimate.seen.other_media == 3
    assert estimate.seen.prompt_tokens < 50
    assert estimate.seen.conversations == 2, "another sound is another conversation"


def test_a_rotation_larger_than_the_caches() -> None:
    """KV and vLLM's encoder cache hold two pictures, the features all but one."""
    rounds = [chat(user(text(f"{turn}"), image(number))) for turn, number in product(range(2), range(4))]
    sizes = Sizes(block_tokens=1, kv_tokens=40, encoder_tokens=2 * IMAGE_TOKENS, feature_bytes=100_000)
    assert counts(played(rounds, sizes=sizes))["stock"][2] == 8
    assert counts(played(rounds, sizes=sizes))["mmcache"][:3] == (4, 4, 4)
    small = replace(sizes, feature_bytes=3 * IMAGE_TOKENS * FULL.feature_bytes)
    assert counts(played(rounds, sizes=small))["mmcache"][:3] == (8, 8, 8)


def test_the_size_for_a_share() -> None:
    distances = Distances()
    for key in "abcabc":
        distances.use(key, 10.0)
    distances.use("c", 10.0)
    assert list(distances.needed) == [30.0, 30.0, 30.0, 10.0]
    assert [distances.size_for(share) for share in (0.25, 0.5, 1.0)] == [10.0, 30.0, 30.0]
    assert Distances().size_for(1.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.just(0)), max_size=60), st.integers(3, 12))
def test_the_sizes_are_those_that_a_cache_needs(uses: list[tuple[int, int]], capacity: int) -> None:
    """As many hits as a cache of that size has."""
    distances, cache, hits = Distances(), Lru[int](capacity), 0
    for key, _ in uses:
        size = 1 + key % 3
        distances.use(key, size)
        hits += cache.use(key, size)
    assert hits == sum(needed <= capacity for needed in distances.needed)


def test_a_part_stands_for_all_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many images, some of which are used more often than others, at most 1,000 are looked at."""
    draw = random.Random(0)
    keys = [int(draw.expovariate(1 / 4_000)) for _ in range(60_000)]
    exact, sampled = Distances(), Distances(most_keys=1_000)
    for key in keys:
        exact.use(key, 100)
        sampled.use(key, 100)
    assert len(sampled._last) <= 1_000 < len(exact._last)
    assert len(sampled._tree) < 10_000
    monkeypatch.setattr(estimates, "MOST_NEEDED", 5_000)
    sampled = Distances()
    for key in keys:
        sampled.use(key, 100)
    assert len(sampled.needed) <= 5_000 < len(exact.needed)
    assert sampled.size_for(0.8) == pytest.approx(exact.size_for(0.8), rel=0.15)
    for share in (0.5, 0.8, 0.95):
        assert sampled.size_for(share) == pytest.approx(exact.size_for(share), rel=0.15)
    assert sampled.curve()[-1][1] == pytest.approx(exact.curve()[-1][1], abs=0.05)


def test_places_without_gaps_change_nothing() -> None:
    """Where few keys are used very often, as many places as uses would be too many."""
    distances = Distances()
    for number in range(50_000):
        distances.use(number % 5, 1)
    assert set(distances.needed) == {5.0}
    assert len(distances._tree) <= 1024 + 4 * 5


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used longest ago is new again."""
    monkeypatch.setattr(estimates, "MOST_REMEMBERED", 8)
    estimate = played([one for number in range(30) for one in conversation(number, name=f"{number:02}")])
    assert {len(estimate._records), len(estimate._known), len(estimate._turns)} == {8}
    estimate.add(prompt_of(conversation(0, name="00")[0]))
    assert estimate.seen.new == 31


@pytest.mark.parametrize("model", [FULL, WINDOWS, replace(WINDOWS, state_blocks=20)])
def test_states_go_with_their_blocks(model: Model) -> None:
    requests = [one for number in range(30) for one in conversation(number, name=f"{number:02}")]
    estimate = played(requests, model, replace(ROOMY, kv_tokens=200))
    for side, kv in estimate._kv.items():
        assert kv.states[side].keys() <= set(kv._entries)
        assert bool(kv.states[side]) == (model is not FULL)


def test_gemma4_fills_its_tokens() -> None:
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    model, sizes = MODELS["gemma4-31b"], random.Random(0)
    for _ in range(300):
        width, height = sizes.randint(1, 9000), sizes.randint(1, 9000)
        high, wide = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
        assert model.size(width, height) == (wide, high)
        assert model.tokens(width, height) == wide * high // 48**2 <= 280


@pytest.mark.parametrize("name", [name for name in MODELS if "qwen" in name])
def test_tokens_are_those_of_the_processor(name: str) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    model, sizes = MODELS[name], random.Random(0)
    for _ in range(300):
        width, height = sizes.randint(1, 9000), sizes.randint(1, 9000)
        if max(width, height) / min(width, height) > 200:
            continue
        high, wide = smart_resize(height, width, model.factor, model.min_pixels, model.max_pixels)
        assert model.size(width, height) == (wide, high)
        assert model.tokens(width, height) == wide * high // model.factor**2
