# SPDX-License-Identifier: Apache-2.0
"""A record as text for people: one line in a list, and all of it. Plain text without control characters.

Command line.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from vllm_mmcache.components.observe.record.schema import Image, Record, Segment
from vllm_mmcache.components.observe.record.summary import summary

LIST_HEAD = f"{'time (UTC)':<9} {'reused':>6} {'of tokens':>9} {'images':>6}  {'mostly':<17} {'record':<15} request"
BAR_CHARS = 60
REUSED, PARTLY, COMPUTED = "#", "+", "."


def list_line(record: Record) -> str:
    """One line that LIST_HEAD is the head of."""
    facts = summary(record)
    at = datetime.fromtimestamp(record.time_s, UTC).strftime("%H:%M:%S")
    why = words(facts["reason"]) if facts["reason"] else "all reused"
    images = sum(facts["images"].values())
    names = f"{record.id:<15} {record.request_id}".rstrip()
    return plain(f"{at:<10} {share(record):>5} {record.prompt_tokens:>9} {images:>6}  {why:<17} {names}")


def full(record: Record) -> Iterator[str]:
    """The lines that tell all of one record."""
    at = datetime.fromtimestamp(record.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield plain(f"{record.id}  {at}  {record.model}  {record.server}")
    if record.request_id:
        yield plain(f"request {record.request_id}")
    yield f"{record.reused_tokens} of {record.prompt_tokens} prompt tokens reused ({share(record)})"
    yield f"[{bar(record)}]  {REUSED} reused, {PARTLY} in part, {COMPUTED} computed"
    if nearest := record.nearest:
        yield plain(
            f"nearest earlier request: {nearest.id}, {nearest.age_s:.1f} s before, "
            f"the same for {nearest.common_tokens} tokens"
        )
    if record.salt or record.lora:
        yield plain(f"salt {record.salt or 'none'}, LoRA {record.lora or 'none'}")
    for group in record.groups:
        veto = ", vetoed" if group.vetoed else ""
        yield plain(f"group {group.index} {words(group.kind)}: hit {group.hit_tokens} tokens{veto}")
    yield ""
    yield f"{'from':>7} {'tokens':>7} {'reused':>7}  segment"
    for segment in record.segments:
        yield plain(f"{segment.start:>7} {segment.tokens:>7} {segment.reused_tokens:>7}  {title(segment)}")
    yield ""
    for miss in record.misses:
        yield plain(f"{words(miss.reason)}: {miss.tokens} tokens from {miss.start}: {miss.text}")
    if not record.misses:
        yield "everything was reused"


def bar(record: Record) -> str:
    """The prompt in BAR_CHARS characters, of which each shows an equal share of the prompt."""
    width = max(record.prompt_tokens, 1) / BAR_CHARS
    cells = []
    for cell in range(BAR_CHARS):
        start, end = cell * width, (cell + 1) * width
        missed = sum(max(0.0, min(end, m.start + m.tokens) - max(start, m.start)) for m in record.misses)
        cells.append(REUSED if missed < 0.01 * width else COMPUTED if missed > 0.99 * width else PARTLY)
    return "".join(cells)


def title(segment: Segment) -> str:
    """What a segment is, and for an image what happened to it."""
    where = "" if segment.turn is None else f" (turn {segment.turn})"
    if image := segment.image:
        return f"image {image.index}{where}: {layers(image)}"
    return f"{segment.role if segment.kind == 'message' and segment.role else segment.kind}{where}"


def layers(image: Image) -> str:
    """An image's digest, its size in pixels, and what each layer did with it, as far as that is known."""
    size = f"{image.width}x{image.height}, " if image.width else ""
    told = {"body": image.body, "decode": image.decode, "processor": image.processor, "features": image.features}
    said = ", ".join(f"{name} {words(value)}" for name, value in told.items() if value != "unknown")
    return f"{image.digest}, {size}{said or 'nothing known of its layers'}"


def share(record: Record) -> str:
    """The reused part of the prompt in whole percent, rounded down; - for an empty prompt."""
    return f"{100 * record.reused_tokens // record.prompt_tokens}%" if record.prompt_tokens else "-"


def words(name: str) -> str:
    """A name of the schema as people read it."""
    return name.replace("tower_faster", "tower: faster").replace("_", " ")


def plain(text: str) -> str:
    """`text` without a character that a terminal could obey."""
    return "".join(c if c.isprintable() else "?" for c in text)
