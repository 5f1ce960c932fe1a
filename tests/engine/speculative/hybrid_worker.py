# SPDX-License-Identifier: Apache-2.0
"""Conversations on a tiny Qwen3.5 that drafts with its MTP head and keeps its states, each token against a cold run.

Run with `python -m tests.engine.speculative.hybrid_worker`, a task on stdin, a JSON object on the last line of stdout.
vLLM copies GDN states with Triton kernels, which Triton's interpreter runs here. Every answer is put again as a prompt
whose log-probabilities are asked for: these vLLM computes without prefix hit, without drafts and in one chunk.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmcache_tools.harness.engines import EngineConfig, ZooRig
from mmcache_tools.zoo import build_cached
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from vllm import SamplingParams

from tests.engine.speculative import hybrid_vllm
from tests.engine.speculative.drafters import write_mtp
from tests.engine.speculative.worker import counters
from vllm_mmcache.exactness.conversations import filler

NUM_WORDS = 8  # of which answers are made
LEANING = 40.0  # how much the model leans to the word that its head drafts: most drafts are accepted, not all


@dataclass(frozen=True)
class Task:
    """What is run. Prompts of a round go in together, each behind what the same one said in the round before."""

    scratch: str
    prompts: list[list[int]]  # per round: new tokens of each prompt
    answers: list[list[int]]  # per round: tokens of each answer
    num_drafted: int = 2  # in a step
    retention: int | None = None  # of states, in tokens; None: at every block's end. vLLM's default is 0: the prompt's
    drops_block: bool = True  # vLLM's default with a draft head: of a hit the last block is computed again
    num_blocks: int | None = None
    num_seqs: int = 3
    batched_tokens: int = 2048  # of all requests in a step
    change: str | None = None  # of hybrid_vllm.prepare


def main() -> None:
    """Read a task from stdin, print its result as the last line."""
    task = Task(**json.load(sys.stdin))
    print(json.dumps(run(task)), flush=True)


def run(task: Task) -> dict[str, Any]:
    """Start, converse, compare, close."""
    witness = hybrid_vllm.prepare(task.change)
    rig = ZooRig(config(task), with_head(Path(task.scratch)))
    try:
        answers = converse(rig, task)
        found: dict[str, Any] = {**counters(rig), "preemptions": rig.num_preemptions()}
        found |= {"counts": witness.counts, "wrong": len(witness.wrong)}
        found |= {"wrong_requests": sorted({request.split("-")[0] for request, *_ in witness.wrong})}
        for answer in answers:
            answer["errors"] = errors(rig, answer.pop("prompt"), answer["tokens"], answer.pop("logprobs"))
        config_used = rig.vllm_config
        return found | {
            "answers": answers,
            "block_tokens": rig.block_tokens,
            "is_async": config_used.scheduler_config.async_scheduling,
            "is_v2": config_used.use_v2_model_runner,
            "mode": config_used.cache_config.mamba_cache_mode,
            "plugin": "vllm_mmcache.lifecycle.activation" in sys.modules,
        }
    finally:
        rig.close()


def config(task: Task) -> EngineConfig:
    """The engine of a task."""
    drafter: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": task.num_drafted}
    if not task.drops_block:
        drafter["disable_eagle_block_drop"] = True
    more = (("speculative_config", drafter), ("prefix_cache_retention_interval", task.retention))
    return EngineConfig(
        "qwen3.5", batched_tokens=task.batched_tokens, num_blocks=task.num_blocks, num_seqs=task.num_seqs,
        max_tokens=512, num_images=0, more=more,
    )  # fmt: skip


def words(scratch: Path) -> list[int]:
    """The tokens of which answers are made."""
    tokenizer = Tokenizer.from_file(str(build_cached("qwen3.5", scratch) / "tokenizer.json"))
    return list(dict.fromkeys(tokenizer.encode(filler(40), add_special_tokens=False).ids))[:NUM_WORDS]


def with_head(scratch: Path) -> Path:
    """The tiny Qwen3.5 with an MTP head that drafts the words in turn, and a leaning to say them so.

    In `write_mtp`'s answers a word follows itself, and a state that lacks a token of such a run is hardly another one.
    """
    directory = scratch / "with-head"
    if directory.exists():
        return directory
    directory.mkdir(parents=True)
    write_mtp(build_cached("qwen3.5", scratch), directory)
    ids = words(scratch)
    following = ids[1:] + ids[:1]
    tensors = load_file(directory / "model.safetensors")
    into = torch.linalg.pinv(next(t for name, t in tensors.items() if "embed_tokens" in name).double()[ids]).T
    out = tensors["lm_head.weight"].double()
    out[following] += LEANING * into
    half = torch.linalg.pinv(out[following]) @ into
    half = half / half.std() * 0.08
    tensors["lm_head.weight"] = out.bfloat16()
    tensors["mtp.fc.weight"] = torch.cat([half, torch.zeros_like(half)], dim=1).bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def converse(rig: ZooRig, task: Task) -> list[dict[str, Any]]:
    """All rounds. Of each answer the prompt, the tokens, their log-probabilities, and how much was cached."""
    tokenizer = rig.oracle.processor.tokenizer
    allowed = words(Path(task.scratch))
    texts: list[list[int]] = [[] for _ in task.prompts[0]]
    answers: list[dict[str, Any]] = []
    for turn, (lengths, numbers) in enumerate(zip(task.prompts, task.answers, strict=True)):
        for request, length in enumerate(lengths):
            more = tokenizer.encode(f"{request} of {turn}: " + filler(length), add_special_tokens=False)
            texts[request] = texts[request] + more[:length]
        params = [
            SamplingParams(max_tokens=n, temperature=0, logprobs=1, ignore_eos=True, allowed_token_ids=allowed)
            for n in numbers
        ]
        outputs = rig.llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
        for request, output in enumerate(outputs):
            tokens, steps = list(output.outputs[0].token_ids), output.outputs[0].logprobs
            answers.append({
                "turn": turn, "request": request, "prompt": texts[request], "length": len(texts[request]),
                "tokens": tokens, "cached": output.num_cached_tokens,
                "logprobs": [step[token].logprob for token, step in zip(tokens, steps, strict=True)],
            })  # fmt: skip
            texts[request] = texts[request] + tokens
    return answers


def errors(rig: ZooRig, prompt: list[int], tokens: list[int], said: list[float]) -> list[float]:
    """Per token of an answer, how far its log-probability is from the cold one."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (output,) = rig.llm.generate([{"prompt_token_ids": prompt + tokens}], params, use_tqdm=False)
    cold = output.prompt_logprobs[len(prompt) :]
    return [abs(step[token].logprob - one) for token, one, step in zip(tokens, said, cold, strict=True)]


if __name__ == "__main__":
    main()
