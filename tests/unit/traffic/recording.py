# SPDX-License-Identifier: Apache-2.0
"""What a server's `--observe` writes of requests: made by its own classes, from prompts of a plain tokenizer."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import xxhash

from tests.unit.traffic.logs import Request
from vllm_mmcache.components.observe.record import wire
from vllm_mmcache.components.observe.record.causes import Lookup, explain
from vllm_mmcache.components.observe.record.digests import salt_class
from vllm_mmcache.components.observe.record.file import RecordFile
from vllm_mmcache.components.observe.record.history import Entry, History
from vllm_mmcache.components.observe.record.pending import RequestSnapshot
from vllm_mmcache.components.observe.record.recorder import Recorder
from vllm_mmcache.traffic.estimate import TURN_TOKENS
from vllm_mmcache.traffic.models import Model
from vllm_mmcache.traffic.requests import Picture, Words, prompt_of

ANSWER = "12345678"
"""What the server says to every question, and what tests/unit/traffic/test_estimate.py sends back."""
_IMAGE = 7  # the token that stands for an image


class Server:
    """Stock vLLM with `observe` and caches without end: it answers requests, and writes their records to a file."""

    def __init__(self, path: Path, model: Model, block_tokens: int = 4, budget_bytes: int = 1 << 30) -> None:
        self._file = RecordFile(path, lambda: budget_bytes)
        self._recorder = Recorder()
        self._recorder.model = "some/model"
        self._model, self._block = model, block_tokens
        self._history = History(block_tokens, lambda: 1 << 30)
        self._processed: set[str] = set()
        self._encoded: set[str] = set()

    def ask_all(self, requests: Iterable[Request], num_answers: int = 1) -> None:
        for request in requests:
            self.ask(request, num_answers)

    def ask(self, request: Request, num_answers: int = 1) -> None:
        """One request, whose first answer the server remembers."""
        asked, tokens = self._rendered(request, num_answers)
        ticket = self._recorder.waiting.add(asked)
        for number in range(num_answers):
            name = f"{ticket}.{number}" if num_answers > 1 else ticket
            outcome = self._served(name, ticket, asked, tokens)
            self._recorder.note(wire.pack_outcome(outcome))
            self._recorder.read_notes()
            record = self._recorder.store.get(name)
            assert record is not None
            self._file.write(record)

    def _rendered(self, request: Request, num_answers: int) -> tuple[RequestSnapshot, list[int]]:
        tokens: list[int] = []
        turns, roles, spans, layers = [], [], list[wire.Span](), []
        for turn in prompt_of(request).turns:
            turns.append(len(tokens))
            for place, part in enumerate(turn):
                if isinstance(part, Words):
                    if place == 0:
                        roles.append(part.text)
                        tokens += _opening(part.text)
                    else:
                        tokens += _tokens(part.text)
                    continue
                assert isinstance(part, Picture)
                name = part.digest.hex()
                spans.append((len(tokens), self._model.tokens(part.width, part.height), name))
                tokens += [_IMAGE] * spans[-1][1]
                layers.append((part.width, part.height, "left", "decoded", "hit" if name in self._processed else "run"))
                self._processed.add(name)
        turns.append(len(tokens))
        tokens += _opening("assistant")
        asked = RequestSnapshot(
            request_id="chatcmpl-1", time_s=1.0, prompt_tokens=len(tokens), lora="",
            salt=salt_class(request.get("cache_salt")), num_answers=num_answers, turns=turns,
            roles=[*roles, "assistant"], answers=[], spans=spans, layers=layers,
        )  # fmt: skip
        return asked, tokens

    def _served(self, name: str, ticket: str, asked: RequestSnapshot, tokens: list[int]) -> wire.Outcome:
        first_images = tuple(image for start, _, image in asked.spans if start < self._block)
        end = sum(asked.spans[-1][:2]) if asked.spans else 0
        notes = wire.Notes(list(asked.turns), list(asked.roles), [], list(asked.spans), [("", "", 0, 0)] * 99)
        _, _, text = wire.open_notes(wire.pack(ticket, "r", notes))
        entry = Entry(name, asked.time_s, asked.salt, "", len(tokens), end, first_images, text)
        keys = self._keys(asked, tokens)
        found = self._history.find(entry, tokens, keys)
        hit = min(found.num_known, (len(tokens) - 1) // self._block) * self._block
        self._history.remember(entry, tokens, keys, found.num_known)
        features = {}
        for index, (start, length, image) in enumerate(asked.spans):
            if start + length > hit and image not in self._encoded:
                self._encoded.add(image)
                features[index] = "tower"
        answer = _tokens(ANSWER)
        self._history.finish(entry, answer, self._keys(asked, [*tokens, *answer]), len(tokens) + len(answer) - 1)
        near = found.nearest
        return wire.Outcome(
            ticket=ticket, id=name, reused_tokens=hit, external_tokens=0, block_tokens=self._block, engine=0,
            groups=[(0, "full_attention", self._block, hit, False)],
            nearest=(near.entry.id, 1.0, near.common_tokens, True, True) if near else None,
            features=features, causes=explain(entry, found, Lookup(hit, self._block, "")),
        )  # fmt: skip

    def _keys(self, asked: RequestSnapshot, tokens: list[int]) -> list[bytes]:
        """As vLLM has them: each block's key is made of the key before it, its tokens and its images."""
        chain, keys = asked.salt.encode(), []
        for start in range(0, len(tokens) // self._block * self._block, self._block):
            images = [image for at, length, image in asked.spans if at < start + self._block and at + length > start]
            said = repr((chain, tokens[start : start + self._block], images))
            keys.append(chain := hashlib.sha256(said.encode()).digest())
        return keys


def _tokens(text: str) -> list[int]:
    """Each four characters are a token."""
    pieces = (text[start : start + 4] for start in range(0, round(len(text) / 4) * 4, 4))
    return [1000 + xxhash.xxh32_intdigest(piece) % 2**30 for piece in pieces]


def _opening(role: str) -> list[int]:
    return _tokens(f"<turn of {role}>".ljust(99, "."))[: TURN_TOKENS + round(len(role) / 4)]
