# SPDX-License-Identifier: Apache-2.0
"""Plays requests, one after the other, through the caches of stock vLLM and of the plugin, and counts what is done.

Each cache forgets what was used longest ago. Requests that run at the same time are taken as if one came after the
other, answers take no room in the KV cache, and a hit ends in the block where two prompts begin to differ: within a
text, compared with the one that came last at that place. Layers with a window or a recurrent state have what a hit
needs at the end of a prompt, on stock also where an earlier request with the same beginning has stopped to find it, and
with the plugin at the end of each image. A recurrent state takes room in the KV cache, and goes before the blocks of
its request.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any, TypeVar

from blake3 import blake3

from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.traffic.models import UNKNOWN_SIDE, Model
from vllm_mmcache.traffic.requests import DIGEST_BYTES, Other, Part, Picture, Prompt, Words, digest_of

BLOCK_CHARS = 256
TURN_TOKENS = 4
"""Of a chat template, for each message."""
SIDES = ("stock", "mmcache")
_BEFORE_USER = ("system", "developer")

MOST_REMEMBERED = 1 << 20
"""Images, and turns of conversations: those of longer ago are taken for new, so that memory is bounded."""
MOST_IN_CONVERSATION = 1 << 16
"""Different images of one conversation. Above that all are forgotten, and repeats count as of other conversations."""
MOST_NEEDED = 1 << 22
"""Repeated uses that are kept for the curve of the store's size."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Sizes:
    """How large the caches are. Units: tokens, bytes."""

    kv_tokens: int = 500_000
    encoder_tokens: int = 8_192
    processor_bytes: int = 4 << 30
    feature_bytes: int = 2 << 30
    """Of the plugin's store in all its tiers, with RAM."""
    chars_per_token: float = 4.0
    block_tokens: int = 16
    """Of one block of the KV cache: a hit is whole blocks."""


@dataclass
class Done:
    """What one side does for all requests."""

    decoded: int = 0
    processed: int = 0
    encoded: int = 0
    """Images that the vision tower runs for."""
    encoded_tokens: int = 0
    """That the vision tower makes of them."""
    reused_tokens: int = 0
    decoded_pixels: dict[str, int] = field(default_factory=dict)
    """By the format of the file."""
    processed_pixels: int = 0
    loaded_bytes: int = 0
    """Of features that come from the plugin's store instead of the vision tower."""


@dataclass
class Seen:
    """What the requests hold."""

    requests: int = 0
    conversations: int = 0
    tenants: set[str] = field(default_factory=set)
    prompt_tokens: int = 0
    images: int = 0
    image_tokens: int = 0
    new: int = 0
    """Never seen before, by anybody."""
    in_conversation: int = 0
    """Seen before in the same conversation."""
    across_conversations: int = 0
    """Seen before in another conversation of the same tenant, and not in this one."""
    across_tenants: int = 0
    """Seen before by other tenants alone: kept apart, and so as good as new."""
    of_unknown_size: int = 0
    unknown_images: int = 0
    """Of which the log has neither the content nor a name; `images` has none of these, and nothing is done for them."""
    other_media: int = 0
    """Videos, sounds and documents, whose tokens are not counted."""
    continued: int = 0
    """Requests that go on with an answer that the server keeps: the turns before that are not counted."""
    file_bytes: int = 0
    """Of all images, each as often as it was sent."""
    grown: int = 0
    """Requests that begin with all of their conversation's latest request, also when they equal it."""
    rewritten: int = 0
    """Requests of a conversation that differ within what its latest request has asked."""
    dropped: int = 0
    """Of these, requests that lack an image which the one before had: such as the pictures outside a window."""


class Lru(LruTable[Key, int]):
    """Keeps what was used last, up to a size. A value is what its entry takes."""

    def __init__(self, capacity: int) -> None:
        budget = Budget(sys.maxsize, capacity)
        super().__init__(lambda: budget, lambda size: size)

    def use(self, key: Key, size: int) -> bool:
        """Whether it was there; it is from now on, unless it is larger than all room."""
        is_there = self.get(key) is not None
        if not is_there:
            self.replace(key, size)
        return is_there


@dataclass(frozen=True, slots=True)
class _Unit:
    """A piece of a prompt that is reused whole or not at all. chain: digest of it and all before it."""

    chain: bytes
    tokens: int
    picture: Picture | None
    ends_turn: bool
    own: bytes
    """A digest of the piece alone."""
    text: str = ""
    """Of a piece of text whose tokens nobody has counted."""


