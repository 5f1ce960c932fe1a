# SPDX-License-Identifier: Apache-2.0
"""Why PaliGemma is refused: run all the same, its answers are not Transformers', whose mask is another one."""

from pathlib import Path

import pytest
import torch
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.tolerances import TOLERANCE
from mmcache_tools.zoo import build_cached
from vllm import SamplingParams

from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.base import settings
from vllm_mmcache.exactness.answers import NUM_LOGPROBS
from vllm_mmcache.exactness.conversations import filler, picture

pytestmark = pytest.mark.engine


@torch.no_grad()
def worst(rig: ZooRig, number: int) -> float:
    """The largest delta of a log-probability of one answer to Transformers."""
    image, text = picture(number, (112, 112)), "What is in this picture?" + filler(10 + number)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    (output,) = rig.llm.generate([{"prompt": text, "multi_modal_data": {"image": image}}], params, use_tqdm=False)
    answer = torch.tensor([list(output.outputs[0].token_ids)])
    inputs = rig.oracle.encode("<image>" + text, [image])
    prompt = inputs["input_ids"]
    assert prompt[0].tolist() == output.prompt_token_ids
    ids = torch.cat([prompt, answer], 1)
    kinds = torch.cat([inputs["token_type_ids"], torch.ones_like(answer)], 1)  # 1: an answer, causal
    pixels = inputs["pixel_values"]
    mask = torch.ones_like(ids)
    logits = rig.oracle.model(input_ids=ids, attention_mask=mask, token_type_ids=kinds, pixel_values=pixels).logits[0]
    expected = logits[prompt.shape[1] - 1 : -1].log_softmax(-1)
    steps = enumerate(output.outputs[0].logprobs)
    return max(abs(entry.logprob - float(expected[i, token])) for i, step in steps for token, entry in step.items())


def test_run_all_the_same_it_is_wrong(pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.close()
    monkeypatch.setattr(settings, "_current", settings.load_settings({"allow_causal_images": True}))
    rig = ZooRig(EngineConfig("paligemma", num_images=1), build_cached("paligemma", tmp_path))
    try:
        CHOSEN.check(rig)
        deltas = [worst(rig, number) for number in range(4)]
    finally:
        rig.close()
    print(f"causal against Transformers: {min(deltas):.1f} to {max(deltas):.1f}")
    assert min(deltas) > 100 * TOLERANCE
