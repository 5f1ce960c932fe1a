# SPDX-License-Identifier: Apache-2.0
"""The demo's conversation: pictures that join on some turns, and one streamed request with its measurements.

Runs in the client process; talks to a server through the `openai` client. Answers are compared as token ids
and log-probabilities, not as text: two different tokens can print alike.
"""

import base64
import io
import secrets
import time
from dataclasses import dataclass
from typing import Any, cast

ANSWER_TOKENS = 16
IMAGE_SIZE = (640, 480)
SHAPE_SIZE_PIXELS = 640  # width and height as sent; the processor makes 96x96 of it

Message = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """A picture as a client sends it."""

    name: str
    data_url: str


@dataclass(frozen=True)
class Turn:
    """One question, and the pictures that come with it; the right answer, where the model was trained to know it."""

    question: str
    pictures: tuple[Picture, ...] = ()
    right: str | None = None


@dataclass(frozen=True)
class Answer:
    """What one request brought back. Units: first_token_s from sending the request to the first token."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    first_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


# (kind in ../zoo/seeing/prompts.py, question, what is in the pictures that join). The first picture isn't asked for at
# the end: after five pictures the model mixes it up, cold too (docs/zoo.md).
SHAPES_SCRIPT = (
    ("name", "What is in the picture?", ("red circle",)),
    ("colour", "Which colour is it?", ()),
    ("with_last", "Compare it with the picture before.", ("blue star",)),
    ("shape", "Which shape is it?", ()),
    ("first", "What is in the first picture?", ()),
    ("both", "Compare these two.", ("green ring", "green ring")),
    ("last_two", "Are the last two pictures the same?", ()),
    ("colour", "What colour is the last one?", ()),
    ("with_first", "Is it the same as the first one?", ("red circle",)),
    ("last", "What is in the last picture?", ()),
    ("shape", "Which shape is it?", ()),
    ("colour", "Name the colour of the last picture.", ()),
)

# (question, how many photographs join)
PHOTOGRAPHS_SCRIPT = (
    ("What is in this photograph?", 1),
    ("Which colours do you see?", 0),
    ("Compare it with this one.", 1),
    ("Is anybody in the second one?", 0),
    ("Describe the background of the first.", 0),
    ("Here are two more. Which is the brightest?", 2),
    ("Which one was taken outdoors?", 0),
    ("Name one thing in each of them.", 0),
    ("And this one?", 1),
    ("Which two are the most alike?", 0),
    ("Give the last one a title.", 0),
    ("Sum up our conversation.", 0),
)


def encoded(image: Any, name: str, index: int) -> Picture:
    """A PIL image as a client sends it: JPEG where the index is even, else PNG."""
    picture_format = ("JPEG", "PNG")[index % 2]
    out = io.BytesIO()
    image.save(out, picture_format, quality=90)
    in_base64 = base64.b64encode(out.getvalue()).decode()
    return Picture(name, f"data:image/{picture_format.lower()};base64,{in_base64}")


def photographs() -> list[Picture]:
    """Five real photographs that ship in the wheel of scikit-image, as JPEG and PNG."""
    import skimage.data
    from PIL import Image

    arrays = {
        "astronaut": skimage.data.astronaut(),
        "rocket": skimage.data.rocket(),
        "coffee": skimage.data.coffee(),
        "cat": skimage.data.chelsea(),
        "galaxies": skimage.data.hubble_deep_field(),
    }
    return [
        encoded(Image.fromarray(pixels).convert("RGB").resize(IMAGE_SIZE), name, index)
        for index, (name, pixels) in enumerate(arrays.items())
    ]


def photograph_turns() -> list[Turn]:
    """About real photographs, for models with random weights: what they answer is nonsense."""
    left = photographs()
    turns = []
    for question, num_photographs in PHOTOGRAPHS_SCRIPT:
        turns.append(Turn(question, tuple(left[:num_photographs])))
        left = left[num_photographs:]
    return turns


def shape_turns() -> list[Turn]:
    """About coloured shapes, for the zoo's model that sees; each picture is new, also where the thing is the same."""
    from mmcache_tools.zoo.seeing.pictures import Thing, draw, stream
    from mmcache_tools.zoo.seeing.prompts import right_answer

    shown: list[Thing] = []
    turns = []
    for kind, question, names in SHAPES_SCRIPT:
        pictures = []
        for name in names:
            thing = Thing(*name.split())
            image = draw(stream("demo", len(shown)), thing, SHAPE_SIZE_PIXELS)
            pictures.append(encoded(image, name, len(shown)))
            shown.append(thing)
        turns.append(Turn(question, tuple(pictures), right_answer(kind, shown)))
    return turns


