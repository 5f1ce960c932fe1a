# SPDX-License-Identifier: Apache-2.0
"""How a question is put with each feature: a function from a rig and a conversation to what was said. Worker process.

Each is asked several times with the caches in different states, so it must say the same each time: greedy, or with a
seed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mmcache_tools.harness.engines import ZooRig
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.engine.speculative.drafters import LETTERS
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Message
from vllm_mmcache.exactness.conversations import filler, picture, user

NUM_TOKENS = 8

Step = dict[int, float]


@dataclass
class Said:
    """Each sequence's tokens; of each step, the log-probabilities of the best ones; numbers, of a pooling model."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[Step]] = field(default_factory=list)
    vector: list[float] = field(default_factory=list)


Way = Callable[[ZooRig, Sequence[Message]], Said]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    """Name a way by its function."""
    WAYS[function.__name__] = function
    return function


def prompt_of(rig: ZooRig, conversation: Sequence[Message]) -> Any:
    text, images = rig.render(conversation)
    return {"prompt": text, "multi_modal_data": {"image": list(images)}} if images else {"prompt": text}


def said(output: Any) -> Said:
    return Said(
        [list(one.token_ids) for one in output.outputs],
        [[{i: entry.logprob for i, entry in step.items()} for step in one.logprobs] for one in output.outputs],
    )


def generate(rig: ZooRig, conversation: Sequence[Message], sampling: dict[str, Any] | None = None, **more: Any) -> Said:
    chosen = {"max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": NUM_LOGPROBS, "ignore_eos": True}
    params = SamplingParams(**chosen | (sampling or {}))
    return said(rig.llm.generate([prompt_of(rig, conversation)], params, use_tqdm=False, **more)[0])


@way
def plain(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    return generate(rig, conversation)


@way
def letters(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    """An answer of three letters, so that something is drafted and accepted."""
    encode = rig.oracle.processor.tokenizer.encode
    allowed = [encode(letter, add_special_tokens=False)[0] for letter in LETTERS]
    return generate(rig, conversation, {"max_tokens": 24, "allowed_token_ids": allowed})


@way
def several(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    return generate(rig, conversation, {"n": 3, "temperature": 1.0, "seed": 7})


@way
def structured(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    wanted = StructuredOutputsParams(regex="( red| cat| dog){12}")
    found = generate(rig, conversation, {"structured_outputs": wanted})
    tokenizer = rig.oracle.processor.tokenizer
    text = tokenizer.decode(found.tokens[0])
    assert set(text.split()) <= {"red", "cat", "dog"}, f"not as the grammar has it: {text!r}"
    return found


@way
def beam(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    params = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = rig.llm.beam_search([prompt_of(rig, conversation)], params)
    return Said(
        [list(one.tokens[-NUM_TOKENS:]) for one in output.sequences],
        [[{i: entry.logprob for i, entry in step.items()} for step in one.logprobs] for one in output.sequences],
    )


@way
def pooled(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    (output,) = rig.llm.embed([prompt_of(rig, conversation)], use_tqdm=False)
    return Said(vector=[float(value) for value in output.outputs.embedding])


@way
def with_priority(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    """Behind three others of higher and lower priority."""
    others = [[user(picture(70 + n), "Another one." + filler(40))] for n in range(3)]
    prompts = [prompt_of(rig, one) for one in [*others, conversation]]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    return said(rig.llm.generate(prompts, params, use_tqdm=False, priority=[0, 9, 5, 3])[-1])


@way
def lora(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    """Without the adapter and with it: other answers, and neither reuses what the other left."""
    base, adapted = generate(rig, conversation), generate(rig, conversation, lora_request=adapter(rig))
    assert base.tokens != adapted.tokens, "the adapter changes nothing"
    return Said(base.tokens + adapted.tokens, base.logprobs + adapted.logprobs)


def wait_until_weights_are_known(rig: ZooRig) -> None:
    """Before, no features are used."""
    if (features := rig.features) is not None:
        assert features.wait_until_known(600)


@way
def reloaded(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    """The weights are read once more before each question; the scheduler is told that the worker's cache is empty."""
    rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.directory)})
    rig.llm.llm_engine.reset_encoder_cache()
    wait_until_weights_are_known(rig)
    return generate(rig, conversation)


@way
def transferred(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    """Before each question weights are sent twice; with the second they are what they were."""
    for factor in (0.5, 2.0):
        rig.llm.start_weight_update()
        rig.llm.update_weights({"update_info": {"factor": factor}})
        rig.llm.finish_weight_update()
    wait_until_weights_are_known(rig)
    return generate(rig, conversation)


@way
def embeddings(rig: ZooRig, conversation: Sequence[Message]) -> Said:
    """The question itself, and numbers in place of a prompt, other ones for each question."""
    found = generate(rig, conversation)
    text, images = rig.render(conversation)
    seed = zlib.crc32(text.encode() + b"".join(image.tobytes() for image in images))
    hidden = rig.vllm_config.model_config.get_hidden_size()
    numbers = torch.randn(200, hidden, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    other = said(rig.llm.generate([{"prompt_embeds": numbers.to(rig.dtype)}], params, use_tqdm=False)[0])
    return Said(found.tokens + other.tokens, found.logprobs + other.logprobs)


def adapter(rig: ZooRig) -> LoRARequest:
    """A LoRA on the queries of the first layer, large enough to change answers; written once."""
    folder = rig.directory.with_name(rig.directory.name + "-lora")
    if not folder.exists():
        folder.mkdir()
        weight = next((t for name, t in tensors(rig.directory) if name.endswith("layers.0.self_attn.q_proj.weight")))
        generator = torch.Generator().manual_seed(1)
        name = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
        written = {
            f"{name}.lora_A.weight": torch.randn(8, weight.shape[1], generator=generator) * 0.3,
            f"{name}.lora_B.weight": torch.randn(weight.shape[0], 8, generator=generator) * 0.3,
        }
        save_file(written, folder / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(about | {"task_type": "CAUSAL_LM"}))
    return LoRARequest("tiny", 1, str(folder))


def tensors(directory: Path) -> list[tuple[str, torch.Tensor]]:
    """Those of the language model, by name."""
    found = [pair for path in sorted(directory.glob("*.safetensors")) for pair in load_file(path).items()]
    return [(name, tensor) for name, tensor in found if "vis" not in name]
