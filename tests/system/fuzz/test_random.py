# SPDX-License-Identifier: Apache-2.0
"""Random bodies, references, packages and frames; a case that fails is named by its number, which makes it again."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import soak
from tests.support.packages import identity, packed
from tests.support.sizes import scaled
from tests.system.fuzz.cases import NUM, TOKENS, body, changed
from tests.system.fuzz.checks import (
    PATHS,
    SHAPE,
    check_application,
    check_body,
    check_client,
    check_frame,
    check_package,
    check_reference,
    short_texts,
)
from vllm_mmcache.components.features import package
from vllm_mmcache.components.features.package import Record
from vllm_mmcache.components.image_extraction import extract as extracting
from vllm_mmcache.components.image_extraction import request_shapes
from vllm_mmcache.storage import frame as framing

CHAT = "/v1/chat/completions"
HEAD_TOKENS = (*TOKENS, b"__metadata__", b'"shape":[2,8]', b"-1", b"1e9", b'\\"', b"vllm-mmcache features 2", b"0" * 64)


@pytest.fixture(autouse=True, scope="module")
def _short_texts() -> Iterator[None]:
    with short_texts():
        yield


def all_of(num: int, case: Callable[[Random], int]) -> int:
    """Run so many cases; returns the sum of what they return, so that a test can say that they did something."""
    total = 0
    for number in range(num):
        try:
            total += case(Random(number))
        except Exception as error:
            error.add_note(f"case {number}")
            raise
    return total


def a_body(chance: Random) -> int:
    path = chance.choice(PATHS)
    return check_body(body(chance, path), path)


def an_application(chance: Random) -> int:
    path = chance.choice(PATHS)
    return check_application(body(chance, path), path)


@pytest.mark.slow
def test_bodies() -> None:
    num = scaled(NUM["bodies"])
    assert all_of(num, a_body) > num / 20


@pytest.mark.slow
def test_applications() -> None:
    num = scaled(NUM["applications"])
    assert all_of(num, an_application) > num / 20


@pytest.mark.slow
@settings(max_examples=scaled(NUM["structured"]), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(PATHS))
def test_structured_bodies(chance: Random, path: str) -> None:
    """The same bodies, but hypothesis chooses, looks for edges, and makes what fails smaller."""
    check_body(body(chance, path), path)


@pytest.mark.slow
def test_clients() -> None:
    num = scaled(NUM["clients"])
    assert all_of(num, lambda chance: check_client(body(chance, CHAT))) > num / 20


def test_references() -> None:
    words = ("", "-", "0", "mmcache-", "\0", "é", "\ud800", "A" * 99)

    def case(chance: Random) -> int:
        check_reference("".join(chance.choices(words, k=chance.randint(0, 4))))
        return 1

    assert all_of(scaled(NUM["references"]), case)


def a_package(chance: Random) -> int:
    """Random bytes, changed packages, and packages whose head was written anew for what was changed in it."""
    kind = chance.randint(0, 4)
    whole = packed(chance.choice((0, 0, 0, 1)), SHAPE)
    if kind == 0:
        return check_package(chance.randbytes(chance.randint(0, 400)))
    if kind == 1:
        length = int.from_bytes(whole[:8], "little")
        head = changed(chance, whole[8 : 8 + length], HEAD_TOKENS)
        return check_package(len(head).to_bytes(8, "little") + head + whole[8 + length :])
    if kind == 2:
        fields: dict[str, Any] = {"num_tokens": 2, "width": 8, "dtype": "bfloat16"}
        fields[chance.choice(list(fields))] = chance.choice((0, 1, 4, 2**62, "float32", "float64"))
        try:
            shape = package.Shape(**fields)
        except ValueError:
            return 0
        return check_package(Record(identity(), shape, chance.randbytes(32).hex()).head() + whole[-32:])
    return check_package(changed(chance, whole, HEAD_TOKENS) if kind == 3 else whole)


@pytest.mark.slow
def test_packages() -> None:
    num = scaled(NUM["packages"])
    assert num / 10 < all_of(num, a_package) < num / 2


def a_frame(chance: Random) -> int:
    key = chance.randbytes(chance.choice((0, 1, 32)))
    framed = framing.frame(key, chance.randbytes(chance.choice((0, 1, 40, 300))))
    kind = chance.randint(0, 3)
    if kind == 0:
        return check_frame(key, changed(chance, framed), (key, framed))
    if kind == 1:
        return check_frame(changed(chance, key), framed, (key, framed))
    return check_frame(key, framed if kind == 2 else chance.randbytes(chance.randint(0, 99)), (key, framed))


def test_frames() -> None:
    num = scaled(NUM["frames"])
    assert num / 10 < all_of(num, a_frame) < num / 2


FAULTS: dict[str, tuple[Any, str, Any, Callable[[Random], int]]] = {
    "what is left may be no string": (extracting, "is_string", lambda text: True, a_body),
    "a text part is an image": (
        request_shapes, "_parts",
        lambda content, lists: (text for part in lists.dicts(content) for text in part.values() if type(text) is str),
        a_body,
    ),
    "base64 is not looked at": (extracting, "_unescaped", lambda text: text.replace(b"\\", b"") + b"AAAA", a_body),
    "a checksum is not looked at": (package.Check, "end", lambda self: None, a_package),
    "a digest is not looked at": (framing, "_digest", lambda key, value: b"\0" * 32, a_frame),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: with one check of ours left out, CI's number of cases is enough to see it."""
    owner, attribute, wrong, case = FAULTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises((AssertionError, ValueError)):
        all_of(max(NUM.values()), case)


def test_a_million() -> None:
    """`make soak` runs so many cases."""
    assert sum(NUM.values()) * soak.TESTS["fuzz"][0] >= 1_000_000


def test_cases_are_what_they_were() -> None:
    """A number is a case: else nobody could run one again."""
    assert [body(Random(number), CHAT) for number in range(20)] == [body(Random(number), CHAT) for number in range(20)]
    assert len({body(Random(number), CHAT) for number in range(200)}) > 190
    parsed = 0
    for number in range(200):
        try:
            parsed += isinstance(json.loads(body(Random(number), CHAT)), dict)
        except ValueError:
            continue
    assert parsed > 100
