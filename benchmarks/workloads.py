# SPDX-License-Identifier: Apache-2.0
"""What is asked: conversations that are put one after the other, each when the one before it is answered.

A workload yields (tag, conversation) and is sent the answer. The tag says whether the request belongs to the measure;
a text is the case that it belongs to. Numbers of words are about numbers of tokens. A picture is one of Pillow's, or a
data URL where its decoding is counted, too.
"""

import itertools
import random
from collections.abc import Generator, Iterator
from typing import Any

from benchmarks.pictures import PHOTOGRAPH, url_of
from benchmarks.screenshots import Page, Screenshot
from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import assistant, filler, picture, user
from vllm_mmcache.prove.workloads import Shape

Asks = Generator[tuple[bool | str, list[Any]], Answer, None]

SHAPES = {
    "gemma3": Shape((224, 224), 530),
    "gemma4": Shape((1024, 1024), 530),
    "qwen3-vl": Shape((1024, 1024), 0),
    "qwen3.5": Shape((1024, 1024), 0),
}
"""Of questions about images that come again: enough text before each that there is something to reuse."""
SIDE = (448, 448)
PHOTOS = ((448, 448), (672, 448), (448, 672), (896, 672))


def system(words: int) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": filler(words)}]}


def interleaved(shape: Shape, images: int, count: int) -> Asks:
    """A question about every image, then the next question."""
    for number, image in itertools.product(range(count), range(images)):
        yield number > 0, [user(shape.text(image), picture(image, shape.size), shape.question(number))]


def demos(shape: Shape, queries: int) -> Asks:
    """Two fixed pictures as demonstrations, then a query picture that varies."""
    shots: list[Any] = [filler(shape.words), picture(0, shape.size), "is a cat.", picture(1, shape.size), "is a dog."]
    for number in range(queries):
        yield number > 0, [user(*shots, picture(100 + number, shape.size), shape.question(number))]


TOKENS_OF_AN_IMAGE = {"gemma3": 64, "gemma4": 529}  # elsewhere one for 32x32 pixels


def rotation(images: int, size: int, rounds: int, warm_up: int = 1) -> Asks:
    """Every image is asked about once a round; the first rounds make them known."""
    for number, image in itertools.product(range(rounds), range(images)):
        yield number >= warm_up, [user(picture(image, (size, size)), f"{number}?")]


def text_alone(family: str, requests: int) -> Asks:
    """Questions behind the same text, as long as one about a known image of 1024x1024 pixels. The first goes ahead."""
    tokens = TOKENS_OF_AN_IMAGE.get(family, 961)  # the zoo's models of Qwen take 992x992 pixels at most
    for number in range(requests + 1):
        yield number >= 1, [user(filler(tokens - 16), f"{number}?" + filler(16))]


def all_new(images: int, size: int) -> Asks:
    """Images that never come again. As many go ahead: a process's first runs of the tower take half as long again."""
    for image in range(-images, images):
        yield image >= 0, [user(picture(1000 + image, (size, size)), "?")]


