# SPDX-License-Identifier: Apache-2.0
"""Times stock vLLM and the plugin on a GPU, with models of real sizes and random weights.

python -m scripts.gpu_check.timings --out timings.json [--models qwen3-vl-8b] [--rounds 6] [--seconds 200]

Answers are nonsense, but the work is that of the real model: a first question about a new picture, another question
behind another text about one that rotated out of vLLM's caches, another question behind the same text, 16 questions at
once, and decoding. One process for each side, one after the other. Each time is written when it is known, so a run that
is cut keeps what it has. --tiny tries the command on a CPU.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.gpu_check.found import lacks_flashinfer, make_plugin_path

SIZE = (1280, 720)
ROTATION = 24  # pictures: more than vLLM's encoder cache holds
AT_ONCE = 16
DECODING = 64  # requests
SIDES = ("stock", "mmcache")

_QWEN_VISION = {
    "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "num_position_embeddings": 2304,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # The published shape of Qwen3-VL-8B.
    "qwen3-vl-8b": (
        "qwen3-vl",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        },
        {**_QWEN_VISION, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
    ),
    # Of Qwen3.5's architecture, 3 of 4 layers GDN; about 4 billion parameters.
    "qwen3.5-4b": (
        "qwen3.5",
        {
            "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 151936, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        },
        {**_QWEN_VISION, "out_hidden_size": 2560},
    ),
}  # fmt: skip
"""Name -> family of the zoo, and what of its text and vision configuration has the real size."""
_MROPE = {128: [24, 20, 20], 256: [11, 11, 10]}  # sections by head_dim, of half the rotary dimensions


def main() -> int:
    """Time all models on both sides; returns the exit code."""
    parser = argparse.ArgumentParser("python -m scripts.gpu_check.timings", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no side later")
    parser.add_argument("--tiny", action="store_true", help="the zoo's own sizes")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        _measure(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = make_plugin_path(Path(folder))
        if not options.tiny and lacks_flashinfer("cuda"):
            os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        _time_all(options)
    _print(options.out)
    return 0


def _time_all(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.seconds
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path = _make(name, Path(folder), options.tiny)
            for side in SIDES:
                if time.monotonic() > end:
                    print(f"{name}, {side}: no time left")
                    continue
                again = [
                    "--out",
                    str(options.out),
                    "--rounds",
                    str(options.rounds),
                    "--side",
                    side,
                    "--model",
                    str(path),
                ]
                command = [sys.executable, "-m", "scripts.gpu_check.timings", *again, "--models", name]
                environ = os.environ | {
                    "VLLM_PLUGINS": "mmcache" if side == "mmcache" else "",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                }
                code = subprocess.run([*command, *(["--tiny"] if options.tiny else [])], env=environ, check=False)
                print(f"{name}, {side}: exit code {code.returncode}", flush=True)


def _make(name: str, folder: Path, tiny: bool) -> Path:
    """A folder with the model's configuration, tokenizer and processor, without weights unless it is tiny."""
    from mmcache_tools.zoo import build

    family, text, vision = MODELS[name]
    path = build(family, folder / name)
    if tiny:
        return path
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["text_config"] |= text | {"dtype": "bfloat16"}
    config["text_config"]["rope_parameters"]["mrope_section"] = _MROPE[text["head_dim"]]
    config["vision_config"] |= vision
    (path / "config.json").write_text(json.dumps(config))
    return path


