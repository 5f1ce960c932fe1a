# SPDX-License-Identifier: Apache-2.0
"""Questions about videos, put as a client does: the file, or its frames, in a data URL."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmcache_tools import zoo
from mmcache_tools.harness import videos
from mmcache_tools.harness.engines import EngineConfig, ZooRig
from mmcache_tools.harness.tolerances import assert_equals_answer
from mmcache_tools.zoo import BY_NAME
from vllm import SamplingParams

from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer
from vllm_mmcache.exactness.conversations import filler

LIMITS = (("limit_mm_per_prompt", {"image": 2, "video": 2}),)

Part = dict[str, Any]


def takes_videos(family: str, *more: tuple[str, Any]) -> EngineConfig:
    """An engine that takes videos, as the pool's others don't."""
    return EngineConfig(family, more=(*LIMITS, *more))


def that_take_videos(families: Sequence[str]) -> list[str]:
    """Families whose processor takes videos and whose chat template has a place for them."""
    templates = Path(zoo.__file__).parent / "templates"
    taking = [family for family in families if BY_NAME[family].takes_video]
    return [family for family in taking if "video" in (templates / BY_NAME[family].template).read_text("utf-8")]


def file_of(name: str, num_frames: int = 12, fps: float = 4.0, size: tuple[int, int] = (128, 96)) -> Part:
    """A part of a message: the MP4 file of a name."""
    return part("video/mp4", base64.b64encode(videos.mp4(videos.frames(name, num_frames, size), fps)).decode())


def frames_of(name: str, num_frames: int = 6, size: tuple[int, int] = (128, 96)) -> Part:
    """A part of a message: the frames of a name, as JPEG files."""
    return part("video/jpeg", videos.jpegs(videos.frames(name, num_frames, size)))


def part(media_type: str, text: str) -> Part:
    return {"type": "video_url", "video_url": {"url": f"data:{media_type};base64,{text}"}}


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def chat(rig: ZooRig, *parts: Part, question: str = "What happens?", max_tokens: int = 8) -> Answer:
    """The answer to a question about videos, after some text."""
    content: list[Any] = [text(filler(40)), *parts, text(question)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    (output,) = rig.llm.chat(
        [{"role": "user", "content": content}], params, use_tqdm=False, chat_template_content_format="openai"
    )
    return Answer.of("", (), output)


def assert_as_cold(rig: ZooRig, answer: Answer, *parts: Part, question: str = "What happens?") -> None:
    """The answer is that of the same engine with nothing kept, but what is known of the bytes."""
    rig.make_cold()
    cold = chat(rig, *parts, question=question)
    assert cold.num_cached_tokens == 0
    assert_equals_answer(answer, cold, rig.tolerance, "the own cold run")
