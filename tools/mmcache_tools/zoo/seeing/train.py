# SPDX-License-Identifier: Apache-2.0
"""Trains the model that lies in this folder: python -m mmcache_tools.zoo.seeing.train WORK [--write].

Transformers' own Qwen3-VL, products in bfloat16 and all else in float32, AdamW. Each step draws new conversations from
the seed and its number, so a run that was stopped goes on from its last checkpoint in WORK as if it had not been.
Single pictures first: until those are named, the longer conversations teach nothing. With --write the weights (as
float16), the tokenizer and what was measured are put into this folder. Sums differ between machines, so bytes do too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageTextToText

from mmcache_tools.zoo.build import build, token_ids, write_all_but_weights
from mmcache_tools.zoo.catalogue import BY_NAME
from mmcache_tools.zoo.configs import ZooOptions
from mmcache_tools.zoo.seeing.examples import NO_LABEL, Batch, Encoder, collate
from mmcache_tools.zoo.seeing.pictures import stream
from mmcache_tools.zoo.seeing.prompts import (
    MAX_PICTURES,
    MAX_TURNS,
    Conversation,
    all_text,
    converse,
    held_out,
    long_held_out,
    random_plan,
    random_system,
)
from mmcache_tools.zoo.tokenizer import tokenizer_json

SEED = 0
SINGLE_STEPS = 1000  # one picture, one question
# Steps and highest learning rate. The first cycle got 94 in 100 of the held-out answers right, the second 97.
CYCLES = ((6000, 1.5e-3), (2400, 8e-4), (2000, 6e-4))
STEPS = sum(steps for steps, _ in CYCLES)
TURNS_PER_STEP = 32
WARM_UP_STEPS = 150
WEIGHT_DECAY = 0.05
CHECKPOINT_STEPS = 200
NUM_HELD_OUT = 500

HERE = Path(__file__).parent


def conversations(step: int) -> list[Conversation]:
    """What step number `step` learns from: as many turns in every step, in conversations of one length."""
    random = stream("train", SEED, step)
    if step < SINGLE_STEPS:
        return [converse(random, ["name"]) for _ in range(TURNS_PER_STEP)]
    # Lengths 1, 2, 3, ... with falling frequency, up to the demo's 12 turns.
    num_turns, max_pictures = min(MAX_TURNS, 1 + int(random.exponential(2.5))), MAX_PICTURES
    if step >= STEPS - CYCLES[-1][0] and step % 2:
        num_turns, max_pictures = int(random.integers(1, 5)), 2  # in the end, more of what it is for
    plans = [random_plan(random, num_turns, max_pictures) for _ in range(max(1, TURNS_PER_STEP // num_turns))]
    return [converse(random, plan, random_system(random)) for plan in plans]


def learning_rate(step: int) -> float:
    """In each cycle a linear warm-up, then half a cosine down to zero."""
    num_steps, highest = CYCLES[0]
    for following in CYCLES[1:]:
        if step < num_steps:
            break
        step -= num_steps
        num_steps, highest = following
    if step < WARM_UP_STEPS:
        return highest * (step + 1) / WARM_UP_STEPS
    return highest * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP_STEPS) / (num_steps - WARM_UP_STEPS)))


def logits_and_labels(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, length - 1, vocab) float32 and the labels (n, length - 1) that they should predict."""
    output = model(
        input_ids=batch.ids, position_ids=batch.positions, pixel_values=batch.patches, image_grid_thw=batch.grids
    )
    return output.logits[:, :-1], batch.labels[:, 1:]


def num_right(model: Any, encoder: Encoder, asked: list[Conversation]) -> int:
    """How many last answers the model gives right, word for word.

    One pass is enough: greedy decoding writes the right answer exactly when each of its tokens is the best after
    the ones before.
    """
    right = 0
    for start in range(0, len(asked), 20):
        part = asked[start : start + 20]
        with torch.no_grad():
            logits, labels = logits_and_labels(model, collate(encoder, part))
        wrong = (logits.argmax(-1) != labels) & (labels != NO_LABEL)
        for row, conversation in enumerate(part):
            num_tokens = len(encoder.ids(conversation.answer)) + 1  # with its end of turn
            answer = torch.nonzero(labels[row] != NO_LABEL)[-num_tokens:]
            right += not bool(wrong[row][answer].any())
    return right


