# SPDX-License-Identifier: Apache-2.0
"""The bounds that this benchmark is for, from the results of its parts; a part that is not there says nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Found = Mapping[str, Any]  # by part, as measure.py writes it

TIERS = {"disk": "a directory", "valkey": "Valkey"}


class Target(NamedTuple):
    """A ratio and its bound."""

    what: str
    value: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit

    @property
    def shown(self) -> str:
        return f"{self.value:.3f}"


def targets(found: Found) -> list[Target]:
    """All that the results say something about, in the order of the page."""
    parts = {name: part["found"] for name, part in found.items() if "left_out" not in part["found"]}
    return [Target(*one) for make in MADE for one in make(parts)]


def rotation(parts: Found) -> Iterator[tuple[str, float, float]]:
    if ours := parts.get("rotation-mmcache"):
        again = ours["again"]
        yield ("a picture that fell out of the processor cache, by one that is in it, same server",
               again["median_s"] / ours["held"]["median_s"], 1.05)  # fmt: skip
        if all_held := parts.get("rotation-mmcache-all"):
            yield ("the same, by a server whose processor cache holds all",
                   again["median_s"] / all_held["again"]["median_s"], 1.05)  # fmt: skip
        if stock := parts.get("rotation-stock"):
            yield ("the same: CPU time of the API server, by stock's",
                   again["api_server_cpu_s"] / stock["again"]["api_server_cpu_s"], 0.25)  # fmt: skip
        yield (
            "the same: bytes to the engine, by the encoded picture's",
            again["sent_bytes"] / ours["encoded_bytes"],
            1.0,
        )


def restart(parts: Found) -> Iterator[tuple[str, float, float]]:
    for tier, place in TIERS.items():
        if ours := parts.get(f"restart-{tier}-mmcache"):
            yield (f"first question after a restart, {place}, by the next one (pixels and features in RAM, no KV)",
                   ours["first"]["median_s"] / ours["again"]["median_s"], 1.15)  # fmt: skip


def many(parts: Found) -> Iterator[tuple[str, float, float]]:
    for part, made in (("many", ""), ("many-small", ", made small for the tower")):
        if both := parts.get(part):
            for what, name, limit in (("many", "at_once", 0.75), ("one", "alone", 1.05)):
                yield (f"unknown pictures{made}, {what} at once: time until the last first token, by stock's",
                       both["mmcache"][name]["median_s"] / both["stock"][name]["median_s"], limit)  # fmt: skip


def video(parts: Found) -> Iterator[tuple[str, float, float]]:
    sides = [parts.get(f"video-{side}") for side in ("stock", "mmcache")]
    if all(sides):
        for what, name, limit in (("from the second time", "again", 0.15), ("after a restart", "restarted", 0.2)):
            stock, ours = (side[name]["median_s"] for side in sides if side)
            yield f"a video of 64 frames, {what}, by stock's", ours / stock, limit


MADE: tuple[Callable[[Found], Iterator[tuple[str, float, float]]], ...] = (rotation, restart, many, video)
