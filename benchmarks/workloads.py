# SPDX-License-Identifier: Apache-2.0
"""What is asked: conversations that are put one after the other, each when the one before it is answered.

A workload yields (mark, conversation) and is sent the answer. Numbers of words are about numbers of tokens. A picture
is one of Pillow's, or a data URL where its decoding is counted, too.
"""

import itertools
import random
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from benchmarks.pictures import SCREEN, url_of
from vllm_mmcache.prove.engines import Answer
from vllm_mmcache.prove.scenarios import assistant, filler, picture, user
from vllm_mmcache.prove.workloads import Asks as Questions
from vllm_mmcache.prove.workloads import Shape


class Mark(NamedTuple):
    """What a workload says of a request: whether it belongs to the measure, whose it is, and what it is part of."""

    counts: bool = True
    salt: str | None = None
    case: str = ""


Asks = Generator[tuple[Mark, list[Any]], Answer, None]

SHAPES = {
    "gemma3": Shape((224, 224), 530),
    "qwen3-vl": Shape((1024, 1024), 0),
    "qwen3.5": Shape((1024, 1024), 0),
}
"""Of questions about images that come again: enough text before each that there is something to reuse."""
SIDE = (448, 448)
TENANTS = 8


def system(words: int) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": filler(words)}]}


def marked(asks: Questions) -> Asks:
    """Questions about images with their marks; they are used by the exactness tests, too, smaller."""
    counts, conversation = next(asks)
    while True:
        answer = yield Mark(counts), conversation
        try:
            counts, conversation = asks.send(answer)
        except StopIteration:
            return


def interleaved(shape: Shape, images: int, count: int) -> Questions:
    """A question about every image, then the next question."""
    for number in range(count):
        for image in range(images):
            yield number > 0, [user(shape.text(image), picture(image, shape.size), shape.question(number))]


def demos(shape: Shape, queries: int) -> Questions:
    """Two fixed pictures as demonstrations, then a query picture that varies."""
    shots = [filler(shape.words), picture(0, shape.size), "is a cat.", picture(1, shape.size), "is a dog."]
    for number in range(queries):
        yield number > 0, [user(*shots, picture(100 + number, shape.size), shape.question(number))]