def script(family: str) -> list[Turn]:
    """The twelve turns of the conversation with a model of this family."""
    return shape_turns() if family == "seeing" else photograph_turns()


def user_message(turn: Turn) -> Message:
    """The turn as the chat API wants it: pictures first, then the question."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture.data_url}} for picture in turn.pictures
    ]
    return {"role": "user", "content": [*content, {"type": "text", "text": turn.question}]}


def unseen(messages: list[Message]) -> list[Message]:
    """The same messages, each picture under a fresh random id, so that no earlier work on it is found."""
    fresh = []
    for message in messages:
        if isinstance(message["content"], list):
            parts = [
                {**part, "uuid": secrets.token_hex(16)} if part["type"] == "image_url" else part
                for part in message["content"]
            ]
            message = {**message, "content": parts}
        fresh.append(message)
    return fresh


class Client:
    """Asks one server. `ask` reuses what the server has; `ask_cold` lets it reuse nothing.

    to_the_end: answers end where the model ends them; without, all have ANSWER_TOKENS tokens, since what a random
    model ends says nothing.
    """

    def __init__(self, url: str, to_the_end: bool = False) -> None:
        import openai

        self._to_the_end = to_the_end

        self._api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._model = self._api.models.list().data[0].id

    def ask(self, messages: list[Message], salt: str | None = None) -> Answer:
        """One streamed request, greedy.  Raises: openai.APIError when the server refuses it."""
        extra: dict[str, Any] = {"ignore_eos": not self._to_the_end, "return_tokens_as_token_ids": True}
        if salt is not None:
            extra["cache_salt"] = salt
        text: list[str] = []
        tokens: list[str] = []
        logprobs: list[float] = []
        first_token_s = 0.0
        usage: Any = None
        start = time.perf_counter()
        stream: Any = self._api.chat.completions.create(
            model=self._model,
            messages=cast(Any, messages),
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            logprobs=True,
            extra_body=extra,
        )
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.logprobs and choice.logprobs.content:
                    if not tokens:
                        first_token_s = time.perf_counter() - start
                    tokens += [entry.token for entry in choice.logprobs.content]
                    logprobs += [entry.logprob for entry in choice.logprobs.content]
                text.append(choice.delta.content or "")
        details = usage.prompt_tokens_details
        return Answer(
            "".join(text),
            tuple(tokens),
            tuple(logprobs),
            first_token_s,
            usage.prompt_tokens,
            (details.cached_tokens or 0) if details else 0,
        )

    def ask_cold(self, messages: list[Message]) -> Answer:
        """The oracle: a fresh cache salt keeps KV blocks apart, fresh ids keep processed and encoded images apart."""
        return self.ask(unseen(messages), salt=secrets.token_hex(16))

    def warm_up(self) -> None:
        """Let the server do everything once, with a picture that the conversation doesn't have."""
        from PIL import Image

        gradient = encoded(Image.linear_gradient("L").convert("RGB").resize(IMAGE_SIZE), "gradient", 1)
        for _ in range(2):
            self.ask([user_message(Turn("Hello?", (gradient,)))])
