# SPDX-License-Identifier: Apache-2.0
"""Bodies that are made to cost more than they are worth; `python -m tests.support.bad_bodies` times them.

vLLM answers or refuses each after it has parsed it, so what lies before must not cost more than the parsing.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator

import pybase64

from vllm_mmcache.components.image_extraction.extract import MIN_TEXT_BYTES, extract
from vllm_mmcache.components.image_extraction.request_shapes import WALKERS
from vllm_mmcache.content.base64_scan import find_texts

PATH = "/v1/chat/completions"
ROUNDS = 5


def image(num_chars: int) -> str:
    """A part with an image of so many characters of base64."""
    text = pybase64.b64encode(secrets.token_bytes(num_chars * 3 // 4)).decode()
    return f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{text}"}}}}'


def chat(*parts: str) -> bytes:
    return f'{{"model":"m","messages":[{{"role":"user","content":[{",".join(parts)}]}}]}}'.encode()


def repeated(pattern: str, num_bytes: int) -> str:
    return pattern * (num_bytes // len(pattern))


def listed(pattern: str, num_bytes: int) -> str:
    return f"[{repeated(pattern + ',', num_bytes)}{pattern}]"


def bad_bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """(what is bad about it, the body of about `size` bytes)."""
    small, large, rest = image(MIN_TEXT_BYTES), image(size * 6 // 10), size * 4 // 10
    url = "data:image/png;base64,"
    yield "one image, to compare with", chat(image(size))
    yield "needles that lead to nothing", listed('"data"', size).encode()
    yield "needles beside an image", chat(large, listed('"data"', rest))
    yield "keys that lead to nothing", chat("{" + repeated('"data":"",', size) + '"data":""}')
    yield "keys that have no end", ('{"data"' + " " * size).encode()
    yield "keys and spaces", ("{" + repeated('"data"' + " " * 50, size)).encode()
    yield "openings without a text", chat(listed(f'"{url}"', size))
    yield "openings with a long head", chat(listed('"data:image/' + "x" * 99 + '"', size))
    yield "openings that never end", f'"{url}'.encode() * (size // 24)
    yield "backslashes", chat('"' + repeated("\\\\", size) + '"')
    yield "backslashes before a needle", b'["' + b"\\" * size + b'"data:image/png;base64,"]'
    yield "backslashes before needles", chat(listed('"' + "\\\\" * 25 + '"', size), '"data"')
    yield "quotes", b'"' * size
    yield "strings a little too short", chat(listed('"' + "a" * (MIN_TEXT_BYTES - 1) + '"', size))
    yield "strings of the shortest length", chat(listed('"' + "a" * MIN_TEXT_BYTES + '"', size))
    yield "images of the shortest length", chat(*[small] * (size // len(small)))
    text = f'{{"type":"text","text":"{url}{"A" * MIN_TEXT_BYTES}"}}'
    yield "images that are text", chat(*[text] * (size // len(text)))
    yield "an image and one that is text", chat(large, f'{{"type":"text","text":"{url}{"A" * rest}"}}')
    yield "a large image that is text", chat(small, f'{{"type":"text","text":"{url}{"A" * size}"}}')
    yield "a large image that is no base64", chat(f'{{"image_url":{{"url":"{url}{"A" * size}!"}}}}')
    for num_plain in (3, 10, 30, 300):
        text = repeated("A" * num_plain + "\\/", size)
        yield f"an image, an escape after {num_plain} characters", chat(f'{{"image_url":{{"url":"{url}{text}"}}}}')
    yield "empty parts", chat(small, *["{}"] * (size // 3))
    yield "empty parts beside an image", chat(large, *["{}"] * (rest // 3))
    yield "parts beside an image", chat(large, *['{"type":"text","text":"a"}'] * (rest // 27))
    yield "empty messages", f'{{"messages":[{large},{repeated("[],", rest)}[]]}}'.encode()
    few = repeated('{"content":[{}]},', rest)
    yield "messages beside an image", f'{{"messages":[{{"content":[{large}]}},{few}{{}}]}}'.encode()
    few = repeated('{"content":[{}]},', min(rest, 17 * (100 + size // 4000)))
    yield "some messages beside an image", f'{{"messages":[{{"content":[{large}]}},{few}{{}}]}}'.encode()
    yield "some parts beside an image", chat(large, *["{}"] * (200 + size // 2000))
    yield "some text beside an image", chat(large, '"' + repeated('word \\" ', rest) + '"')
    yield "numbers", chat(small, *["1"] * (size // 2))
    yield "long numbers", chat(small, *["9" * 4000] * (size // 4001))
    yield "small strings", chat(small, *['"a"'] * (size // 4))
    yield "small strings beside an image", chat(large, *['"a"'] * (rest // 4))
    yield "nesting", chat(small, "[" * (size // 2) + "]" * (size // 2))
    yield "nesting beside an image", chat(large, "[" * (rest // 2) + "]" * (rest // 2))
    yield "much nesting", chat(large, *["[" * 500 + "]" * 500] * (rest // 1000))
    yield "much text", chat(small, '"' + repeated("word ", size) + '"')
    yield "no end", chat(large, f'{{"type":"text","text":"{url}{"A" * rest}"}}')[:-3]


def milliseconds(work: Callable[[], object]) -> float:
    """The best of some rounds, whether it raises or not."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        with contextlib.suppress(ValueError, RecursionError):
            work()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    """Print the table: milliseconds of json.loads, of looking for images, of all that is done before vLLM parses."""
    print("| body | MB | json.loads | looking | extracting |\n|---|---|---|---|---|")
    for name, body in bad_bodies(2_000_000):
        times = [
            milliseconds(lambda body=body: json.loads(body)),  # type: ignore[misc]
            milliseconds(lambda body=body: list(find_texts(body, MIN_TEXT_BYTES))),  # type: ignore[misc]
            milliseconds(lambda body=body: extract(body, WALKERS[PATH])),  # type: ignore[misc]
        ]
        print(f"| {name} | {len(body) / 1e6:.2f} | {' | '.join(f'{time:.2f}' for time in times)} |", flush=True)


if __name__ == "__main__":
    main()