def _measure(options: argparse.Namespace) -> None:
    """One side, in this process."""
    from vllm import LLM, SamplingParams

    begun = time.perf_counter()
    more: dict[str, Any] = {}
    if not options.tiny:
        more = {
            "load_format": "dummy",
            "gpu_memory_utilization": 0.9,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 16, 64],
            },
        }
        if options.models[0].startswith("qwen3.5"):
            more["gdn_prefill_backend"] = "triton"
    llm = LLM(
        model=options.model,
        max_model_len=16384,
        limit_mm_per_prompt={"image": 4, "video": 0},
        enforce_eager=options.tiny,
        disable_log_stats=False,
        seed=0,
        **more,
    )
    found: dict[str, Any] = {"start_s": time.perf_counter() - begun}
    key = f"{options.models[0]}, {options.side}"
    try:
        from vllm_mmcache.base import status

        found["components"] = {name: str(state) for name, state in status.in_force().items()}
    except ImportError:
        pass

    def keep() -> None:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps(known | {key: found}, indent=1))

    def timed(name: str, ask: Callable[[int], Any], rounds: int) -> None:
        times = []
        for number in range(rounds):
            start = time.perf_counter()
            ask(number)
            times.append(1000 * (time.perf_counter() - start))
        found[name] = {"median_ms": statistics.median(times), "ms": times}
        print(f"{key}: {name}: {statistics.median(times):.1f} ms", flush=True)
        keep()

    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    def ask(*messages: list[Any], params: Any = one) -> Any:
        return llm.chat([[{"role": "user", "content": parts}] for parts in messages], params, use_tqdm=False)

    def question(number: int) -> dict[str, str]:
        return {"type": "text", "text": f"Question {number}: " + " ".join(["what", "is", "there"] * 8)}

    words = ["red", "cat", "dog", "bird", "tree", "river", "table", "lamp"]

    def text(seed: int, num_words: int) -> dict[str, str]:
        rng = random.Random(seed)
        return {"type": "text", "text": " ".join(rng.choice(words) for _ in range(num_words))}

    prefix = 200 if options.tiny else 1200
    rounds = options.rounds
    pictures = [_picture(number) for number in range(ROTATION + rounds + 2 * AT_ONCE + 2)]
    keep()
    for number in range(2):  # what is compiled or tuned at first use
        ask([text(900 + number, prefix), pictures[-1 - number], question(0)])
        ask([text(900 + number, prefix), pictures[-1 - number], question(1)])
    shown = pictures[:ROTATION]
    new = pictures[ROTATION : ROTATION + rounds]
    timed("a first question about a new picture", lambda n: ask([text(n, prefix), new[n], question(n)]), rounds)
    timed("another question behind the same text", lambda n: ask([text(n, prefix), new[n], question(50 + n)]), rounds)
    for number, picture in enumerate(shown):
        ask([text(100 + number, prefix), picture, question(0)])
    timed(
        "a known picture that rotated out, behind another text",
        lambda n: ask([text(200 + n, prefix), shown[n % ROTATION], question(n)]),
        max(rounds, 12),
    )
    timed(
        "16 questions at once about known pictures, behind other texts",
        lambda n: ask(
            *[[text(300 + 16 * n + i, 64), shown[(7 * n + i) % ROTATION], question(i)] for i in range(AT_ONCE)]
        ),
        3,
    )
    first = pictures[ROTATION + rounds : ROTATION + rounds + AT_ONCE]
    timed(
        "16 first questions at once about new pictures",
        lambda n: ask(*[[text(600 + i, 64), picture, question(i)] for i, picture in enumerate(first)]),
        1,
    )
    num_tokens = 8 if options.tiny else 128
    many = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
    timed(
        f"64 requests of text, {num_tokens} tokens each",
        lambda n: ask(*[[text(1000 + 64 * n + i, 64)] for i in range(DECODING)], params=many),
        2,
    )
    found["counts"] = _counts()
    keep()


def _counts() -> dict[str, float]:
    """The plugin's own, of this process."""
    from prometheus_client import REGISTRY

    return {
        sample.name: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name in ("mmcache:tower_images_total", "mmcache:tower_images_avoided_total")
    }


def _picture(number: int) -> dict[str, Any]:
    """A picture of a size that clients send, as a data URL; noise in a part of it, so that no two are alike."""
    from PIL import Image, ImageDraw

    rng = random.Random(number)
    image = Image.new("RGB", SIZE, (rng.randrange(256), 255, 255))
    draw = ImageDraw.Draw(image)
    for line in range(30):
        draw.text((20, 24 * line), " ".join(f"{rng.random():.6f}" for _ in range(18)), fill=(0, 0, 0))
    held = io.BytesIO()
    image.save(held, "JPEG", quality=85)
    url = f"data:image/jpeg;base64,{base64.b64encode(held.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _print(path: Path) -> None:
    if not path.exists():
        return
    found = json.loads(path.read_text())
    for name in MODELS:
        stock, ours = (found.get(f"{name}, {side}", {}) for side in SIDES)
        for what, value in stock.items():
            if isinstance(value, dict) and "median_ms" in value and what in ours:
                before, now = value["median_ms"], ours[what]["median_ms"]
                print(f"{name}: {what}: stock {before:.1f} ms, plugin {now:.1f} ms, ratio {now / before:.2f}")
        if ours:
            print(f"{name}: components: {ours.get('components')}; counts: {ours.get('counts')}")


if __name__ == "__main__":
    sys.exit(main())
