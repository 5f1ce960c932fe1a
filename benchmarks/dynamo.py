# SPDX-License-Identifier: Apache-2.0
"""Dynamo's selection service, and questions as its frontend asks them. Needs `pip install '.[fleet]'`.

The service reads the KV events of replicas, and says how many blocks of a prompt it believes each of them to have.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from mmcache_tools.harness.server import Server, free_port, started

MODEL = "zoo"
START_S = 60.0


@contextlib.contextmanager
def selection(log_path: Path) -> Iterator[Server]:
    """The selection service. Raises: EnvironmentProblem where it does not start, as where it is not installed."""
    port = free_port()
    command = [sys.executable, "-m", "dynamo.select_service", "--port", str(port)]
    with started(command, port, log_path=log_path, timeout_s=START_S) as service:
        yield service


def add_replica(service: Server, number: int, events_port: int, block_tokens: int) -> None:
    """Tell the service of a replica that publishes its KV events on a port of this machine."""
    replica = {
        "worker_id": number,
        "model_name": MODEL,
        "endpoint": f"http://replica-{number}",
        "block_size": block_tokens,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{events_port}"},
    }
    post(f"{service.url}/workers", replica)


def prompt_of(tokens: Sequence[int], block_tokens: int, image_token: int, digest: int) -> dict[str, Any]:
    """A prompt with one image, as Dynamo's frontend asks the service about it.

    digest: of the image, 64 bits; its hexadecimal digits begin the uuid that the frontend gives to the image.
    """
    from dynamo.llm import compute_block_hash_for_seq

    blocks = [tokens[start : start + block_tokens] for start in range(0, len(tokens), block_tokens)]
    image = {"mm_objects": [{"mm_hash": digest, "offsets": []}]}
    hashes = compute_block_hash_for_seq(
        list(tokens), block_tokens, [image if image_token in block else None for block in blocks]
    )
    signed = [one - (1 << 64) if one >= 1 << 63 else one for one in hashes]
    return {"model_name": MODEL, "block_hashes": signed, "sequence_hashes": signed, "isl_tokens": len(tokens)}


def uuid_of(digest: int) -> str:
    """The uuid that Dynamo's frontend gives to the image of this digest."""
    return f"{digest:016x}{'0' * 48}"


def overlaps(service: Server, prompt: dict[str, Any]) -> dict[int, int]:
    """By replica, how many blocks of the prompt the service believes to be there."""
    found: Collection[dict[str, int]] = post(f"{service.url}/overlap_scores", prompt)["workers"]
    return {one["worker_id"]: one["device_blocks"] for one in found}


def chosen(service: Server, prompt: dict[str, Any]) -> int:
    """The replica that the service would send the prompt to."""
    return int(post(f"{service.url}/select", prompt)["worker_id"])


def post(url: str, body: dict[str, Any]) -> Any:
    """What a server answers, as JSON. Raises: httpx.HTTPStatusError."""
    return httpx.post(url, json=body, timeout=60).raise_for_status().json()
