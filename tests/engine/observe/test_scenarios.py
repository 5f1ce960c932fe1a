# SPDX-License-Identifier: Apache-2.0
"""Every reason produced on a real engine with full attention, each beside a request that differs in the cause alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from vllm import SamplingParams

from tests.support.observing import Observed, assistant, observing, picture, system, user, words
from vllm_mmcache.base import settings
from vllm_mmcache.components.observe.record.recorder import RECORDER
from vllm_mmcache.components.observe.record.schema import Reason

pytestmark = pytest.mark.engine

BLOCK = 32
CONFIG = EngineConfig(
    "qwen3-vl", num_blocks=100, batched_tokens=512, more=(("long_prefill_token_threshold", 128),)
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(pool: EnginePool) -> Iterator[Observed]:
    with observing(pool, CONFIG) as engine:
        yield engine


def kv_cache_manager(engine: Observed) -> Any:
    return engine.rig.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager


@pytest.fixture
def ask(engine: Observed) -> Observed:
    """Nothing cached and nothing remembered."""
    RECORDER.store.clear()
    engine.rig.make_cold()
    manager = kv_cache_manager(engine)
    vars(manager).pop("_mmcache_observer", None)
    vars(manager.block_pool).pop("_mmcache_observer", None)
    return engine


RULES = "Rules:" + words(100)
QUESTION = "What is it?" + words(40)


def test_new_content(ask: Observed) -> None:
    first = ask.chat(system(RULES), user(QUESTION))
    assert first.reasons == [Reason.NEW_CONTENT]
    assert first.record.nearest is None
    again = ask.chat(system(RULES), user(QUESTION))
    assert Reason.NEW_CONTENT not in again.reasons
    assert again.record.nearest is not None
    assert again.record.nearest.id == first.record.id


def test_the_next_turn(ask: Observed) -> None:
    talk = [system(RULES), user(picture("a"), QUESTION)]
    first = ask.chat(*talk, max_tokens=1)
    more = ask.chat(*talk, assistant("yes"), user("And that?" + words(50)))
    assert more.reasons == [Reason.BLOCK_TAIL, Reason.NEW_CONTENT]
    assert [s.kind for s in more.record.segments] == [
        "system", "message", "image", "message", "message", "message", "generation",
    ]  # fmt: skip
    assert [s.role for s in more.record.segments] == ["system"] + ["user"] * 3 + ["assistant", "user", "assistant"]
    assert [s.turn for s in more.record.segments] == [0, 1, 1, 1, 2, 3, 4]
    assert more.segment("system").reused_tokens == more.segment("system").tokens
    start = more.record.misses[1]
    assert more.record.segments[start.segment or 0].turn == 2, "the answer that the client made up is new"
    assert start.start == first.record.prompt_tokens


def test_a_question_of_its_own_behind_the_same_rules(ask: Observed) -> None:
    ask.chat(system(RULES), user(QUESTION))
    other = ask.chat(system(RULES), user("Why not?" + "".join(f" {number}" for number in range(40))))
    assert other.reasons[-1] is Reason.NEW_CONTENT
    assert Reason.TEXT_DIFFERS not in other.reasons


def test_text_differs(ask: Observed) -> None:
    ask.chat(system(words(50) + " Monday." + RULES), user(QUESTION))
    other = ask.chat(system(words(50) + " Friday." + RULES), user(QUESTION))
    assert other.reasons == [Reason.BLOCK_TAIL, Reason.NEW_CONTENT, Reason.TEXT_DIFFERS]
    _, word, miss = other.record.misses
    assert miss.segment == 0
    decode, tokens = ask.rig.llm.get_tokenizer().decode, list(other.output.prompt_token_ids)
    assert decode(tokens[: word.start]).rstrip().endswith(words(3, 47)), "exact to the token"
    assert decode(tokens[word.start : miss.start]).strip() in "Friday.", "the word itself is new"
    assert "Rules:" in decode(tokens[miss.start :])[:12], "and all behind it is charged"
    assert miss.start + miss.tokens == other.record.prompt_tokens
    assert ask.chat(system(words(50) + " Friday." + RULES), user(QUESTION)).reasons != other.reasons


def test_image_differs_in_bytes(ask: Observed) -> None:
    first = ask.chat(system(RULES), user(picture("a"), QUESTION))
    other = ask.chat(system(RULES), user(picture("b"), QUESTION))
    miss = other.record.misses[-1]
    assert (miss.reason, miss.details["what"], miss.details["image"]) == (Reason.IMAGE_DIFFERS, "bytes", 0)
    assert other.record.segments[miss.segment or 0].kind == "image"
    again = ask.chat(system(RULES), user(picture("a"), QUESTION))
    assert Reason.IMAGE_DIFFERS not in again.reasons
    assert again.segment("image").image.digest == first.segment("image").image.digest  # type: ignore[union-attr]
    assert again.segment("image").image.digest != other.segment("image").image.digest  # type: ignore[union-attr]


def test_image_differs_in_size(ask: Observed) -> None:
    ask.chat(system(RULES), user(picture("a"), QUESTION))
    miss = ask.chat(system(RULES), user(picture("a", (288, 224)), QUESTION)).record.misses[-1]
    assert (miss.reason, miss.details["what"]) == (Reason.IMAGE_DIFFERS, "size")


def test_image_differs_in_processor_settings(ask: Observed) -> None:
    talk = [system(RULES), user(picture("a"), QUESTION)]
    ask.chat(*talk)
    small = {"mm_processor_kwargs": {"min_pixels": 3136, "max_pixels": 20000}}
    first = ask.chat(*talk, more=small).record.misses[-1]
    assert (first.reason, first.details["what"]) == (Reason.IMAGE_DIFFERS, "settings")
    assert Reason.IMAGE_DIFFERS not in ask.chat(*talk, more=small).reasons


def test_second_image_differs(ask: Observed) -> None:
    ask.chat(user(picture("a"), "and", picture("b"), QUESTION))
    miss = ask.chat(user(picture("a"), "and", picture("c"), QUESTION)).record.misses[-1]
    assert (miss.reason, miss.details["image"], miss.token) == (Reason.IMAGE_DIFFERS, 1, 0)


def exactly(ask: Observed, num_tokens: int) -> list[int]:
    return [100 + i % 300 for i in range(num_tokens)]


def test_block_tail_and_last_token(ask: Observed) -> None:
    for length, reason, reused in ((BLOCK * 5 + 7, Reason.BLOCK_TAIL, BLOCK * 5), (BLOCK * 5, Reason.LAST_TOKEN, 128)):
        ask.rig.make_cold()
        prompt = {"prompt_token_ids": exactly(ask, length)}
        ask.generate(prompt, max_tokens=1)
        (again,) = ask.generate(prompt, max_tokens=1)
        assert again.reasons == [reason]
        assert again.cached == reused


def test_evicted(ask: Observed) -> None:
    talk = [system(RULES), user(QUESTION)]
    first = ask.chat(*talk)
    for number in range(3):  # 100 blocks of 32 tokens in all
        ask.chat(user(words(1100, number)))
    again = ask.chat(*talk)
    miss = again.record.misses[0]
    assert (miss.reason, miss.details["how"], again.cached) == (Reason.EVICTED, "evicted", 0)
    assert 0 <= float(miss.details["ago_s"]) < 60
    assert first.record.id in miss.text
    assert Reason.EVICTED not in ask.chat(*talk).reasons


def test_reset(ask: Observed) -> None:
    talk = [system(RULES), user(QUESTION)]
    ask.chat(*talk)
    assert ask.rig.llm.reset_prefix_cache()
    miss = ask.chat(*talk).record.misses[0]
    assert (miss.reason, miss.details["how"]) == (Reason.EVICTED, "reset")
    assert Reason.EVICTED not in ask.chat(*talk).reasons


def test_not_yet_computed(ask: Observed) -> None:
    prompt = {"prompt_token_ids": exactly(ask, 400)}
    first, second = ask.generate(prompt, prompt)
    assert first.reasons == [Reason.NEW_CONTENT]
    assert second.reasons == [Reason.NOT_YET_COMPUTED]
    assert second.record.misses[0].details["other"] == first.record.id
    assert Reason.NOT_YET_COMPUTED not in ask.generate(prompt)[0].reasons


def test_another_salt_is_not_compared(ask: Observed) -> None:
    tokens = exactly(ask, 300)
    salted: list[Any] = [{"prompt_token_ids": tokens, "cache_salt": salt} for salt in ("one", "two")]
    for prompt in salted:
        (asked,) = ask.generate(prompt)
        assert (asked.reasons, asked.record.nearest) == ([Reason.NEW_CONTENT], None)
    assert ask.generate(salted[1])[0].reasons == [Reason.BLOCK_TAIL]


def test_other_salt(ask: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the operator asks for it."""
    asks_for_it = settings.current().model_copy(update={"observe_across_salts": True})
    monkeypatch.setattr(settings, "_current", asks_for_it)
    tokens = exactly(ask, 300)
    salted: list[Any] = [{"prompt_token_ids": tokens, "cache_salt": salt} for salt in ("one", "two")]
    (first,) = ask.generate(salted[0])
    (second,) = ask.generate(salted[1])
    assert first.reasons == [Reason.NEW_CONTENT]
    assert second.reasons == [Reason.OTHER_SALT]
    assert second.record.nearest is not None
    assert not second.record.nearest.same_salt
    assert second.record.salt not in (None, "two", first.record.salt)
    assert ask.generate(salted[1])[0].reasons == [Reason.BLOCK_TAIL]


