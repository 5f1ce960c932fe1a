# SPDX-License-Identifier: Apache-2.0
"""The demo's conversation: photographs that join on some turns, and one streamed request with its measurements.

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

Message = dict[str, Any]


@dataclass(frozen=True)
class Photograph:
    """A picture as a client sends it."""

    name: str
    data_url: str


@dataclass(frozen=True)
class Turn:
    """One question, and the photographs that come with it."""

    question: str
    photographs: tuple[Photograph, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What one request brought back. Units: first_token_s from sending the request to the first token."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    first_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


# (question, how many photographs join)
SCRIPT = (
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


def photographs() -> list[Photograph]:
    """Five real photographs that ship in the wheels of scikit-image and scikit-learn, as JPEG and PNG."""
    import skimage.data
    from PIL import Image
    from sklearn.datasets import load_sample_image

    arrays = {
        "astronaut": skimage.data.astronaut(),
        "china": load_sample_image("china.jpg"),
        "coffee": skimage.data.coffee(),
        "cat": skimage.data.chelsea(),
        "flower": load_sample_image("flower.jpg"),
    }
    made = []
    for index, (name, pixels) in enumerate(arrays.items()):
        picture_format = ("JPEG", "PNG")[index % 2]
        out = io.BytesIO()
        Image.fromarray(pixels).convert("RGB").resize(IMAGE_SIZE).save(out, picture_format, quality=90)
        encoded = base64.b64encode(out.getvalue()).decode()
        made.append(Photograph(name, f"data:image/{picture_format.lower()};base64,{encoded}"))
    return made


def script(num_turns: int) -> list[Turn]:
    """The first `num_turns` turns of the conversation."""
    left = photographs()
    turns = []
    for question, num_photographs in SCRIPT[:num_turns]:
        turns.append(Turn(question, tuple(left[:num_photographs])))
        left = left[num_photographs:]
    return turns


def user_message(turn: Turn) -> Message:
    """The turn as the chat API wants it: photographs first, then the question."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": photograph.data_url}} for photograph in turn.photographs
    ]
    return {"role": "user", "content": [*content, {"type": "text", "text": turn.question}]}


def unseen(messages: list[Message]) -> list[Message]:
    """The same messages, each photograph under a fresh random id, so that no earlier work on it is found."""
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
    """Asks one server. `ask` reuses what the server has; `ask_cold` lets it reuse nothing."""

    def __init__(self, url: str) -> None:
        import openai

        self._api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._model = self._api.models.list().data[0].id

    def ask(self, messages: list[Message], salt: str | None = None) -> Answer:
        """One streamed request, greedy.  Raises: openai.APIError when the server refuses it."""
        extra: dict[str, Any] = {"ignore_eos": True, "return_tokens_as_token_ids": True}
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

        out = io.BytesIO()
        Image.linear_gradient("L").convert("RGB").resize(IMAGE_SIZE).save(out, "PNG")
        url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
        for _ in range(2):
            self.ask([user_message(Turn("Hello?", (Photograph("gradient", url),)))])
