# SPDX-License-Identifier: Apache-2.0
"""Images of batch jobs that come as their files, in prompts and chats: decoded once, and answers stay the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support import files
from vllm_mmcache.base import settings, status
from vllm_mmcache.batch import EncodedImage
from vllm_mmcache.components.lazy_media import hooks_batch
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.metrics import counters

pytestmark = pytest.mark.engine

CONFIGS = [
    pytest.param(EngineConfig("qwen3-vl"), id="qwen3-vl", marks=pytest.mark.any_engine),
    pytest.param(EngineConfig("gemma3"), id="gemma3"),
]
QWEN = CONFIGS[:1]
QUESTION = "What is in this picture?" + filler(20)


class Job:
    """Asks about pictures by their numbers, and counts how many were decoded."""

    def __init__(self, rig: ZooRig, folder: Path) -> None:
        self.rig = rig
        self.folder = folder
        self.decoded = 0

    def path(self, number: int) -> Path:
        path = self.folder / f"{number}.png"
        if not path.exists():
            path.write_bytes(files.saved(picture(number), "PNG"))
        return path

    def ask(self, number: int, image: Any = None, *, chat: bool = False, **prompt: Any) -> Answer:
        """The answer about a picture. image: what stands for it in the prompt; EncodedImage of its path by default."""
        given = EncodedImage(self.path(number)) if image is None else image
        text, images = self.rig.render([user(filler(180), picture(number), QUESTION)])
        params = SamplingParams(max_tokens=8, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
        before = counters.IMAGES_DECODED.value
        if chat:
            parts: list[Any] = [
                {"type": "text", "text": filler(180)},
                {"type": "image_pil", "image_pil": given},
                {"type": "text", "text": QUESTION},
            ]
            (output,) = self.rig.llm.chat(
                [{"role": "user", "content": parts}], params, use_tqdm=False, chat_template_content_format="openai"
            )
        else:
            asked: Any = {"prompt": text, "multi_modal_data": {"image": given}, **prompt}
            (output,) = self.rig.llm.generate([asked], params, use_tqdm=False)
        self.decoded = int(counters.IMAGES_DECODED.value - before)
        return Answer.of(text, images, output)

    def about(self, numbers: Sequence[int], **prompt: Any) -> list[tuple[Answer, int]]:
        return [(self.ask(number, **prompt), self.decoded) for number in numbers]


@pytest.fixture
def job(pool: EnginePool, config: EngineConfig, tmp_path: Path) -> Job:
    return Job(pool.get(config), tmp_path)


@pytest.mark.parametrize("chat", [False, True], ids=["prompt", "chat"])
@pytest.mark.parametrize("config", CONFIGS)
def test_it_is_decoded_once(job: Job, chat: bool) -> None:
    """Cold, warm, another picture; then with vLLM's caches empty, where pixels are made from the file."""
    base = 7100 + 10 * chat
    (cold, one), (warm, none), (other, another) = job.about([base, base, base + 1], chat=chat)
    assert (one, none, another) == (1, 0, 1)
    assert (cold.num_cached_tokens, warm.num_cached_tokens > 0) == (0, True)
    assert other.token_ids != cold.token_ids
    job.rig.forget_all_but_features()
    late = job.ask(base, chat=chat)
    assert (late.num_cached_tokens, job.decoded) == (0, 0)
    job.rig.make_cold()
    ((as_pixels, _),) = job.about([base], chat=chat, image=picture(base))
    assert as_pixels.prompt_ids == cold.prompt_ids == warm.prompt_ids == late.prompt_ids
    job.rig.assert_exact([cold, warm, other, late, as_pixels])


@pytest.mark.parametrize("config", QWEN)
def test_a_picture_that_changes_between_questions(job: Job) -> None:
    before = job.ask(7120)
    job.path(7120).write_bytes(files.saved(picture(7121), "PNG"))
    after = job.ask(7121, EncodedImage(job.path(7120)))
    assert job.decoded == 1
    assert after.token_ids != before.token_ids
    job.rig.assert_exact([before, after])


@pytest.mark.parametrize("config", QWEN)
def test_the_log_says_that_pixels_came(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[None] = []
    monkeypatch.setattr(hooks_batch, "_say_that_pixels_came", lambda: said.append(None))
    job.ask(7125)
    assert not said
    job.ask(7125, picture(7125))
    assert said


@pytest.mark.parametrize("config", QWEN)
def test_without_lazy_processing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """lazy_media alone opens them, in the renderer's thread."""
    renderer = job.rig.llm.renderer
    monkeypatch.delattr(renderer, "_process_multimodal")
    answers = [job.ask(7130, chat=True), job.ask(7130, chat=True)]
    assert job.decoded == 0
    job.rig.assert_exact(answers)


@pytest.mark.parametrize("config", QWEN)
def test_tenants_share_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def image(tenant: str) -> EncodedImage:
        return EncodedImage(job.path(7140), tenant=tenant)

    answers = []
    for tenant, decoded, is_cached in [("a", 1, False), ("a", 0, True), ("b", 1, False), ("a", 0, True)]:
        answers.append(job.ask(7140, image(tenant)))
        assert (job.decoded, answers[-1].num_cached_tokens > 0) == (decoded, is_cached)
    answers.append(job.ask(7140, EncodedImage(job.path(7140)), cache_salt="a"))  # the same tenant, named by the prompt
    assert answers[-1].num_cached_tokens > 0
    with pytest.raises(VLLMValidationError, match="another tenant"):
        job.ask(7140, image("a"), cache_salt="b")
    with pytest.raises(VLLMValidationError, match="different tenants"):
        job.ask(7140, [image("a"), image("b")])
    monkeypatch.setattr(settings, "_current", settings.Settings(require_tenant=True))
    answers.append(job.ask(7140, image("c")))
    with pytest.raises(VLLMValidationError, match="required"):
        job.ask(7140)
    job.rig.assert_exact(answers)
    monkeypatch.setitem(status._is_on, "identity", False)
    with pytest.raises(VLLMValidationError, match="nothing keeps tenants apart"):
        job.ask(7140, image("a"))


@pytest.mark.parametrize("config", QWEN)
def test_a_file_that_can_not_be_used(job: Job, tmp_path: Path) -> None:
    """An error of that prompt alone, which names the file; the engine goes on."""
    (tmp_path / "broken.png").write_bytes(job.path(7150).read_bytes()[:100])
    with pytest.raises(VLLMValidationError, match=r"broken\.png"):
        job.ask(7150, EncodedImage(tmp_path / "broken.png"))
    with pytest.raises(VLLMValidationError, match=r"missing\.png"):
        job.ask(7150, EncodedImage(tmp_path / "missing.png"))
    job.rig.assert_exact([job.ask(7150)])
