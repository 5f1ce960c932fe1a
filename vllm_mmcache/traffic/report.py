# SPDX-License-Identifier: Apache-2.0
"""An estimate in words and as JSON, with all that it assumes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ByteSize

from vllm_mmcache.traffic.estimate import BLOCK_CHARS, SIDES, TURN_TOKENS, Done, Estimate
from vllm_mmcache.traffic.models import UNKNOWN_SIDE

DECODE_S = {"JPEG": 5.2e-9, "PNG": 15.6e-9}
"""Seconds of one CPU core to decode a pixel; other formats are taken as JPEG. benchmarks/results/processor.json."""
PROCESS_S = 9.2e-9
"""Seconds of one CPU core to process a pixel; likewise."""
SHARES = (0.5, 0.8, 0.95, 1.0)
LITTLE = 0.05
"""What saves less than this share is not worth running."""


@dataclass(frozen=True)
class Speeds:
    """What somebody has measured on their GPU; None where nobody has said."""

    tower_tokens_s: float | None = None
    prefill_tokens_s: float | None = None


def as_json(estimate: Estimate, unused: Mapping[str, int], speeds: Speeds) -> dict[str, Any]:
    """All numbers, what was assumed for them, and the verdict. unused: why -> how many lines."""
    seen = asdict(estimate.seen) | {"tenants": len(estimate.seen.tenants)}
    sides = {side: asdict(done) | seconds(estimate, done, speeds) for side, done in estimate.done.items()}
    return {
        "model": estimate.model.name,
        "seen": seen,
        "unused": dict(unused),
        **sides,
        "feature_bytes_for_share_of_hits": {str(share): estimate.distances.size_for(share) for share in SHARES},
        "verdict": verdict(estimate),
        "assumptions": list(assumptions(estimate, speeds)),
    }


def lines(estimate: Estimate, unused: Counter[str], speeds: Speeds) -> Iterator[str]:
    """One screen: what the requests hold, what each side does, what memory is needed, assumptions, and a verdict."""
    seen = estimate.seen
    yield (
        f"{_count(seen.requests, 'request')} in {_count(seen.conversations, 'conversation')}"
        f" of {_count(len(seen.tenants), 'tenant')}"
    )
    if unused:
        reasons = ", ".join(f"{why}: {number:,}" for why, number in unused.most_common())
        yield f"not used: {_count(sum(unused.values()), 'line')} ({reasons})"
    if not seen.images:
        yield verdict(estimate)
        return
    yield (
        f"{_count(seen.images, 'image')}, {shown(seen.file_bytes)} of files; {seen.image_tokens:,} of "
        f"{seen.prompt_tokens:,} tokens of prompts"
    )
    for what, number in (
        ("new", seen.new),
        ("seen before in the same conversation", seen.in_conversation),
        ("seen before in another conversation", seen.across_conversations),
        ("seen before by other tenants alone", seen.across_tenants),
    ):
        yield f"  {what:<40}{number:>12,}  {number / seen.images:>5.0%}"
    yield f"conversations go on behind all that was asked {seen.grown:,} times, and change it {seen.rewritten:,} times"
    yield ""
    yield f"{'':<42}{'stock':>14}{'vllm-mmcache':>14}"
    stock, ours = (estimate.done[side] for side in SIDES)
    counts = {
        "images decoded": (stock.decoded, ours.decoded),
        "images processed": (stock.processed, ours.processed),
        "runs of the vision tower, images": (stock.encoded, ours.encoded),
        "tokens of prompts computed": (
            seen.prompt_tokens - stock.reused_tokens, seen.prompt_tokens - ours.reused_tokens
        ),
    }  # fmt: skip
    for what, (stock_count, our_count) in counts.items():
        yield f"{what:<42}{stock_count:>14,}{our_count:>14,}"
    our_s = seconds(estimate, ours, speeds)
    for what, stock_s in seconds(estimate, stock, speeds).items():
        yield f"{what.removesuffix('_s').replace('_', ' ') + ', seconds':<42}{stock_s:>14,.1f}{our_s[what]:>14,.1f}"
    yield ""
    if estimate.distances.needed:
        sizes = ", ".join(f"{share:.0%}: {shown(estimate.distances.size_for(share))}" for share in SHARES)
        yield f"features to keep, for so many of the hits that there could be: {sizes}"
    yield from (f"assumed: {one}" for one in assumptions(estimate, speeds))
    yield ""
    yield verdict(estimate)


def seconds(estimate: Estimate, done: Done, speeds: Speeds) -> dict[str, float]:
    """Of one CPU core, and of the GPU as far as its speeds are given."""
    decode_s = sum(DECODE_S.get(name, DECODE_S["JPEG"]) * pixels for name, pixels in done.decoded_pixels.items())
    found = {"CPU_s": decode_s + PROCESS_S * done.processed_pixels}
    mean_tokens = estimate.seen.image_tokens / (estimate.seen.images or 1)
    if speeds.tower_tokens_s is not None:
        found["vision_tower_s"] = done.encoded * mean_tokens / speeds.tower_tokens_s
    if speeds.prefill_tokens_s is not None:
        found["prefill_s"] = (estimate.seen.prompt_tokens - done.reused_tokens) / speeds.prefill_tokens_s
    return found


def assumptions(estimate: Estimate, speeds: Speeds) -> Iterator[str]:
    """What the numbers rest on, a sentence each."""
    sizes, model = estimate.sizes, estimate.model
    yield (
        f"model {model.name}; {sizes.chars_per_token:g} characters a token, {TURN_TOKENS} tokens more for each "
        f"message; hits end at pieces of {BLOCK_CHARS} characters"
    )
    yield (
        f"KV cache of {sizes.kv_tokens:,} tokens, vLLM's encoder cache of {sizes.encoder_tokens:,} tokens and "
        f"processor cache of {shown(sizes.processor_bytes)}, features in {shown(sizes.feature_bytes)}; requests one "
        "after the other"
    )
    yield "CPU time as on the machine of this project's benchmarks: 1920x1080 as JPEG 30 ms, as PNG 51 ms"
    if estimate.seen.of_unknown_size:
        yield (
            f"{_count(estimate.seen.of_unknown_size, 'image')} without a size in the log (URLs, names, broken files): "
            f"{UNKNOWN_SIDE}x{UNKNOWN_SIDE}"
        )
    if speeds.tower_tokens_s is None or speeds.prefill_tokens_s is None:
        yield "no time of the GPU, unless --tower-tokens-s and --prefill-tokens-s say what yours computes in a second"


def verdict(estimate: Estimate) -> str:
    """Whether it is worth it, in a sentence."""
    seen = estimate.seen
    if not seen.requests:
        return "No requests were found, so nothing can be said."
    if not seen.images:
        return "There are no images in these requests: vllm-mmcache would do nothing for them."
    stock, ours = (estimate.done[side] for side in SIDES)
    savings = {
        "decoding and processing": 1 - (ours.decoded + ours.processed) / (stock.decoded + stock.processed or 1),
        "runs of the vision tower": 1 - ours.encoded / stock.encoded if stock.encoded else 0.0,
        "tokens of the prefill": (ours.reused_tokens - stock.reused_tokens)
        / ((seen.prompt_tokens - stock.reused_tokens) or 1),
    }
    worth = {what: share for what, share in savings.items() if share >= LITTLE}
    if not worth:
        return "Do not use it for these requests: nearly all images are new, or stock vLLM reuses them already."
    return "Worth trying: it would save " + ", ".join(f"{share:.0%} of {what}" for what, share in worth.items()) + "."


def shown(num_bytes: float) -> str:
    """Such as 2.0GiB."""
    return ByteSize(num_bytes).human_readable()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