class _KVCache(Lru[bytes]):
    """Units that a KV cache holds, by their chains, and what is known of them, which is forgotten with the unit.

    States that take room have keys of their own.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.states: dict[str, dict[bytes, int]] = {side: {} for side in SIDES}
        """By side: chain of a unit -> where in that unit a hit may end, in tokens from the prompt's start."""
        self.followers: dict[bytes, _Unit] = {}
        """Chain of a unit -> the text that came last behind it."""

    def _remove(self, key: bytes) -> int | None:
        for states in self.states.values():
            states.pop(key, None)
        self.followers.pop(key, None)
        return super()._remove(key)


@dataclass(slots=True)
class _Conversation:
    """What is known of one. Digests."""

    end: bytes = b""
    """Of its last request."""
    last: frozenset[bytes] = frozenset()
    """Images of its last request."""
    images: set[bytes] = field(default_factory=set)
    """Of all its requests."""


class Estimate:
    """Takes one request after the other; `seen` and `done` say what came of all."""

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self.model = model
        self.sizes = sizes
        self.seen = Seen()
        self.done = {side: Done() for side in SIDES}
        self.distances = Distances()
        """Of the features that are looked for in the plugin's store, if there were room for all."""
        self._state_tokens = round(model.state_blocks * sizes.block_tokens)
        room = max(0, sizes.kv_tokens - self._state_tokens)  # a request that runs has a state of its own
        kv = _KVCache(room)  # of both sides, where they keep the same
        self._kv = {side: _KVCache(room) if self._state_tokens else kv for side in SIDES}
        self._encoder: dict[str, Lru[tuple[str, bytes]]] = {side: Lru(sizes.encoder_tokens) for side in SIDES}
        self._processor: Lru[bytes] = Lru(sizes.processor_bytes)
        self._features: Lru[tuple[str, bytes]] = Lru(sizes.feature_bytes)
        self._records: LruTable[tuple[str, bytes], bool] = _of_the_last()
        self._by_uuid: LruTable[tuple[str, str], Picture] = _of_the_last()  # by tenant and uuid
        self._known: LruTable[bytes, set[str]] = _of_the_last()  # image -> tenants
        self._turns: LruTable[bytes, _Conversation] = _of_the_last()  # by the end of a turn, or by two turns

    def add_all(self, prompts: Iterable[Prompt]) -> None:
        """Play requests in their order."""
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """Play one request."""
        units = list(self._units(prompt))
        conversation = self._conversation(units, _num_before_user(prompt), prompt.tenant)
        self.seen.requests += 1
        self.seen.tenants.add(prompt.tenant)
        self.seen.continued += prompt.is_continued
        ends = list(accumulate(unit.tokens for unit in units))
        self.seen.prompt_tokens += ends[-1]
        known = {side: units[: self._num_known(side, units)] for side in SIDES}
        reused = {side: self._reused_tokens(side, units, len(known[side]), ends) for side in SIDES}
        for side in SIDES:
            self.done[side].reused_tokens += reused[side]
        for place, unit in enumerate(units):
            if unit.picture is not None:
                tokens = self._image_tokens(unit.picture)
                self._count(unit.picture, prompt.tenant, tokens, conversation)
                self._stock(unit.picture, tokens, is_reused=ends[place] <= reused["stock"])
                self._ours(unit.picture, prompt.tenant, tokens, is_reused=ends[place] <= reused["mmcache"])
        junction = ends[len(known["stock"]) - 1] if known["stock"] else 0
        self._keep(units, ends, junction, reused)

    def _units(self, prompt: Prompt) -> Iterator[_Unit]:
        chain = digest_of(prompt.tenant)
        for turn in prompt.turns:
            pieces = [piece for part in turn for piece in self._pieces(part, prompt.tenant)]
            for number, piece in enumerate(pieces):
                own, text = _digest(piece), ""
                chain = blake3(chain + own).digest(DIGEST_BYTES)
                picture = None
                if isinstance(piece, Picture):
                    tokens = self._image_tokens(piece) + self.model.mark_tokens * (piece.tokens is None)
                    picture = piece if piece.digest else None
                    self.seen.unknown_images += picture is None
                elif isinstance(piece, Other):
                    tokens = 0
                    self.seen.other_media += 1
                elif piece.tokens is not None:
                    tokens = piece.tokens
                else:
                    text = piece.text
                    tokens = TURN_TOKENS * (number == 0) + round(len(text) / self.sizes.chars_per_token)
                yield _Unit(chain, tokens, picture, number == len(pieces) - 1, own, text)

    def _pieces(self, part: Part, tenant: str) -> Iterator[Part]:
        """A part as it is reused: text in pieces, and an image that has only its client's uuid as the one it is."""
        if isinstance(part, Words) and part.tokens is None:
            starts = range(0, len(part.text) or 1, BLOCK_CHARS)
            yield from (Words(part.text[start : start + BLOCK_CHARS]) for start in starts)
        elif isinstance(part, Picture) and part.uuid:
            key = tenant, part.uuid
            if part.digest:
                self._by_uuid.replace(key, part)
                yield part
            else:
                known = self._by_uuid.get(key) or Picture(digest_of(part.uuid))
                yield known if part.is_sent else replace(known, num_bytes=0, is_sent=False)
        else:
            yield part

    def _image_tokens(self, picture: Picture) -> int:
        return self.model.tokens(picture.width, picture.height) if picture.tokens is None else picture.tokens

    def _conversation(self, units: Sequence[_Unit], num_before: int, tenant: str) -> _Conversation:
        """Find or begin the conversation of a request, count how it goes on, and note its turns.

        It is that of the longest beginning in whole turns. Where the beginning was dropped or changed, it is that of
        the last two turns that are known to follow each other. What comes before the first turn of a user, such as a
        system prompt, makes none.
        """
        ends = [unit.chain for unit in units if unit.ends_turn][num_before:]
        keys = [*_pairs_of_turns(units, num_before, tenant), *ends]
        known = next((found for key in reversed(keys) if (found := self._turns.get(key))), None)
        images = frozenset(unit.picture.digest for unit in units if unit.picture is not None)
        if known is None:
            known = _Conversation()
            self.seen.conversations += 1
        elif known.end in {unit.chain for unit in units}:
            self.seen.grown += 1
        else:
            self.seen.rewritten += 1
            self.seen.dropped += not known.last <= images
        for key in keys:
            self._turns.admit(key, known)
        known.end, known.last = units[-1].chain, images
        if len(known.images) > MOST_IN_CONVERSATION:
            known.images.clear()
        return known

    def _num_known(self, side: str, units: Sequence[_Unit]) -> int:
        """How many units the layers with full attention still have; at least the last one is computed."""
        known = 0
        while known < len(units) - 1 and units[known].chain in self._kv[side]:
            known += 1
        return known

    def _reused_tokens(self, side: str, units: Sequence[_Unit], num_known: int, ends: Sequence[int]) -> int:
        """Tokens of a hit, of whose units so many are known.

        With full attention in all layers: these, and what the next text has in common with the last one there, in whole
        blocks. Else up to the last place where every layer has a state.
        """
        known = units[:num_known]
        if self.model.keeps_all_kv:
            alike = self._alike_tokens(side, known[-1], units[num_known]) if known else 0
            return self._whole_blocks(min(ends[num_known - 1] + alike, ends[-1] - 1)) if known else 0
        states = self._kv[side].states[side]
        kept = (unit for unit in known if not self._state_tokens or _state_of(unit) in self._kv[side])
        return max((states.get(unit.chain, 0) for unit in kept), default=0)

    def _alike_tokens(self, side: str, last_known: _Unit, unit: _Unit) -> int:
        """Tokens that a text shares, from its start, with the last text behind the same beginning; 0 if it is gone."""
        follower = self._kv[side].followers.get(last_known.chain)
        if follower is None or follower.chain not in self._kv[side]:
            return 0
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(follower.text, unit.text, strict=False))
        return round(sum(1 for _ in alike) / self.sizes.chars_per_token)

    def _keep(self, units: Sequence[_Unit], ends: Sequence[int], junction: int, reused: dict[str, int]) -> None:
        """Keep the states and the KV of a prompt: its states are evicted first, then its end, and its beginning last.

        junction: how many tokens the layers with full attention still had, on stock. reused: by side, tokens of the
        hit; the state there was used again.
        """
        places: dict[str, list[int]] = {side: [] for side in SIDES}
        if not self.model.keeps_all_kv:
            images = [end for unit, end in zip(units, ends, strict=True) if unit.picture is not None]
            stops = {"stock": [junction], "mmcache": images}
            is_whole = ends[-1] <= self.model.window_tokens
            places = {side: [*ends] if is_whole else [reused[side], *stops[side], ends[-1]] for side in SIDES}
        states = {side: list(self._states_at(places[side], units, ends, reused[side])) for side in SIDES}
        if self._state_tokens:
            for side in SIDES:
                for unit, _ in states[side]:
                    self._kv[side].use(_state_of(unit), self._state_tokens)
        for kv in dict.fromkeys(self._kv.values()):
            for unit in reversed(units):
                kv.use(unit.chain, unit.tokens)
            for unit, follower in pairwise(units if self.model.keeps_all_kv else ()):
                if follower.text and unit.chain in kv:
                    kv.followers[unit.chain] = follower
        for side in SIDES:
            kept = self._kv[side].states[side]
            for unit, place in states[side]:
                if unit.chain in self._kv[side]:
                    kept[unit.chain] = max(place, kept.get(unit.chain, 0))

    def _states_at(
        self, places: Sequence[int], units: Sequence[_Unit], ends: Sequence[int], reused: int
    ) -> Iterator[tuple[_Unit, int]]:
        """These places, in tokens, rounded down to whole blocks, each with the unit that it lies in; 0 is left out.

        Where states take room, those before the end of the hit are left out, since they were not computed again.
        """
        for place in sorted(map(self._whole_blocks, places)):
            if place and not (self._state_tokens and place < reused):
                yield units[bisect_left(ends, place)], place

    def _whole_blocks(self, tokens: int) -> int:
        return tokens // self.sizes.block_tokens * self.sizes.block_tokens

    def _count(self, picture: Picture, tenant: str, tokens: int, conversation: _Conversation) -> None:
        seen, digest = self.seen, picture.digest
        tenants = self._known.admit(digest, set())
        seen.images += 1
        seen.image_tokens += tokens
        seen.file_bytes += picture.num_bytes
        seen.of_unknown_size += not picture.width
        if digest in conversation.images:
            seen.in_conversation += 1
        elif tenant in tenants:
            seen.across_conversations += 1
        elif tenants:
            seen.across_tenants += 1
        else:
            seen.new += 1
        tenants.add(tenant)
        conversation.images.add(digest)

    def _stock(self, picture: Picture, tokens: int, *, is_reused: bool) -> None:
        done = self.done["stock"]
        num_pixels = self._num_pixels(picture)
        is_processed = self._processor.use(picture.digest, round(num_pixels * self.model.pixel_bytes))
        if picture.is_sent or not is_processed:
            _decode(done, picture)
        if not is_processed:
            _process(done, num_pixels)
        if not is_reused and not self._encoder["stock"].use(("", picture.digest), tokens):
            _encode(done, tokens)

    def _ours(self, picture: Picture, tenant: str, tokens: int, *, is_reused: bool) -> None:
        done, key = self.done["mmcache"], (tenant, picture.digest)
        is_known = self._records.replace(key, True) is not None
        if not is_reused and not self._encoder["mmcache"].use(key, tokens):
            size = tokens * self.model.feature_bytes
            self.distances.use(key, size)
            if self._features.use(key, size):
                done.loaded_bytes += size
            else:
                _encode(done, tokens)
                is_known = False
        if is_known:
            return
        _decode(done, picture)
        _process(done, self._num_pixels(picture))

    def _num_pixels(self, picture: Picture) -> int:
        """As the processor brings it to its size."""
        wide, high = self.model.size(picture.width, picture.height)
        return wide * high