def growing(shape: Shape, turns: int) -> Questions:
    """A conversation that adds an image each turn."""
    talk: list[Any] = []
    for turn in range(turns):
        text = filler(shape.words // turns)
        talk.append(user(text, picture(turn, SIDE), shape.question(turn)))
        answer = yield turn > 0, list(talk)
        talk.append(assistant(answer.text))


def shifted(shape: Shape, images: int, count: int) -> Questions:
    """Text of another length before each image, so that all positions are shifted."""
    for image in range(images):
        for number in range(count):
            text = filler(200 + 37 * image + shape.words // 2, image)
            yield number > 0, [user(text, picture(image, shape.size), shape.question(number))]


def unique(shape: Shape, requests: int) -> Questions:
    """A shared system prompt, and every picture only once."""
    for number in range(requests):
        yield number > 0, [system(500), user(picture(1000 + number, (512, 512)), shape.question(number))]


def rotation(images: int, size: int, rounds: int, warm_up: int = 1) -> Asks:
    """Every image is asked about once a round; the first rounds make them known."""
    for number in range(rounds):
        for image in range(images):
            yield Mark(number >= warm_up), [user(picture(image, (size, size)), f"{number}?")]


def all_new(images: int, size: int) -> Asks:
    """Images that never come again. As many go ahead: a process's first runs of the tower take half as long again."""
    for image in range(-images, images):
        yield Mark(image >= 0), [user(picture(1000 + image, (size, size)), "?")]


def cold_prompts(family: str, rounds: int, variants: tuple[str, ...] = ("",)) -> Iterator[tuple[str, Mark, list[Any]]]:
    """(Variant, mark, conversation): prompts of which no request before had a block, of 4 cases, a first round ahead.

    Nothing is reset between them: vLLM's reset_encoder_cache says that weights may have changed, and the feature store
    would take their fingerprint again within the measure.
    """
    numbers = itertools.count()
    size = SHAPES[family].size
    of_image = 64 if family == "gemma3" else size[0] * size[1] // 1024
    for number, (tokens, images) in itertools.product(range(-1, rounds), itertools.product((4000, 8000), (1, 4))):
        for variant in variants[:: 1 if number % 2 else -1]:
            name = next(numbers)
            words = (tokens - images * of_image) // (images + 1)
            parts: list[Any] = [f"{name}."]
            for image in range(images):
                parts += [filler(words, image), picture(10 * name + image, size)]
            case = f"{tokens} tokens, {images} images" + (f", {variant}" if variant else "")
            yield variant, Mark(number >= 0, case=case), [user(*parts, filler(words, images), "what")]


def cold(family: str, rounds: int) -> Asks:
    for _, mark, conversation in cold_prompts(family, rounds):
        yield mark, conversation


def rooms_in_turn(family: str, rounds: int, names: tuple[str, ...]) -> Asks:
    """Cold prompts in one process of the plugin, all rooms on or one of them off: what a room costs is the difference.

    Two processes of one side differ by more than that. A room that is off by itself stays off.
    """
    from vllm_mmcache import rooms

    switched = [name for name in names if rooms._is_on.get(name)]
    variants = ("all rooms", *(f"without {name}" for name in names))
    for variant, mark, conversation in cold_prompts(family, rounds, variants):
        rooms._is_on.update({name: variant != f"without {name}" for name in switched})
        yield mark, conversation


def agent(turns: int) -> Asks:
    """An agent: text, tool text and screenshots in turn, each request with all that was before it.

    The shape of the workflow that was reported in oMLX 637, smaller.
    """
    talk = [system(600), user("Book a room." + filler(60))]
    for turn in range(turns):
        answer = yield Mark(), list(talk)
        talk.append(assistant(answer.text))
        if turn % 3 == 2:
            talk.append(user(f"Now {turn}." + filler(40, turn)))
        elif turn % 3 == 1:
            talk.append(user(f"Tool {turn}:" + filler(250, turn)))
        else:
            talk.append(user(f"Screen {turn}.", picture(2000 + turn, SIDE), "Go on."))


def window(turns: int, live: int) -> Asks:
    """A conversation that keeps its last screenshots only: behind the oldest of them no prefix can be found."""
    screens = [picture(3000 + turn, SIDE) for turn in range(turns)]
    for turn in range(turns):
        talk = [system(600)]
        for number in range(turn + 1):
            if number <= turn - live:
                talk.append(user(f"Screen {number} was here."))
            else:
                talk.append(user(f"Screen {number}.", screens[number]))
            if number < turn:
                talk.append(assistant(f"Click {number}."))
        yield Mark(), talk


def photos(requests: int) -> Asks:
    """Extraction: one system prompt, and each photograph, of sizes of its own, only once."""
    sizes = [(448, 448), (672, 448), (448, 672), (896, 672)]
    for number in range(requests):
        asked = user(picture(4000 + number, sizes[number % len(sizes)]), "Read it." + filler(30))
        yield Mark(), [system(500), asked]


def tenants(questions: int) -> Asks:
    """The same picture and questions under the salts of tenants who must not meet."""
    for number in range(questions):
        for tenant in range(TENANTS):
            asked = user(filler(200), picture(5000, SIDE), f"{number}." + filler(300, number))
            yield Mark(salt=f"tenant {tenant}"), [asked]


def sent(*parts: str | tuple[str, str]) -> dict[str, Any]:
    """A user's message as clients send it: texts, and ("image", data URL)."""
    content = [{"type": "text", "text": part} if isinstance(part, str)
               else {"type": "image_url", "image_url": {"url": part[1]}} for part in parts]  # fmt: skip
    return {"role": "user", "content": content}


def computer_use(steps: int, live: int) -> Asks:
    """An agent at a computer: a click and a tool's text a step, the last `live` screenshots, for older ones a line.

    Shape: H CUA Perf (477 sessions, 38 steps in the mean, one live screenshot, older ones replaced by text). Sizes of
    the texts are ours; screenshots are generated, 1280x720 PNG, picture 6000 and following.
    """
    screens: list[str] = []
    told: list[str] = []  # what the agent did at each step
    for step in range(steps):
        screens.append(url_of(SCREEN, 6000 + step))
        talk = [{"role": "system", "content": "You use a computer." + filler(600)}, sent("Book a room." + filler(60))]
        for number in range(step + 1):
            tool = f"Tool {number}:" + filler(40 + 30 * (number % 4), number)
            shown = ("image", screens[number]) if number > step - live else f"[screenshot {number} removed]"
            talk.append(sent(tool, shown))
            if number < step:
                talk.append(assistant(told[number]))
        answer = yield Mark(), talk
        told.append(f"Click {step}." + answer.text)


# ServeGen, mm-image: images of a request (80 % one, p99 nine), tokens of an image (p50 540, p99 1,271), words of a
# request (p50 106, p90 1,914). Between these, log-normal; how many of each number of images is ours, mean 1.6.
IMAGES = dict(zip(range(1, 10), (0.80, 0.07, 0.04, 0.025, 0.015, 0.01, 0.01, 0.01, 0.02), strict=True))
TOKENS, TOKENS_SPREAD, MOST_TOKENS = 540, 0.368, 1271
WORDS, WORDS_SPREAD, MOST_WORDS = 106, 2.257, 1914
RECENT = 50  # images of which one comes again


def image_service(requests: int, again: float, seed: int = 0) -> Asks:
    """Requests of many users about their images, of ServeGen's counts and sizes, which says nothing of contents.

    `again`: the share of images that are one of the last RECENT once more; an assumption of ours. Generated pictures,
    7000 and following, and seeded numbers.
    """
    chance = random.Random(seed)
    recent: list[str] = []
    numbers = itertools.count(7000)
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
            urls.append(url_of(SCREEN._replace(size=size), next(numbers)))
            recent = [*recent[1 - RECENT :], urls[-1]]
        words = round(min(chance.lognormvariate(0, WORDS_SPREAD) * WORDS, MOST_WORDS))
        asked = sent(*(("image", url) for url in urls), f"Request {request}:" + filler(words, request))
        yield Mark(), [{"role": "system", "content": filler(60)}, asked]
