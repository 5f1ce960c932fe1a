# SPDX-License-Identifier: Apache-2.0
"""Two requests share a block key if and only if vLLM's own keys, with right ids, would let them share.

Both directions on random layouts: images inside, across and at the edges of blocks, the same image twice, order and
lengths swapped, salts, LoRA, prompt embeddings. A right id determines the length of the range, so ids name it here.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.utils.hashing import sha256, xxhash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import StreamingUpdate

from tests.support.sizes import scaled
from tests.support.vllm_requests import Prompt, keys, make_request, original, our_hasher, stock_hasher

pytestmark = pytest.mark.answers

BLOCK = 4
PAD = 7  # the placeholder token
STOCK = stock_hasher(BLOCK, sha256)
OURS = our_hasher(BLOCK, sha256)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Text and image runs in any order; few distinct tokens, so that sharing happens by itself."""
    tokens: list[int] = []
    images = []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            tokens += draw(st.lists(st.integers(1, 2), min_size=0, max_size=9))
        else:
            length = draw(st.integers(0, 9))
            images.append((f"{draw(st.sampled_from('ab'))}-{length}", len(tokens), length))
            tokens += [PAD] * length
    tokens += draw(st.lists(st.integers(1, 2), min_size=BLOCK, max_size=6))
    return Prompt(
        tuple(tokens),
        tuple(images),
        salt=draw(st.sampled_from([None, None, "s", "t"])),
        lora=draw(st.sampled_from([None, None, ("l", "/l"), ("l", "/m")])),
        embeds_seed=draw(st.sampled_from([None, None, None, 1, 2])),
    )


@st.composite
def relatives(draw: st.DrawFn) -> tuple[Prompt, Prompt]:
    """A prompt and one near it: something swapped, moved, renamed or cut."""
    one = draw(prompts())
    images = list(one.images)
    kind = draw(st.sampled_from(["other", "rename", "order", "drop", "salt", "lora", "cut", "token", "embeds", "same"]))
    if kind == "other":
        return one, draw(prompts())
    if kind == "rename" and images:
        k = draw(st.integers(0, len(images) - 1))
        images[k] = (f"c-{images[k][2]}", *images[k][1:])
    elif kind == "order" and len(images) > 1:
        lengths = [length for _, _, length in images]
        if lengths[0] == lengths[1]:
            images[0], images[1] = (images[1][0], *images[0][1:]), (images[0][0], *images[1][1:])
    elif kind == "drop" and images:
        images.pop(draw(st.integers(0, len(images) - 1)))
    elif kind == "salt":
        return one, one.changed(salt="u")
    elif kind == "lora":
        return one, one.changed(lora=("n", "/n"))
    elif kind == "embeds":
        return one, one.changed(embeds_seed=3)
    elif kind == "cut":
        end = draw(st.integers(1, len(one.tokens)))
        return one, one.changed(tokens=one.tokens[:end], images=tuple(i for i in images if i[1] + i[2] <= end))
    elif kind == "token":
        at = draw(st.integers(0, len(one.tokens) - 1))
        return one, one.changed(tokens=(*one.tokens[:at], 3, *one.tokens[at + 1 :]))
    return one, one.changed(images=tuple(images))


@pytest.mark.slow
@settings(max_examples=scaled(1500), deadline=None)
@given(relatives())
def test_shared_if_and_only_if_stock_shares(pair: tuple[Prompt, Prompt]) -> None:
    one, other = pair
    stock = [keys(prompt, STOCK) for prompt in pair]
    ours = [keys(prompt, OURS) for prompt in pair]
    assert [len(k) for k in stock] == [len(k) for k in ours]
    for i in range(len(stock[0])):
        for j in range(len(stock[1])):
            assert (stock[0][i] == stock[1][j]) == (ours[0][i] == ours[1][j]), (i, j, one, other)


