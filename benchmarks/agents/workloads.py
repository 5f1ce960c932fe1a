# SPDX-License-Identifier: Apache-2.0
"""Requests as agents and pipelines send them, one after the other, and what of them could have been reused.

Each workload yields (salt, conversation) and is sent the answer. Numbers of words are about numbers of tokens.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any

from vllm_mmcache.prove.engines import Answer, Rig
from vllm_mmcache.prove.scenarios import assistant, filler, picture, user
from vllm_mmcache.prove.workloads import contents, put, reusable, shared

Asks = Generator[tuple[str | None, list[Any]], Answer, None]

SCREEN = (448, 448)
WINDOW = 5
TENANTS = 8


def system(words: int) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": filler(words)}]}


def replay(turns: int) -> Asks:
    """An agent: text, tool text and screenshots in turn, each request with all that was before it.

    The shape of the workflow that was reported in oMLX 637, smaller.
    """
    talk = [system(600), user("Book a room." + filler(60))]
    for turn in range(turns):
        answer = yield None, list(talk)
        talk.append(assistant(answer.text))
        if turn % 3 == 2:
            talk.append(user(f"Now {turn}." + filler(40, turn)))
        elif turn % 3 == 1:
            talk.append(user(f"Tool {turn}:" + filler(250, turn)))
        else:
            talk.append(user(f"Screen {turn}.", picture(2000 + turn, SCREEN), "Go on."))


def window(turns: int) -> Asks:
    """A conversation that keeps its last screenshots only: behind the oldest of them no prefix can be found."""
    steps: list[Any] = []
    for turn in range(turns):
        steps.append(picture(3000 + turn, SCREEN))
        talk = [system(600)]
        for number, screen in enumerate(steps):
            if number < len(steps) - WINDOW:
                talk.append(user(f"Screen {number} was here."))
            else:
                talk.append(user(f"Screen {number}.", screen))
            if number < turn:
                talk.append(assistant(f"Click {number}."))
        yield None, talk


def photos(requests: int) -> Asks:
    """Extraction: one system prompt, and each photograph, of sizes of its own, only once."""
    sizes = [(448, 448), (672, 448), (448, 672), (896, 672)]
    for number in range(requests):
        yield None, [system(500), user(picture(4000 + number, sizes[number % len(sizes)]), "Read it." + filler(30))]


def tenants(questions: int) -> Asks:
    """The same picture and questions under the salts of tenants who must not meet."""
    for number in range(questions):
        for tenant in range(TENANTS):
            asked = user(filler(200), picture(5000, SCREEN), f"{number}." + filler(300, number))
            yield f"tenant {tenant}", [asked]


WORKLOADS: dict[str, Callable[[], Asks]] = {
    "agent replay, 18 turns": lambda: replay(18),
    "window of 5 screenshots, 15 turns": lambda: window(15),
    "8 tenants x 3 questions": lambda: tenants(3),
    "200 photographs": lambda: photos(200),
}


def run(rig: Rig, asks: Asks, max_tokens: int = 4) -> Iterator[tuple[str | None, Answer]]:
    """Put all requests of a workload, one after the other, each under its salt."""
    return put(lambda salt, talk: rig.ask_rendered([rig.render(talk)], [max_tokens], salts=[salt])[0], asks)


def reuse(rig: Rig, answers: list[tuple[str | None, Answer]]) -> dict[str, int]:
    """Prompt tokens; of these cached, possible, and what a key over all images of a request would have found.

    Possible is the longest prefix that a request shares with an earlier one of its tenant, floored to the block size
    and without the last token; a key over the whole request finds it only where the two have the same images.
    """
    seen: dict[str | None, list[tuple[tuple[int, ...], list[Any]]]] = {}
    found = {"prompt_tokens": 0, "cached_tokens": 0, "best_tokens": 0, "whole_request_tokens": 0}
    block = rig.block_tokens
    for salt, answer in answers:
        content = contents(rig, answer)
        images = tuple(hash((image.size, image.tobytes())) for image in answer.images)
        before = seen.setdefault(salt, [])
        longest = [(names == images, shared(content, other)) for names, other in before]
        found["prompt_tokens"] += len(content)
        found["cached_tokens"] += answer.num_cached_tokens
        for name, counts in (("best_tokens", longest), ("whole_request_tokens", [one for one in longest if one[0]])):
            most = max((length for _, length in counts), default=0)
            found[name] += reusable(most, content, block)
        before.append((images, [*content, *answer.token_ids]))
    return found
