# SPDX-License-Identifier: Apache-2.0
"""The engine's memory of earlier requests: what is nearest, what is forgotten first, and what adapters hide."""

import hashlib
import itertools

from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.history import BRANCHES, Entry, History, HistoryMatch

BLOCK = 4


def keys(tokens: list[int], salt: str = "") -> list[bytes]:
    chain, found = salt.encode(), []
    for block in range(len(tokens) // BLOCK):
        chain = hashlib.sha256(chain + bytes(tokens[block * BLOCK : block * BLOCK + BLOCK])).digest()
        found.append(chain)
    return found


numbers = itertools.count()


def entry_of(tokens: list[int], salt: str = "", lora: str = "", image: str = "") -> Entry:
    """A request, with an image of three tokens at 5 if it is named."""
    number = next(numbers)
    spans = [(5, 3, image)] if image else []
    _, _, notes = wire.open_notes(wire.pack("1", "r", wire.Notes(spans=spans)))
    return Entry(f"r{number}", float(number), salt, lora, len(tokens), images_end=8 if image else 0, notes=notes)


def see(history: History, tokens: list[int], salt: str = "", lora: str = "", image: str = "") -> HistoryMatch:
    entry = entry_of(tokens, salt, lora, image)
    found = history.find(entry, tokens, keys(tokens, salt + lora))
    history.remember(entry, tokens, keys(tokens, salt + lora), found.num_known)
    history.finish(entry, [], keys(tokens, salt + lora), len(tokens))
    return found


def common(found: HistoryMatch) -> int:
    return found.nearest.common_tokens if found.nearest else 0


def test_the_longest_beginning_is_found_to_the_token() -> None:
    history = History(BLOCK, lambda: 1 << 20)
    assert see(history, list(range(10))).nearest is None
    assert common(see(history, [*range(10), 99])) == 10, "the earlier request ended there, within a block"
    assert common(see(history, [*range(6), 77, 78, 79])) == 6
    assert common(see(history, [*range(10), 98, 97, 96])) == 10
    assert see(history, [50, 51, 52, 53]).nearest is None
    assert see(history, list(range(12))).num_known == 2


def test_tokens_are_shared_and_read_through_parents() -> None:
    history = History(BLOCK, lambda: 1 << 20)
    see(history, list(range(40)))
    size = history.size_bytes
    found = see(history, [*range(40), 1, 2, 3, 4])
    assert history.size_bytes - size < size, "only what is new is kept"
    assert found.nearest is not None
    again = history.find(Entry("x", 0, "", "", 44), [*range(40), 1, 2, 3, 4], keys([*range(40), 1, 2, 3, 4]))
    assert again.nearest is not None
    assert list(again.nearest.entry.slice(0, 44)) == [*range(40), 1, 2, 3, 4]


def test_an_answer_belongs_to_what_is_known() -> None:
    history = History(BLOCK, lambda: 1 << 20)
    prompt, answer = list(range(6)), [60, 61, 62]
    entry = Entry("a", 0, "", "", 6)
    history.remember(entry, prompt, keys(prompt), 0)
    history.finish(entry, answer, keys(prompt + answer), 8)  # the last token of an answer has no KV
    found = history.find(Entry("b", 1, "", "", 10), [*prompt, *answer, 5], keys([*prompt, *answer, 5]))
    assert (found.num_known, common(found)) == (2, 8)


def test_another_image_ends_what_is_common() -> None:
    history = History(BLOCK, lambda: 1 << 20)
    see(history, [7] * 10, image="one")
    assert common(history.find(entry_of([7] * 10, image="two"), [7] * 10, keys([7] * 10)[:1])) == 5
    assert common(history.find(entry_of([7] * 10, image="one"), [7] * 10, keys([7] * 10))) == 10
    assert common(history.find(entry_of([7] * 10, image="one"), [7] * 10, keys([7] * 10)[:1])) == 8


def test_another_salt_is_never_compared() -> None:
    history = History(BLOCK, lambda: 1 << 20)
    for salt in ("s", "", "t"):
        found = see(history, list(range(40)), salt=salt)
        assert (found.num_known, found.nearest, found.elsewhere) == (0, None, None)
    assert common(see(history, list(range(40)), salt="s")) == 40
    for _ in range(20):  # others' requests push nobody's out
        see(history, list(range(40)), salt="t", lora="l")
    assert see(history, list(range(40)), salt="", lora="l").elsewhere is not None


def test_a_request_of_another_salt_is_not_compared_even_where_block_keys_are_equal() -> None:
    """Block keys hold the salt, so this guard is the second one: it holds for keys that do not."""
    history = History(BLOCK, lambda: 1 << 20)
    tokens = list(range(40))
    unsalted = keys(tokens)
    of_tenant = entry_of(tokens, salt="s")
    history.remember(of_tenant, tokens, unsalted, history.find(of_tenant, tokens, unsalted).num_known)
    for salt in ("t", ""):
        found = history.find(entry_of(tokens, salt=salt), tokens, unsalted)
        assert found.num_known == 10, "the keys are equal"
        assert (found.nearest, found.elsewhere) == (None, None)
    assert common(history.find(entry_of(tokens, salt="s"), tokens, unsalted)) == 40, "the control"


def test_requests_of_another_salt_do_not_displace_the_nearest_one() -> None:
    """Few requests are remembered of those that share no whole block, for each salt by itself."""
    history = History(BLOCK, lambda: 1 << 20)
    see(history, [1, 2, 3, 4], salt="s")
    for number in range(2 * BRANCHES):
        see(history, [1, 2, 3, 100 + number], salt="t")
    assert common(see(history, [1, 2, 3, 99], salt="s")) == 3
    for number in range(BRANCHES):  # the control: those of its own salt do
        see(history, [50, 51, 52, 100 + number], salt="s")
    assert common(see(history, [1, 2, 3, 98], salt="s")) == 0


def test_other_salt_and_adapter() -> None:
    history = History(BLOCK, lambda: 1 << 20, lambda: True)
    see(history, list(range(40)), salt="s")
    other = see(history, list(range(40)), lora="l").elsewhere
    assert other is not None
    assert (other.common_tokens, other.entry.salt) == (40, "s")
    assert see(history, list(range(40)), salt="s").elsewhere is None
    assert see(history, list(range(50, 90)), salt="t").elsewhere is None


def test_the_budget_holds_and_a_used_beginning_stays() -> None:
    history = History(BLOCK, lambda: 40_000)
    rules = list(range(20))
    see(history, rules)
    for number in range(200):
        tail = [(number * 7 + i) % 250 for i in range(20)]
        assert see(history, rules + tail).num_known >= 5, "the beginning that all use is never forgotten"
        assert history.size_bytes <= 40_000
    assert 3 < len(history) < 60
    assert len(history._by_key) < 500
    assert len(history._branches) < 500
    assert len(history._starts) < 500