def cold(family: str, rounds: int, first: int = 0) -> Asks:
    """Prompts of which no request before had a block, of 4 cases, a first round ahead.

    Nothing is reset between them: vLLM's reset_encoder_cache says that weights may have changed, and the feature store
    would take their fingerprint again within the measure. first: the number of the first prompt and its picture.
    """
    size = SHAPES[family].size
    of_image = TOKENS_OF_AN_IMAGE.get(family, size[0] * size[1] // 1024)
    kinds = itertools.product(range(-1, rounds), (4000, 8000), (1, 4))
    for name, (number, tokens, images) in enumerate(kinds, first):
        words = (tokens - images * of_image) // (images + 1)
        shown: list[Any] = []
        for image in range(images):
            shown += [filler(words, image), picture(10 * name + image, size)]
        asked = user(f"{name}.", *shown, filler(words, images), "what")
        yield number >= 0 and f"{tokens} tokens, {images} images", [asked]


AT_ONCE_FROM = 1000
"""The number of the first prompt of those that are asked at once, which none had that was asked alone."""


def at_once(asks: Asks, number: int) -> Iterator[tuple[bool | str, list[list[Any]]]]:
    """The conversations of a workload that needs no answers, those of one tag `number` at a time."""
    waiting: dict[bool | str, list[list[Any]]] = {}
    for tag, conversation in asks:
        together = waiting.setdefault(tag, [])
        together.append(conversation)
        if len(together) == number:
            yield tag, waiting.pop(tag)


def agent(turns: int) -> Asks:
    """An agent: text, tool text and screenshots in turn, each request with all that was before it.

    The shape of the workflow that was reported in oMLX 637, smaller.
    """
    talk = [system(600), user("Book a room." + filler(60))]
    for turn in range(turns):
        answer = yield True, list(talk)
        screen = (f"Screen {turn}.", picture(2000 + turn, SIDE), "Go on.")
        parts = (screen, (f"Tool {turn}:" + filler(250, turn),), (f"Now {turn}." + filler(40, turn),))
        talk += [assistant(answer.text), user(*parts[turn % 3])]


def window(turns: int, live: int) -> Asks:
    """A conversation that keeps its last screenshots only: behind the oldest of them no prefix can be found."""
    for turn in range(turns):
        talk = [system(600)]
        for number in range(turn + 1):
            is_live = number > turn - live
            shown = (f"Screen {number}.", picture(3000 + number, SIDE)) if is_live else (f"Screen {number} was here.",)
            talk += [user(*shown), assistant(f"Click {number}.")]
        yield True, talk[:-1]


def photos(requests: int) -> Asks:
    """Extraction: one system prompt, and each photograph, of sizes of its own, only once."""
    for number in range(requests):
        shown = picture(4000 + number, PHOTOS[number % len(PHOTOS)])
        yield True, [system(500), user(shown, "Read it." + filler(30))]


def sent(*parts: str) -> dict[str, Any]:
    """A user's message as clients send it: texts, and images as data URLs."""
    content = [{"type": "image_url", "image_url": {"url": part}} if part.startswith("data:")
               else {"type": "text", "text": part} for part in parts]  # fmt: skip
    return {"role": "user", "content": content}


DESKTOP = (1280, 720)
PAGES: tuple[Page, ...] = ("text", "form", "photographs")  # that the agent looks at, in turn


def computer_use(steps: int, live: int, removed_at_once: int = 1) -> Asks:
    """An agent at a computer: a click and a tool's text a step, the last `live` screenshots, for older ones a line.

    Older ones go `removed_at_once` together, as agents do it that keep their prefix: between two removals the prompt
    only grows, and up to `removed_at_once` - 1 more screenshots are live. Anthropic's demo removes ten.

    Shape: H CUA Perf (477 sessions, 38 steps in the mean, one live screenshot, older ones replaced by text). Sizes of
    the texts are ours. Screenshots are of a real browser, 1280x720 PNG.
    """
    begin = [{"role": "system", "content": "You use a computer." + filler(600)}, sent("Book a room." + filler(60))]
    screens: list[str] = []
    told: list[dict[str, Any]] = []  # what the agent did at each step
    for step in range(steps):
        screens.append(url_of(Screenshot(PAGES[step % len(PAGES)], DESKTOP, "png"), step))
        old = max(0, step + 1 - live)
        removed = old - old % removed_at_once
        talk = list(begin)
        for number in range(step + 1):
            tool = f"Tool {number}:" + filler(40 + 30 * (number % 4), number)
            shown = screens[number] if number >= removed else f"[screenshot {number} removed]"
            talk += [sent(tool, shown), *told[number : number + 1]]
        answer = yield True, talk
        told.append(assistant(f"Click {step}." + answer.text))


# ServeGen, mm-image: images of a request (80 % one, p99 nine), tokens of an image (p50 540, p99 1,271), words of a
# request (p50 106, p90 1,914). Between these, log-normal; how many of each number of images is ours, mean 1.6.
IMAGES = dict(zip(range(1, 10), (0.80, 0.07, 0.04, 0.025, 0.015, 0.01, 0.01, 0.01, 0.02), strict=True))
TOKENS, TOKENS_SPREAD, MOST_TOKENS = 540, 0.368, 1271
WORDS, WORDS_SPREAD, MOST_WORDS = 106, 2.257, 1914
RECENT = 50  # images of which one comes again


def image_service(requests: int, again: float, seed: int = 0) -> Asks:
    """Requests of many users about their images, of ServeGen's counts and sizes, which says nothing of contents.

    `again`: the share of images that are one of the last RECENT once more; an assumption of ours. Photographs, brought
    to these sizes, and seeded numbers.
    """
    chance, numbers = random.Random(seed), itertools.count()
    recent: list[str] = []
    for request in range(requests):
        (count,) = chance.choices(list(IMAGES), list(IMAGES.values()))
        urls: list[str] = []
        for _ in range(count):
            if recent and chance.random() < again:
                urls.append(chance.choice(recent))
                continue
            tokens = min(chance.lognormvariate(0, TOKENS_SPREAD) * TOKENS, MOST_TOKENS)
            width = round((tokens * 4 / 3) ** 0.5)  # in tokens of 32x32 pixels, 4 to 3
            size = (32 * width, 32 * round(tokens / width))
            urls.append(url_of(PHOTOGRAPH._replace(size=size), next(numbers)))
            recent = [*recent[1 - RECENT :], urls[-1]]
        words = round(min(chance.lognormvariate(0, WORDS_SPREAD) * WORDS, MOST_WORDS))
        asked = sent(*urls, f"Request {request}:" + filler(words, request))
        yield True, [{"role": "system", "content": filler(60)}, asked]
