# SPDX-License-Identifier: Apache-2.0
"""The clients of the load test: conversations that grow, with screenshots, through the `openai` client.

Each client has one conversation at a time and sends the next turn when the last is answered. At its last turn the
conversation ends and a new one with other screenshots begins. First conversations are of different lengths, so that at
any time the conversations are of all ages, and the load is the same from beginning to end.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import openai

from benchmarks.servers import MODEL
from benchmarks.warm_turn.pictures import Kind, data_url, picture, variant

# Noise of two levels: a PNG of about 0.6 MB, as screenshots are.
SCREEN = Kind("image/png", (1280, 720), 2, {"format": "PNG", "compress_level": 6})
NUM_SCREENS = 4  # drawn; every one that is sent is a variant of one of them
TURNS = 12  # of a conversation
IMAGES = TURNS // 2  # a screenshot comes with every other turn
ANSWER_TOKENS = 16
RULES = "You look at screenshots and say what to do next. " * 12
QUESTION = "This is step {} of task {}. What has changed, and what should be done next? " + "Be brief. " * 6
TIMEOUT_S = 120
PAUSE_S = 1.0  # after a failure


@dataclass(frozen=True)
class Asked:
    """One request. Units: start_s since the load's start; first_token_s and whole_s from the request's start."""

    start_s: float
    first_token_s: float
    whole_s: float
    prompt_tokens: int
    cached_tokens: int


class Load:
    """So many clients at once against one server, until the time is over."""

    def __init__(self, url: str, conversations: int) -> None:
        self.api = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=TIMEOUT_S)
        self.conversations = conversations
        self.asked: list[Asked] = []
        self.failures: list[str] = []
        self.num_images = 0  # unlike all others
        self._screens = [picture(SCREEN, number) for number in range(NUM_SCREENS)]
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        """Ends when the requests that were under way after `seconds` are answered."""
        self._start = time.monotonic()
        self._deadline = self._start + seconds
        with ThreadPoolExecutor(self.conversations) as pool:
            for done in [pool.submit(self._client, number) for number in range(self.conversations)]:
                done.result()

    def _client(self, number: int) -> None:
        turns = 1 + number * TURNS // self.conversations
        while time.monotonic() < self._deadline:
            self._converse(turns)
            turns = TURNS

    def _converse(self, turns: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": RULES}]
        for content in itertools.islice(self._user_turns(), turns):
            if time.monotonic() >= self._deadline:
                return
            messages.append({"role": "user", "content": content})
            try:
                asked, text = self._ask(messages)
            except Exception as error:  # whatever it is: the request failed, the others go on
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}"[:500])
                time.sleep(PAUSE_S)
                return
            messages.append({"role": "assistant", "content": text})
            with self._lock:
                self.asked.append(asked)

    def _user_turns(self) -> Iterator[list[dict[str, Any]]]:
        """What the user says, turn by turn, for ever."""
        task = next(self._numbers)
        for turn in itertools.count():
            content: list[dict[str, Any]] = []
            if turn % 2 == 0:
                screen = variant(SCREEN, self._screens[(task + turn) % NUM_SCREENS], f"{task} {turn}")
                content.append({"type": "image_url", "image_url": {"url": data_url(SCREEN, screen)}})
                with self._lock:
                    self.num_images += 1
            yield [*content, {"type": "text", "text": QUESTION.format(turn, task)}]

    def _ask(self, messages: list[dict[str, Any]]) -> tuple[Asked, str]:
        """One streamed request. Raises: openai.OpenAIError for a refusal; RuntimeError for an answer that is cut."""
        start = time.monotonic()
        first = 0.0
        usage: Any = None
        text: list[str] = []
        stream = self.api.chat.completions.create(
            model=MODEL,
            messages=cast(Any, messages),
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            first = first or time.monotonic()  # vLLM sends the first piece with the first token
            usage = chunk.usage or usage
            text += [choice.delta.content or "" for choice in chunk.choices]
        end = time.monotonic()
        if usage is None or usage.completion_tokens != ANSWER_TOKENS:
            raise RuntimeError(f"an answer of {usage and usage.completion_tokens} tokens instead of {ANSWER_TOKENS}")
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        asked = Asked(start - self._start, first - start, end - start, usage.prompt_tokens, cached)
        return asked, "".join(text)
