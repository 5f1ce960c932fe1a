# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer with the family's special tokens, trained on text that this file writes.

The text is plain English about pictures, made from word lists by arithmetic, so no data file ships and the same
tokenizer comes out everywhere. Every byte is in the alphabet: any text can be encoded, without <unk>.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from mmcache_tools.zoo.family import Family

MERGED_VOCAB_TOKENS = 1024  # bytes, merges and special tokens together; beyond it the trainer has little to merge

# The one that Qwen2 uses. Gemma's own is SentencePiece; a byte-level one is enough there, since only special tokens
# and newlines matter to the processors.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _words(text: str) -> list[str]:
    return text.split()


_THINGS = _words(
    "cat dog bird horse tree river mountain house window door table chair lamp bridge boat train street garden "
    "cloud shadow mirror bottle camera clock coin flower fence ladder basket letter map number chart invoice "
    "receipt button screen page table cell sign road wheel engine rocket galaxy page coffee cup astronaut"
)
_LOOKS = _words(
    "red green blue yellow white black grey orange small large round square bright dark old new empty full broken "
    "clean distant near wooden metal paper glass striped blurred sharp quiet"
)
_PLACES = _words("left right top bottom centre corner edge front back middle foreground background")
_VERBS = _words("shows holds covers touches follows hides carries reflects contains faces crosses supports")
_ASKS = (
    "What is in this picture?",
    "Describe the image in one sentence.",
    "How many of them can you see?",
    "Which picture is different, and why?",
    "Are the two images identical? Answer yes or no.",
    "Read the text in the second image.",
    "Compare it with the first image, please.",
    "You are a helpful assistant.",
)


def training_text() -> Iterator[str]:
    """Some two thousand sentences about pictures; the same ones on every machine."""
    for i in range(2000):
        # Strides are coprime to the list lengths, so all words and most pairs come up.
        thing, other = _THINGS[(i * 7) % len(_THINGS)], _THINGS[(i * 13 + 5) % len(_THINGS)]
        look, place = _LOOKS[(i * 11) % len(_LOOKS)], _PLACES[(i * 5) % len(_PLACES)]
        verb = _VERBS[(i * 7 + 3) % len(_VERBS)]
        yield f"The {look} {thing} at the {place} {verb} the {other}, and there are {i % 97} more of them."
        if i % 4 == 0:
            yield f"user\n{_ASKS[(i // 4) % len(_ASKS)]}\nassistant\nThis is a picture of a {look} {other}.\n"


def tokenizer_json(
    family: Family, text: Iterable[str] | None = None, num_tokens: int = MERGED_VOCAB_TOKENS
) -> tuple[str, dict[str, int], list[int]]:
    """The text of tokenizer.json, the ids of all tokens, and the ids that the model must never prefer.

    text: what to learn words from, in place of `training_text`; num_tokens: bytes and words together, at most.

    The last are special tokens and bytes outside printable ASCII. Drawn at random, the model would write image
    placeholders and broken UTF-8, which changes when a client sends it back on the next turn.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Gemma's special tokens have the lowest ids (<pad> 0, <eos> 1, <bos> 2), Qwen's follow the vocabulary.
    first = list(family.specials) if family.bos else []
    trainer = BpeTrainer(
        vocab_size=num_tokens, special_tokens=first, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(training_text() if text is None else text, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.specials])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.plain_added])
    if family.bos and family.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A",
            pair=f"{family.bos} $A {family.bos} $B",
            special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))],
        )
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    # ByteLevel writes a printable ASCII byte as itself, the space as U+0120, every other byte as something else.
    readable = {chr(code) for code in range(0x21, 0x7F)} | {"\u0120"}
    mute = [i for token, i in ids.items() if not set(token) <= readable]
    mute += [ids[token] for token in family.specials + family.plain_added]
    # Sorted keys: the vocabulary is a hash map in the tokenizers library, written in arbitrary order.
    written = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1, sort_keys=True)
    return written + "\n", ids, sorted(set(mute))
