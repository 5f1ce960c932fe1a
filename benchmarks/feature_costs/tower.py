# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen3-VL-8B as Transformers has it, random weights, bfloat16, on the CPU: time and operations.

Its features are also what compression is tried on. 0.58 billion parameters, 1.2 GB. A process of its own loads it.
"""

import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

SIDE = 32  # pixels of a token's side: patches of 16, merged two by two


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """By shapes; torch's counter leaves the CPU's kernel out."""
    return sdpa_flop_count(query, key, value)


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def load(layers: int = 27, **smaller: Any) -> Qwen3VLVisionModel:
    """The tower; Qwen3VLVisionConfig's defaults are those of the 8B model but for the width of what it gives."""
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(out_hidden_size=4096, depth=layers, **smaller)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Qwen3VLVisionModel(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    for name, parameter in model.named_parameters():
        scale = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        torch.nn.init.normal_(parameter, scale, 0.02)
    model.rotary_pos_emb = type(model.rotary_pos_emb)(config)  # its frequencies are no parameters
    return model


@torch.inference_mode()
def features(model: Qwen3VLVisionModel, width: int, height: int) -> torch.Tensor:
    """Features of a picture of random pixels. Shapes: (num_tokens, out_hidden_size * (1 + num_deepstack)) bfloat16."""
    columns, rows = 2 * round(width / SIDE), 2 * round(height / SIDE)
    pixels = torch.randn(rows * columns, 3 * 2 * 16 * 16, dtype=torch.bfloat16)
    given = model(pixels, grid_thw=torch.tensor([[1, rows, columns]]))
    return torch.cat([given.pooler_output, *given.deepstack_features], dim=1)


def measure(model: Qwen3VLVisionModel, size: tuple[int, int]) -> dict[str, float]:
    """Seconds and operations of a picture, the second of its size: the first takes longer."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        made = features(model, *size)
    start = time.perf_counter()
    features(model, *size)
    seconds = time.perf_counter() - start
    num_bytes = made.numel() * made.element_size()
    return {"time_s": seconds, "tokens": len(made), "bytes": num_bytes, "operations": counter.get_total_flops()}


def compression(made: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Ratio and GB/s of lossless codecs on features, as they are, and with the two bytes of each value apart."""
    plain = made.contiguous().view(torch.uint8).numpy()
    ways = {"plain": plain.tobytes(), "bytes apart": plain.reshape(-1, 2).T.tobytes()}
    found: dict[str, dict[str, float]] = {}
    for codec, (pack, unpack) in codecs().items():
        for way, content in ways.items():
            packed, pack_s = timed(pack, content, 1)
            back, unpack_s = timed(unpack, packed, rounds)
            assert back == content
            found[f"{codec}, {way}"] = {
                "bytes_left": len(packed) / len(content),
                "pack_gb_s": len(content) / pack_s / 1e9, "unpack_gb_s": len(content) / unpack_s / 1e9,
            }  # fmt: skip
    return found


def codecs() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """Those that are installed: zstandard and lz4 are no packages of this project."""
    found: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "zlib 1": (lambda content: zlib.compress(content, 1), zlib.decompress)
    }
    with suppress(ImportError):
        import zstandard

        found["zstd 1"] = (zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress)
    with suppress(ImportError):
        import lz4.frame

        found["lz4"] = (lz4.frame.compress, lz4.frame.decompress)
    return found


def timed(action: Callable[[bytes], bytes], content: bytes, rounds: int) -> tuple[bytes, float]:
    """What an action gives, and the least of its seconds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        made = action(content)
        seconds.append(time.perf_counter() - start)
    return made, min(seconds)