@pytest.mark.slow
@settings(max_examples=scaled(300), deadline=None)
@given(prompts(), st.lists(st.integers(1, 2), max_size=10), st.integers(0, 40))
def test_keys_do_not_depend_on_when_tokens_arrive(prompt: Prompt, decoded: list[int], cut: int) -> None:
    """Hashing in two goes (arrival, then decoding) gives the keys of hashing at once."""
    prompt = prompt.changed(embeds_seed=None)
    request = make_request(prompt, OURS)
    request.append_output_token_ids(decoded)
    whole = prompt.changed(tokens=prompt.tokens + tuple(decoded))
    assert list(request.block_hashes) == keys(whole, OURS)
    del request.block_hashes[cut // BLOCK :]  # as vLLM does for streaming sessions
    request.update_block_hashes()
    assert list(request.block_hashes) == keys(whole, OURS)


@pytest.mark.parametrize("answered", [0, 3, BLOCK])
@pytest.mark.parametrize("first_images", [(), (("a", 2, 5),)], ids=["no image", "an image"])
def test_images_appended_to_a_session_are_in_the_keys_of_its_later_blocks(
    first_images: tuple[tuple[str, int, int], ...], answered: int
) -> None:
    """A streaming session that was hashed with its first images: its keys are those of the whole prompt at once."""
    begun = (1, 1, *[PAD] * 5, 1, 1)
    for name in ("b", "c"):
        session = make_request(Prompt(begun, first_images), OURS)
        # The last token of an answer is not computed, and vLLM takes it back.
        session.append_output_token_ids([2] * (answered + 1))
        session.num_computed_tokens = len(begun) + answered
        added = make_request(Prompt((1, *[PAD] * 6, *[1] * 9), ((name, 1, 6),)), OURS)
        scheduler = SimpleNamespace(hash_block_size=BLOCK, log_stats=False)
        update = StreamingUpdate(added.mm_features, added.prompt_token_ids, 4, 0.0, added.sampling_params)
        original(Scheduler._update_request_as_session)(scheduler, session, update)
        tokens = (*begun, *[2] * answered, 1, *[PAD] * 6, *[1] * 9)
        whole = Prompt(tokens, (*first_images, (name, len(begun) + answered + 1, 6)))
        assert list(session.all_token_ids) == list(tokens)
        assert list(session.block_hashes) == keys(whole, OURS)
        without = keys(whole.changed(images=first_images), OURS)
        assert session.block_hashes[-1] != without[-1], "the control: the image is in the keys"


@pytest.mark.slow
@settings(max_examples=scaled(200), deadline=None)
@given(prompts())
def test_blocks_before_the_first_image_have_the_keys_of_a_text_request(prompt: Prompt) -> None:
    prompt = prompt.changed(embeds_seed=None)
    first = min((offset for _, offset, _ in prompt.images), default=len(prompt.tokens)) // BLOCK
    text = keys(prompt.changed(images=()), OURS)
    with_images = keys(prompt, OURS)
    assert with_images[:first] == text[:first]


def test_every_block_after_a_swapped_image_misses() -> None:
    """Negative control: nothing from the swapped image on may be found under the old key."""
    tokens = (1,) * 6 + (PAD,) * 10 + (1,) * 20
    a = keys(Prompt(tokens, (("a", 6, 10),)), OURS)
    b = keys(Prompt(tokens, (("b", 6, 10),)), OURS)
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:])


def test_each_block_has_the_key_of_its_own_embeddings() -> None:
    """Two prompts of embeddings that differ from the third block on."""
    one, other = (make_request(Prompt((1,) * 4 * BLOCK, embeds_seed=1), lambda request: []) for _ in range(2))
    assert other.prompt_embeds is not None
    other.prompt_embeds[2 * BLOCK] += 1
    assert [a == b for a, b in zip(OURS(one), OURS(other), strict=True)] == [True, True, False, False]


def test_length_is_part_of_the_state() -> None:
    tokens = (PAD,) * 16
    assert keys(Prompt(tokens, (("a", 0, 5),)), OURS)[0] != keys(Prompt(tokens, (("a", 0, 6),)), OURS)[0]


def test_block_size_is_part_of_the_root() -> None:
    """Keys of different block sizes never meet, even where the bytes hashed after the root could."""
    small = set(keys(Prompt((1,) * 32), our_hasher(4, sha256)))
    large = set(keys(Prompt((1,) * 32), our_hasher(8, sha256)))
    assert not small & large


def test_xxhash_keys_hang_on_a_secret_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt((1,) * 16)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first = keys(prompt, our_hasher(BLOCK, xxhash))
    second = keys(prompt, our_hasher(BLOCK, xxhash))  # a new secret, as in another process
    assert len(first[0]) == 16
    assert not set(first) & set(second)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert keys(prompt, our_hasher(BLOCK, xxhash)) == keys(prompt, our_hasher(BLOCK, xxhash))
    stock_hasher(BLOCK, sha256)  # back to the seed that the other tests rely on


def test_sha256_keys_agree_between_processes() -> None:
    assert keys(Prompt((1,) * 16), our_hasher(BLOCK, sha256)) == keys(Prompt((1,) * 16), our_hasher(BLOCK, sha256))
