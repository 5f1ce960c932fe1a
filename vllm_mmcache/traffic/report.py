# SPDX-License-Identifier: Apache-2.0
"""An estimate in words and as JSON, with all that it assumes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ByteSize

from vllm_mmcache.traffic.estimate import SIDES, TURN_TOKENS, Done, Estimate
from vllm_mmcache.traffic.models import UNKNOWN_SIDE
from vllm_mmcache.traffic.records import DIGEST_BITS, Recorded

DECODE_S = {"JPEG": 5.2e-9, "PNG": 15.6e-9}
"""Seconds of one CPU core to decode a pixel; other formats are taken as JPEG. benchmarks/results/processor.json."""
PROCESS_S = 9.2e-9
"""Seconds of one CPU core to process a pixel; likewise."""
SHARES = (0.5, 0.8, 0.95, 1.0)
LITTLE = 0.05
"""What saves less than this share is not worth running."""
LIKELY = 0.5
"""As many pairs of images with the same digest are worth a word."""
NAMES = {"recorded": "recorded", "stock": "stock", "mmcache": "vllm-mmcache"}


@dataclass(frozen=True)
class Speeds:
    """What somebody has measured on their GPU; None where nobody has said."""

    tower_tokens_s: float | None = None
    prefill_tokens_s: float | None = None


@dataclass(frozen=True)
class Result:
    """An estimate, and what was read for it. unused: why -> how many lines. recorded: of lines that are records."""

    estimate: Estimate
    unused: Counter[str] = field(default_factory=Counter)
    recorded: Recorded = field(default_factory=Recorded)
    speeds: Speeds = Speeds()

    @property
    def sides(self) -> tuple[str, ...]:
        """The columns: what the server has recorded, if it has, and the two sides that were played."""
        return ("recorded", *SIDES) if self.recorded.requests else SIDES


def as_json(result: Result) -> dict[str, Any]:
    """All numbers, what was assumed for them, and the verdict."""
    estimate, recorded = result.estimate, result.recorded
    seen = asdict(estimate.seen) | {"tenants": len(estimate.seen.tenants)}
    sides = {side: asdict(done) | seconds(result, done) for side, done in estimate.done.items()}
    of_server = {
        "requests": recorded.requests,
        "decoded": recorded.decoded,
        "processed": recorded.processed,
        "encoded": recorded.encoded,
        "reused_tokens": recorded.reused_tokens,
        "missed_tokens": dict(recorded.missed_tokens.most_common()),
        "models": list(recorded.models),
        "on_stock": recorded.on_stock,
    }
    return {
        "model": estimate.model.name,
        "seen": seen,
        "unused": dict(result.unused),
        **({"recorded": of_server} if recorded.requests else {}),
        **sides,
        "feature_bytes_for_share_of_hits": {str(share): estimate.distances.size_for(share) for share in SHARES},
        "feature_miss_ratio_by_bytes": estimate.distances.curve(),
        "verdict": verdict(estimate),
        "assumptions": list(assumptions(result)),
        "not_known": list(limits(result)),
    }


def lines(result: Result) -> Iterator[str]:
    """One screen: what the requests hold, what each side does, what memory is needed, assumptions, and a verdict."""
    estimate = result.estimate
    yield from summary(result)
    if not estimate.seen.images:
        yield verdict(estimate)
        return
    for what, number, share in repeats(estimate):
        yield f"  {what:<40}{number:>12,}  {share:>5.0%}"
    yield grown(estimate)
    yield ""
    yield f"{'':<42}" + "".join(f"{NAMES[side]:>14}" for side in result.sides)
    for what, numbers in work(result):
        yield f"{what:<42}" + "".join(f"{number:>14}" for number in numbers)
    if result.recorded.missed_tokens:
        yield ""
        yield "why the server that recorded computed tokens of prompts, by the reason that docs/explain.md explains"
        for reason, tokens in result.recorded.missed_tokens.most_common():
            yield f"  {reason:<40}{tokens:>12,}  {tokens / result.recorded.prompt_tokens:>5.0%} of all"
    yield ""
    if estimate.distances.needed:
        yield to_keep(estimate)
    yield from (f"assumed: {one}" for one in assumptions(result))
    yield from (f"not in the records: {one}" for one in limits(result))
    yield ""
    yield verdict(estimate)


def summary(result: Result) -> Iterator[str]:
    """What was read: requests, lines that could not be used, images, and the server that recorded."""
    seen, recorded = result.estimate.seen, result.recorded
    yield (
        f"{_count(seen.requests, 'request')} in {_count(seen.conversations, 'conversation')}"
        f" of {_count(len(seen.tenants), 'tenant')}"
    )
    if recorded.requests:
        hours = (recorded.last_s - recorded.first_s) / 3600
        models = ", ".join(model or "a model without a name" for model in recorded.models)
        yield f"{recorded.requests:,} of them recorded by a server of {models} within {hours:,.1f} hours"
    if result.unused:
        reasons = ", ".join(f"{why}: {number:,}" for why, number in result.unused.most_common())
        yield f"not used: {_count(sum(result.unused.values()), 'line')} ({reasons})"
    not_there = {
        ("image", " without content or a name in the log"): seen.unknown_images,
        ("part", " of videos, sounds or documents"): seen.other_media,
        ("request", " without the turns before it (previous_response_id)"): seen.continued,
    }
    for (what, more), number in not_there.items():
        if number:
            yield f"not counted: {_count(number, what)}{more}"
    if seen.images:
        files = f", {shown(seen.file_bytes)} of files" if seen.file_bytes else ""
        yield (
            f"{_count(seen.images, 'image')}{files}; {seen.image_tokens:,} of {seen.prompt_tokens:,} tokens of prompts"
        )


def repeats(estimate: Estimate) -> Iterator[tuple[str, int, float]]:
    """How many images came for the first time, and how many again, and from where; with their share of all."""
    seen = estimate.seen
    for what, number in (
        ("new", seen.new),
        ("seen before in the same conversation", seen.in_conversation),
        ("seen before in another conversation", seen.across_conversations),
        ("seen before by other tenants alone", seen.across_tenants),
    ):
        yield what, number, number / seen.images


def grown(estimate: Estimate) -> str:
    """How conversations went on."""
    seen = estimate.seen
    return (
        f"conversations go on behind all that was asked {seen.grown:,} times, and change it {seen.rewritten:,} times, "
        f"{seen.dropped:,} of these without an image that was there"
    )


def work(result: Result) -> Iterator[tuple[str, list[str]]]:
    """What is done on each of the sides of a result, a row for each kind of work."""
    estimate, recorded = result.estimate, result.recorded
    done = [estimate.done[side] for side in SIDES]
    prompt_tokens = estimate.seen.prompt_tokens
    rows = {
        "images decoded": [recorded.decoded, *(side.decoded for side in done)],
        "images processed": [recorded.processed, *(side.processed for side in done)],
        "runs of the vision tower, images": [recorded.encoded, *(side.encoded for side in done)],
        "tokens of prompts computed": [
            recorded.prompt_tokens - recorded.reused_tokens, *(prompt_tokens - side.reused_tokens for side in done)
        ],
    }  # fmt: skip
    for what, counts in rows.items():
        yield what, [f"{count:,}" for count in counts[-len(result.sides) :]]
    by_side = [seconds(result, side) for side in done]
    for what in by_side[0]:
        name = what.removesuffix("_s").replace("_", " ") + ", seconds"
        yield name, ["", *(f"{side[what]:,.1f}" for side in by_side)][-len(result.sides) :]


def to_keep(estimate: Estimate) -> str:
    """How large the store has to be for some shares of the hits."""
    sizes = ", ".join(f"{share:.0%}: {shown(estimate.distances.size_for(share))}" for share in SHARES)
    loaded = shown(estimate.done["mmcache"].loaded_bytes)
    return f"features to keep, for so many of the hits that there could be: {sizes}; read from the store: {loaded}"


def seconds(result: Result, done: Done) -> dict[str, float]:
    """Of one CPU core, and of the GPU as far as its speeds are given."""
    estimate, speeds = result.estimate, result.speeds
    found = {"CPU_s": cpu_s(done)}
    if speeds.tower_tokens_s is not None:
        found["vision_tower_s"] = done.encoded_tokens / speeds.tower_tokens_s
    if speeds.prefill_tokens_s is not None:
        found["prefill_s"] = (estimate.seen.prompt_tokens - done.reused_tokens) / speeds.prefill_tokens_s
    return found


def cpu_s(done: Done) -> float:
    """Seconds of one CPU core for decoding and processing."""
    decode_s = sum(DECODE_S.get(name, DECODE_S["JPEG"]) * pixels for name, pixels in done.decoded_pixels.items())
    return decode_s + PROCESS_S * done.processed_pixels


def assumptions(result: Result) -> Iterator[str]:
    """What the numbers rest on, a sentence each."""
    estimate, speeds, recorded = result.estimate, result.speeds, result.recorded
    sizes, model = estimate.sizes, estimate.model
    all_recorded = recorded.requests == estimate.seen.requests > 0
    yield f"model {model.name}; " + (
        f"tokens as they were recorded, hits in blocks of {sizes.block_tokens:,} tokens"
        if all_recorded
        else f"{sizes.chars_per_token:g} characters a token, {TURN_TOKENS} tokens more for each message; hits in "
        f"blocks of {sizes.block_tokens:,} tokens"
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
    if recorded.requests and not recorded.on_stock:
        yield (
            "the server that recorded had components of the plugin on: its own column is not that of stock vLLM, and "
            "with `identity` on, an image of two tenants counts as two images"
        )
    if len(recorded.engines) > 1:
        yield f"the caches of {len(recorded.engines)} engines are taken as one"
    if speeds.tower_tokens_s is None or speeds.prefill_tokens_s is None:
        yield "no time of the GPU, unless --tower-tokens-s and --prefill-tokens-s say what yours computes in a second"


def limits(result: Result) -> Iterator[str]:
    """What records can't tell, a phrase each; nothing where none were read."""
    recorded = result.recorded
    if not recorded.requests:
        return
    yield "the size and format of the images' files: all are decoded as JPEG"
    yield "requests that were refused or aborted, and those whose lines had to go (MMCACHE_OBSERVE_FILE_BYTES)"
    yield "a beginning in common with requests that the engine had forgotten (MMCACHE_OBSERVE_BYTES): it counts as new"
    yield "that a conversation goes on, where its beginning was dropped or changed: it counts as a new one"
    if recorded.mistaken >= LIKELY:
        yield (
            f"which of two images with one digest of {DIGEST_BITS} bits it was: of {len(recorded.digests):,} images, "
            f"about {recorded.mistaken:,.1f} pairs are taken for repeats"
        )


def verdict(estimate: Estimate) -> str:
    """Whether it is worth it, in a sentence."""
    seen = estimate.seen
    if not seen.requests:
        return "No requests were found, so nothing can be said."
    if seen.unknown_images > LITTLE * (seen.images + seen.unknown_images):
        return (
            f"Nothing can be said: of {_count(seen.images + seen.unknown_images, 'image')} the log has "
            f"{seen.unknown_images:,} neither with their content nor with a name. Log requests as they were sent."
        )
    if not seen.images:
        return "There are no images in these requests: vllm-mmcache would do nothing for them."
    stock, ours = (estimate.done[side] for side in SIDES)
    decoding = f"decoding and processing ({cpu_s(stock) - cpu_s(ours):,.1f} s of CPU)"
    savings = {
        decoding: 1 - (ours.decoded + ours.processed) / (stock.decoded + stock.processed or 1),
        "the vision tower's work": 1 - ours.encoded_tokens / stock.encoded_tokens if stock.encoded else 0.0,
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
