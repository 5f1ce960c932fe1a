# SPDX-License-Identifier: Apache-2.0
"""Where each room that touches the engine was exercised; elsewhere it is off unless its setting says on.

proven.json has a row for each platform and version of vLLM. `make gpu-check` adds one (`--record`) for the rooms that
passed, and names its result as the evidence; a test compares the two. Groups that are no engine room work everywhere.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ENGINE_ROOMS = ("block_keys", "image_spans", "resumed_images", "image_checkpoints", "metrics", "features")

FILE = Path(__file__).with_name("proven.json")


def rows() -> list[dict[str, Any]]:
    """Each row: platform, vllm, rooms, and evidence, a command or a file of this repository."""
    found: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def platforms(table: Iterable[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Of each engine room, the platforms that it was proven on with some version of vLLM."""
    seen = [(str(row["platform"]), row["rooms"]) for row in table]
    return {room: frozenset(platform for platform, rooms in seen if room in rooms) for room in ENGINE_ROOMS}


PROVEN_ON = platforms(rows())