def save_atomically(content: Any, path: Path) -> None:
    """Write with torch.save beside `path`, then rename: a run that is killed leaves the older file whole."""
    scratch = path.with_suffix(".tmp")
    torch.save(content, scratch)
    os.replace(scratch, path)


def train(work: Path, stop_at: int | None = None) -> tuple[Any, Encoder, dict[str, Any]]:
    """Train, or go on; returns the model, the encoder and what was counted (steps, seconds at work)."""
    spec = BY_NAME["seeing"]
    work.mkdir(parents=True, exist_ok=True)
    text, _, _ = tokenizer_json(spec, all_text())
    write_all_but_weights(spec, work, ZooOptions(), text, token_ids(text))
    encoder = Encoder(text)

    torch.manual_seed(SEED)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(work), dtype=torch.float32).train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=learning_rate(0), betas=(0.9, 0.98))
    first, seconds = 0, 0.0
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        first, seconds = saved["step"], saved["seconds"]

    watched = [held_out(-1 - number) for number in range(100)]  # not among those that are counted in the end
    mean_loss = math.nan
    start_s = time.process_time()
    for step in range(first, min(STEPS, stop_at or STEPS)):
        with torch.autocast("cpu", torch.bfloat16):  # a quarter faster than float32
            logits, labels = logits_and_labels(model, collate(encoder, conversations(step)))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        mean_loss = loss.item() if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * loss.item()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            spent = seconds + time.process_time() - start_s
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
            save_atomically(state | {"step": step + 1, "seconds": spent}, checkpoint)
            right = num_right(model.eval(), encoder, watched)
            model.train()
            print(f"step {step + 1}: loss {mean_loss:.4f}, {right} of {len(watched)} right, {spent:.0f} s", flush=True)
    spent = seconds + time.process_time() - start_s
    return model.eval(), encoder, {"seed": SEED, "steps": STEPS, "cpu_seconds": round(spent)}


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file of the built model: another configuration would make another model of the same weights."""
    files = sorted(path for path in directory.iterdir() if path.name != "zoo.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write(model: Any, encoder: Encoder, work: Path, counted: dict[str, Any]) -> None:
    """Put weights, tokenizer and measured.json into this folder; what is measured is the rounded weights."""
    model.half().float()
    tensors = {name: values.half().contiguous() for name, values in model.named_parameters()}
    content = save(dict(sorted(tensors.items())), metadata={"format": "pt"})
    (HERE / "model.safetensors").write_bytes(content)
    (HERE / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    right = num_right(model, encoder, [held_out(number) for number in range(NUM_HELD_OUT)])
    measured = {
        "command": "python -m mmcache_tools.zoo.seeing.train WORK --write",
        **counted,
        "num_parameters": sum(values.numel() for values in tensors.values()),
        "weights_bytes": len(content),
        "held_out": NUM_HELD_OUT,
        "right": right,
        "long_held_out": NUM_HELD_OUT,
        "long_right": num_right(model, encoder, [long_held_out(number) for number in range(NUM_HELD_OUT)]),
        "files_sha256": digests(build("seeing", work / "built")),
    }
    (HERE / "measured.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(measured))


def main() -> None:
    """The command line: train as far as asked, and with --write put the outcome into this folder."""
    parser = argparse.ArgumentParser(description="Train the zoo's model that sees.")
    parser.add_argument("work", type=Path, help="directory for checkpoints; an unfinished run there goes on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stop-at", type=int, help="stop after this step, for a trial")
    parser.add_argument("--write", action="store_true", help="replace the weights in this folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, encoder, counted = train(options.work, options.stop_at)
    if options.write:
        write(model, encoder, options.work, counted)


if __name__ == "__main__":
    main()