def test_caching_off_for_one_request(ask: Observed) -> None:
    talk = [system(RULES), user(QUESTION)]
    ask.chat(*talk)
    off = ask.chat(*talk, prompt_logprobs=1)
    assert off.reasons == [Reason.CACHING_OFF]
    assert off.record.misses[0].details == {"by": "prompt_logprobs"}
    assert Reason.CACHING_OFF not in ask.chat(*talk).reasons


def test_the_answer_comes_back_in_other_tokens(ask: Observed) -> None:
    talk = [system(RULES), user(QUESTION)]
    first = ask.chat(*talk, max_tokens=40)
    back = ask.chat(*talk, assistant(first.text), user("Go on." + words(40)))
    assert Reason.TEMPLATE_REWROTE in back.reasons, back.record
    blamed = [miss for miss in back.record.misses if miss.reason is Reason.TEMPLATE_REWROTE]
    assert {back.record.segments[miss.segment or 0].role for miss in blamed} == {"assistant"}
    assert sum(miss.tokens for miss in blamed) < 40, "at most the answer, whose last token has no KV"
    last = back.record.misses[-1]
    assert last.reason is Reason.NEW_CONTENT
    assert last.start + last.tokens == back.record.prompt_tokens
    edited = ask.chat(*talk, assistant(first.text[:20] + " or not"), user("Go on." + words(40)))
    assert Reason.TEXT_DIFFERS in edited.reasons
    assert Reason.TEMPLATE_REWROTE not in edited.reasons


DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' and not loop.last %}(earlier) {% endif %}"
    "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("drops", [True, False])
def test_the_template_writes_an_earlier_turn_anew(ask: Observed, drops: bool) -> None:
    template = {"chat_template": DROPS if drops else DROPS.replace("(earlier) ", "")}
    talk = [system(RULES), user(words(60))]
    ask.chat(*talk, more=template)
    more = ask.chat(*talk, assistant("Yes."), user("And?"), more=template)
    assert (Reason.TEMPLATE_REWROTE in more.reasons) is drops
    if drops:
        blamed = [miss for miss in more.record.misses if miss.reason is Reason.TEMPLATE_REWROTE]
        assert {more.record.segments[miss.segment or 0].turn for miss in blamed} == {1}
        assert 50 < sum(miss.tokens for miss in blamed) < 75, "what both have behind what the template puts in"
        assert more.reasons[-1] is Reason.NEW_CONTENT, "the turn that is new"


def test_what_happened_to_an_image(ask: Observed) -> None:
    def notes(asked: Any) -> tuple[str, ...]:
        image = asked.segment("image").image
        return image.body, image.decode, image.processor, image.features

    picture_of_this_test = picture("what happened")
    assert notes(ask.chat(user(picture_of_this_test, QUESTION))) == ("left", "decoded", "run", "tower")
    assert notes(ask.chat(user(picture_of_this_test, QUESTION))) == ("left", "skipped", "hit", "not_needed")
    moved = user(RULES, picture_of_this_test, QUESTION)
    assert notes(ask.chat(moved)) == ("left", "skipped", "hit", "encoder_cache")
    assert ask.rig.features.copying.wait(60)  # what the first request computed is on its way to RAM
    ask.rig.llm.llm_engine.reset_encoder_cache()
    assert ask.rig.features.wait_until_known(600)  # the weights, which may be others
    assert notes(ask.chat(user(words(70), picture_of_this_test, QUESTION)))[3] == "ram"
    ask.rig.forget_all_but_features()
    assert notes(ask.chat(moved))[1:] == ("skipped", "deferred", "ram")


def test_several_answers(ask: Observed) -> None:
    (asked,) = ask.rig.llm.generate(
        [{"prompt_token_ids": exactly(ask, 100)}], SamplingParams(n=2, max_tokens=2, seed=1), use_tqdm=False
    )
    found = RECORDER.store.named(asked.request_id)
    assert [record.prompt_tokens for record in found] == [100, 100]
    assert {record.id.partition(".")[2] for record in found} == {"0", "1"}


def test_nothing_is_left_of_ended_requests(ask: Observed) -> None:
    """Also of one that ends long after its first output, when no other waits for its own."""
    for max_tokens in (1, 8):
        ask.chat(user(QUESTION), max_tokens=max_tokens)
        observer = vars(kv_cache_manager(ask))["_mmcache_observer"]
        assert (observer.waiting, observer.ended) == ({}, [])


def test_records_hold_no_text(ask: Observed) -> None:
    asked = ask.chat(system("A secret rule."), user(picture("a"), "A secret question."), max_tokens=8)
    stored = asked.record.model_dump_json()
    assert "secret" not in stored
    assert str(list(asked.output.prompt_token_ids)[:4])[1:-1] not in stored
    assert RECORDER.store.totals().requests > 0
