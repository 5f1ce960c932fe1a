# SPDX-License-Identifier: Apache-2.0
"""A rank in a process of its own, which copies as it is told through a pipe. Imports no vLLM."""

import threading
from multiprocessing.connection import Connection

import torch

from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.message import SlotRef
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies


def tensor(place: SlotRef, features: bytes | memoryview) -> torch.Tensor:
    """Features as the tower gives them. Shapes: (num_tokens, width)."""
    flat = torch.frombuffer(bytearray(features), dtype=getattr(torch, place.shape.dtype))
    return flat.view(place.shape.num_tokens, place.shape.width)


def raw(features: torch.Tensor) -> bytes:
    """All bits of features."""
    return features.contiguous().view(torch.uint8).numpy().tobytes()


def serve(address: str, row: int, pipe: Connection) -> None:
    """Until it is told to end, or killed."""
    arena = Arena.open(address)
    copies = DeviceCopies(arena, row, torch.device("cpu"))
    while True:
        match pipe.recv():
            case "load", places:
                pipe.send([raw(features) for features in copies.load(places)])
            case "save", place, features:
                copies.save(place, None if features is None else tensor(place, features))
                pipe.send(place.number)
            case "hang", place, features:  # in the middle of a copy
                hung = threading.Event()

                def begin(place: SlotRef = place, features: bytes = features, hung: threading.Event = hung) -> None:
                    half = len(features) // 2
                    arena.buffer(place.offset, half)[:] = features[:half]
                    hung.set()
                    threading.Event().wait()

                copies.then(begin)
                hung.wait()
                pipe.send(place.number)
            case "know", generation, fingerprint:
                arena.board[row]["fingerprint"] = fingerprint.encode()
                arena.board[row]["generation"] = generation
                pipe.send(generation)
            case ("end",):
                copies.close()
                pipe.send("ended")
                return