def _pairs_of_turns(units: Sequence[_Unit], num_before: int, tenant: str) -> Iterator[bytes]:
    """A key for each two adjacent turns of a tenant, without the first `num_before`, whatever comes before them."""
    turns, own = list[bytes](), b""
    for unit in units:
        own += unit.own
        if unit.ends_turn:
            turns.append(blake3(own).digest(DIGEST_BYTES))
            own = b""
    for one, following in pairwise(turns[num_before:]):
        yield digest_of(tenant)[:8] + one + following


def _of_the_last() -> LruTable[Any, Any]:
    """A table of the last MOST_REMEMBERED."""
    budget = Budget(MOST_REMEMBERED, sys.maxsize)
    return LruTable(lambda: budget, 1)


def _state_of(unit: _Unit) -> bytes:
    """The key in the KV cache of the state that belongs to a unit."""
    return unit.chain + b"state"


class Distances:
    """How large a cache would have had to be, so that what is used again is still there.

    Exact for any size up to `most_keys` different keys and MOST_NEEDED repeats; then for a part of the keys, chosen by
    their digests, which stands for all. A Fenwick tree of sums over places; a place is one use, of each key the latest.
    """

    def __init__(self, most_keys: int = 1 << 18) -> None:
        self.needed = array("d")
        """Bytes, for each use of a key that was used before."""
        self._most_keys = most_keys
        self._share = 1.0  # of the keys that are looked at
        self._num_uses = 0
        self._last: dict[Hashable, tuple[int, float]] = {}  # in the order of their last uses
        self._tree = [0.0]

    def use(self, key: Hashable, size: float) -> None:
        """Note a use of what takes so many bytes."""
        if self._share < 1 and _drawn(key) >= self._share:
            return
        self._num_uses += 1
        before = self._last.pop(key, None)
        if before is not None:
            place, old = before
            self.needed.append((self._sum(len(self._tree) - 1) - self._sum(place - 1)) / self._share)
            self._change(place, -old)
        self._append(key, size)
        if len(self._last) > self._most_keys or len(self.needed) > MOST_NEEDED:
            self._halve()
        if len(self._tree) > 1024 + 4 * len(self._last):
            self._place_anew()

    def size_for(self, share: float) -> float:
        """Bytes with which this share of the hits that there could be are hits."""
        ordered = sorted(self.needed)
        return ordered[max(0, min(len(ordered), round(share * len(ordered))) - 1)] if ordered else 0.0

    def curve(self, most: int = 100) -> list[tuple[float, float]]:
        """How large a cache is, in bytes, and which share of all uses it misses; about so many points at most."""
        ordered = sorted(self.needed)
        if not self._num_uses:
            return []
        chosen = {ordered[(number * len(ordered) - 1) // most] for number in range(1, most + 1)} if ordered else set()
        return [(size, 1 - bisect_right(ordered, size) / self._num_uses) for size in (0.0, *sorted(chosen))]

    def _halve(self) -> None:
        """Look at half as many keys from now on, and forget every second use that was seen so far."""
        self._share /= 2
        self._last = {key: last for key, last in self._last.items() if _drawn(key) < self._share}
        del self.needed[1::2]
        self._num_uses //= 2
        self._place_anew()

    def _place_anew(self) -> None:
        """Give each key's latest use a new place, without gaps."""
        last, self._last, self._tree = self._last, {}, [0.0]
        for key, (_, size) in last.items():
            self._append(key, size)

    def _append(self, key: Hashable, size: float) -> None:
        place = len(self._tree)
        below = place & (place - 1)  # node `place` sums the places from below + 1 to itself
        self._tree.append(self._sum(place - 1) - self._sum(below))
        self._change(place, size)
        self._last[key] = place, size

    def _sum(self, place: int) -> float:
        total = 0.0
        while place > 0:
            total += self._tree[place]
            place &= place - 1
        return total

    def _change(self, place: int, by: float) -> None:
        while place < len(self._tree):
            self._tree[place] += by
            place += place & -place


def _drawn(key: Hashable) -> float:
    """A number from 0 to 1, always the same for a key."""
    return int.from_bytes(blake3(repr(key).encode()).digest(8), "big") / (1 << 64)


def _num_before_user(prompt: Prompt) -> int:
    """How many turns of system and developer a prompt begins with; never all of them."""
    roles = (turn[0] for turn in prompt.turns[:-1])
    return sum(1 for _ in takewhile(lambda role: isinstance(role, Words) and role.text in _BEFORE_USER, roles))


def _decode(done: Done, picture: Picture) -> None:
    done.decoded += 1
    width, height = picture.width or UNKNOWN_SIDE, picture.height or UNKNOWN_SIDE
    name = picture.format or "JPEG"
    done.decoded_pixels[name] = done.decoded_pixels.get(name, 0) + width * height


def _encode(done: Done, tokens: int) -> None:
    done.encoded += 1
    done.encoded_tokens += tokens


def _process(done: Done, num_pixels: int) -> None:
    done.processed += 1
    done.processed_pixels += num_pixels


def _digest(piece: Part) -> bytes:
    if isinstance(piece, Picture):
        return b"i" + piece.digest
    if isinstance(piece, Other):
        return b"o" + piece.digest
    return b"t" + blake3(piece.text.encode("utf-8", "surrogatepass")).digest(DIGEST_BYTES)
