# SPDX-License-Identifier: Apache-2.0
"""A real server whose steps hold some images and not others: an error 400, also to who streams, and nobody else waits.

And one whose steps hold no image at all: it does not start, and says why.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import BY_NAME, build_cached
from openai import OpenAI

from tests.support import files
from tests.system.image_extraction.test_server import encoded, image_url
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.exactness.pictures import ellipses

pytestmark = [pytest.mark.engine, pytest.mark.answers]

MODEL = "zoo"
STEP = 65  # tokens
FITS, TOO_LONG, TOO_LONG_TOKENS = (224, 224), (480, 270), 66  # Gemma 4 gives the first 64 tokens
ARGS = (
    *CPU_ARGS, "--served-model-name", MODEL, "--max-num-seqs", "4", "--max-num-batched-tokens", str(STEP),
)  # fmt: skip
LIMIT_S = 300.0  # of each request, however busy the machine is


def image(size: tuple[int, int]) -> dict[str, Any]:
    return image_url(encoded(files.saved(ellipses("a picture", size), "PNG")))


def ask(client: OpenAI, *parts: dict[str, Any], **more: Any) -> Any:
    content: Any = [*parts, {"type": "text", "text": "What is this?"}]
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **{"max_tokens": 4, **more})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    model = build_cached("gemma4", tmp_path_factory.mktemp("zoo"))
    with serve(model, log_path=tmp_path_factory.mktemp("log") / "log", args=ARGS) as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)


@pytest.mark.skipif("gemma4" not in BY_NAME, reason="needs a model whose images differ in length")
@pytest.mark.parametrize("stream", [False, True])
def test_an_image_that_no_step_holds_is_an_error_400(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, image(FITS), image(TOO_LONG), stream=stream)
    assert caught.value.status_code == 400
    assert caught.value.response.json() == {
        "error": {
            "message": (
                f"image 2 of 2 has {TOO_LONG_TOKENS} tokens that must be computed in one step: max_num_batched_tokens "
                f"is {STEP}, needed are {TOO_LONG_TOKENS}. Send a smaller image, or raise the setting on the server."
            ),
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
    }


@pytest.mark.skipif("gemma4" not in BY_NAME, reason="needs a model whose images differ in length")
def test_an_image_that_came_with_one_too_long_is_answered_alone(client: OpenAI) -> None:
    """vLLM sends an image once to the engine; of a refused request none was sent."""
    new = (225, 225)
    with pytest.raises(openai.BadRequestError):
        ask(client, image(new), image(TOO_LONG))
    for _ in range(2):
        assert ask(client, image(new)).choices[0].finish_reason
        with pytest.raises(openai.BadRequestError):
            ask(client, image(new), image(TOO_LONG))


@pytest.mark.skipif("gemma4" not in BY_NAME, reason="needs a model whose images differ in length")
def test_the_others_are_answered(client: OpenAI) -> None:
    """Many at once, most of them refused; images that fit and text are answered, also while long answers run."""
    begun = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        refused = [threads.submit(ask, client, image(TOO_LONG), stream=i % 2 == 0) for i in range(8)]
        fit = [threads.submit(ask, client, image(FITS)) for _ in range(4)]
        text = [threads.submit(ask, client, max_tokens=200, extra_body={"ignore_eos": True}) for _ in range(6)]
        assert all(isinstance(one.exception(), openai.BadRequestError) for one in refused)
        assert [one.result().usage.completion_tokens for one in text] == [200] * 6
        assert all(one.result().choices[0].finish_reason for one in fit)
    assert time.monotonic() - begun < LIMIT_S
    other = httpx.post(
        str(client.base_url) + "responses",
        json={"model": MODEL, "input": "Hello", "max_output_tokens": 4},
        timeout=LIMIT_S,
    )
    assert other.status_code == 200


def test_a_model_whose_every_image_is_too_long_does_not_start(tmp_path: Path) -> None:
    """Before an engine is started, and with the reason as the last line."""
    model = build_cached("gemma3", tmp_path / "zoo")
    log_path = tmp_path / "log"
    with (
        pytest.raises(EnvironmentProblem, match="the server ended with status 2 "),
        serve(model, log_path=log_path, args=(*CPU_ARGS, "--max-num-seqs", "4", "--max-num-scheduled-tokens", "63")),
    ):
        pass
    log = log_path.read_text()
    assert log.rstrip().endswith(
        "error: every image of this model has 64 tokens that must be computed in one step: "
        "max_num_scheduled_tokens is 63, needed are 64"
    )
    assert "EngineCore" not in log


def test_a_model_that_no_table_knows_does_not_start(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    with (
        pytest.raises(EnvironmentProblem, match="the server ended with status 2 "),
        serve(build_cached("paligemma", tmp_path / "zoo"), log_path=log_path),
    ):
        pass
    log = log_path.read_text()
    last = log.rstrip().splitlines()[-1]
    assert last.startswith("error: images of a paligemma model attend both ways, and on the CPU answers would be wrong")
    assert last.endswith("or set MMCACHE_ALLOW_CAUSAL_IMAGES=1 to run it all the same")
    assert "EngineCore" not in log
