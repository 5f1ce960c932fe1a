# SPDX-License-Identifier: Apache-2.0
"""What a tenant could learn about another one from records, were they to be read: nothing, whatever is asked.

The attacker sends requests of its own and reads their records whole, as /mmcache gives them. Without an engine: the
memory of the engine, its causes, and the records made of them are the real ones.
"""

import hashlib
import itertools
import random
import string
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretStr

from vllm_mmcache.components.observe.observer import RequestState, _nearest
from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.causes import Lookup, explain
from vllm_mmcache.components.observe.record.digests import salt_class
from vllm_mmcache.components.observe.record.history import Entry, History
from vllm_mmcache.components.observe.record.pending import UNKNOWN, RequestSnapshot
from vllm_mmcache.components.observe.record.recorder import Recorder
from vllm_mmcache.components.observe.record.schema import Reason, to_json

pytestmark = pytest.mark.answers

BLOCK = 16
VICTIM, ATTACKER = "the victim's salt", "the attacker's salt"
SYSTEM = list(range(1000, 1000 + BLOCK))  # the application's, which every tenant has
DIGITS = [ord(digit) for digit in string.digits]


class Deployment:
    """An engine's memory of requests, and an API server's records of them."""

    def __init__(self, across_salts: bool = False) -> None:
        self.history = History(BLOCK, lambda: 1 << 24, lambda: across_salts)
        self.recorder = Recorder()
        self.clock = itertools.count()

    def ask(self, tokens: list[int], salt: str | None, image: str = "") -> dict[str, Any]:
        """A request that is computed to its end; the JSON of its record. image: its identifier, over tokens 4 to 8."""
        spans = [(4, 4, image)] if image else []
        asked = RequestSnapshot(
            request_id="chatcmpl-chosen", time_s=float(next(self.clock)), prompt_tokens=len(tokens), lora="",
            salt=salt_class(salt), num_answers=1, turns=[], roles=[], answers=[], spans=spans,
            layers=[UNKNOWN] * len(spans),
        )  # fmt: skip
        record_id = self.recorder.waiting.add(asked)
        _, _, notes = wire.open_notes(
            wire.pack(record_id, "r", wire.Notes(spans=spans, images=[(image, "", 8, 8)] * len(spans)))
        )
        entry = Entry(
            record_id, asked.time_s, asked.salt, "", len(tokens), 8 if image else 0, (image,) if image else (), notes
        )
        keys = self.keys(tokens, salt, image)
        found = self.history.find(entry, tokens, keys)
        self.history.remember(entry, tokens, keys, found.num_known)
        self.history.finish(entry, [], keys, len(tokens))
        hit = min(found.num_known * BLOCK, (len(tokens) - 1) // BLOCK * BLOCK)
        causes = explain(entry, found, Lookup(hit, BLOCK, ""))
        seen = RequestState(record_id, entry, found)
        outcome = wire.Outcome(record_id, record_id, hit, 0, BLOCK, 0, [], _nearest(seen), {}, causes)
        self.recorder.note(wire.pack_outcome(outcome))
        record = self.recorder.store.get(record_id)
        assert record is not None
        return to_json(record)

    @staticmethod
    def keys(tokens: list[int], salt: str | None, image: str) -> list[bytes]:
        """Chained as vLLM's: salt and image go into the first block."""
        chain, found = f"{salt}\0{image}".encode(), []
        for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            chain = hashlib.sha256(chain + repr(tokens[start : start + BLOCK]).encode()).digest()
            found.append(chain)
        return found


def recovered(deployment: Deployment, secret: list[int]) -> list[int]:
    """The reviewer's oracle: guess token by token; the guess that has most in common with the victim's is right.

    What follows a guess is new and long, so that the request is compared; the victim goes on asking meanwhile.
    """
    known: list[int] = []
    new = itertools.count(10_000)
    for _ in secret:
        said = {}
        for guess in DIGITS:
            deployment.ask([*SYSTEM, *secret], VICTIM)
            record = deployment.ask([*SYSTEM, *known, guess, *itertools.islice(new, 3 * BLOCK)], ATTACKER)
            said[guess] = max([cause["start"] + cause["tokens"] for cause in record["misses"]
                               if cause["reason"] == Reason.OTHER_SALT] or [0])  # fmt: skip
            if nearest := record["nearest"]:
                said[guess] = max(said[guess], nearest["common_tokens"] * (not nearest["same_salt"]))
        known.append(max(said, key=lambda guess: said[guess]))
    return known


@pytest.mark.parametrize("across_salts", [True, False])
def test_a_secret_is_not_recovered_token_by_token(across_salts: bool) -> None:
    """With the operator's comparison across salts the oracle works, which shows that it can."""
    secret = random.Random(7).choices(DIGITS, k=16)
    deployment = Deployment(across_salts)
    assert (recovered(deployment, secret) == secret) == across_salts


def without_names(value: Any) -> Any:
    """A record without what differs from start to start: the ids of records, which have a random beginning."""
    if isinstance(value, dict):
        return {name: without_names(part) for name, part in value.items() if name not in ("id", "other", "server")}
    if isinstance(value, list):
        return [without_names(part) for part in value]
    if isinstance(value, str) and "-" in value:
        return " ".join(word for word in value.split() if "-" not in word)
    return value


Traffic = list[tuple[list[int], str | None, str]]


def traffic(seed: int, salts: list[str | None]) -> Traffic:
    """Requests over few tokens, so that beginnings are shared."""
    chance = random.Random(seed)
    return [
        (
            SYSTEM[: chance.choice([8, 16])] + chance.choices(DIGITS[:2], k=chance.randrange(1, 60)),
            chance.choice(salts),
            chance.choice(["", "", "image one", "image two"]),
        )
        for _ in range(60)
    ]


def read(own: Traffic, others: Callable[[int], Traffic], across_salts: bool = False) -> list[Any]:
    """The attacker's records, with others' requests between its own."""
    deployment = Deployment(across_salts)
    records = []
    for number, (tokens, salt, image) in enumerate(own):
        for other in others(number):
            deployment.ask(*other)
        deployment.clock = itertools.count(number)
        records.append(without_names(deployment.ask(tokens, salt, image)))
    return records


@pytest.mark.slow
@pytest.mark.parametrize("salt", [ATTACKER, None])
def test_records_are_the_same_whatever_others_sent(salt: str | None) -> None:
    differed = 0
    for seed in range(8):
        own = traffic(seed, [salt])
        theirs = traffic(seed + 100, [VICTIM, "a third salt", ATTACKER if salt is None else None])
        theirs += [(tokens, VICTIM, image) for tokens, _, image in own]  # the very same ones, too

        def before(number: int, theirs: Traffic = theirs) -> Traffic:
            return theirs if not number else []

        alone = read(own, lambda _: [])
        assert read(own, before) == alone, seed
        assert read(own, lambda number, theirs=theirs: theirs[number : number + 1]) == alone, seed  # type: ignore[misc]
        differed += read(own, before, across_salts=True) != alone
    assert differed, "the comparison can tell"


def test_an_answer_is_known_again_under_its_salt_alone() -> None:
    """Else a tenant could guess what another one was answered: a record says whether an answer came back as given."""
    recorder = Recorder()
    recorder.note_answer(salt_class(VICTIM), "The code is 4711.")
    recorder.read_notes()
    from vllm_mmcache.components.observe.record.recorder import message_digest

    digest = message_digest("assistant", "The code is 4711.")
    known = {
        salt: RequestSnapshot("r", 0.0, 9, "", salt_class(salt), 1, [0], ["assistant"], [digest], [], []).is_echo(
            0, recorder._answers
        )
        for salt in (VICTIM, ATTACKER, None)
    }
    assert known == {VICTIM: True, ATTACKER: False, None: False}


def test_a_salt_is_compared_whole() -> None:
    """Not as the short digest that records show: two salts with one such digest are found in a minute."""
    seen = [salt_class(salt) for salt in (None, "", "a", "b", "\ud800", "a" * 4096)]
    assert seen[0] == seen[1] == ""
    assert len(set(seen)) == 5
    assert all(len(digest) == 64 for digest in seen[2:])


def test_what_is_shown_is_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the admin key, so that all API servers show one thing alike; without one, by this process."""
    from vllm_mmcache.base import settings
    from vllm_mmcache.components.observe.record.digests import shown

    def told(key: str | None) -> str:
        monkeypatch.setattr(settings, "_current", settings.Settings(admin_key=SecretStr(key) if key else None))
        return shown(salt_class(VICTIM))

    digests = [told(key) for key in ("first-key-of-a-server", "other-key-of-a-server", None)]
    assert len(set(digests)) == 3
    assert digests == [told(key) for key in ("first-key-of-a-server", "other-key-of-a-server", None)]
    assert hashlib.blake2b(salt_class(VICTIM).encode(), digest_size=4).hexdigest() not in digests
    assert all(len(digest) == 8 for digest in digests)
