# SPDX-License-Identifier: Apache-2.0
"""How the one report is shown beside its line and its gauge: where things are kept, and as JSON. API process."""

from collections.abc import Mapping

from vllm_mmcache.base import settings
from vllm_mmcache.base.status import State
from vllm_mmcache.base.store_url import redact, store_places


def storage_summary(found: Mapping[str, State]) -> list[str]:
    """A line for each thing that a server keeps, only where its component is on somewhere; without secrets."""
    chosen = settings.current()
    lines = []
    if _is_somewhere(found, "features"):
        ram = f"RAM ({chosen.feature_ram_bytes.human_readable()})" if chosen.feature_ram_bytes else ""
        directory, url = store_places(chosen.store)
        disk = f"{directory} ({chosen.store_disk_bytes.human_readable()} at most)" if directory else ""
        places = [place for place in (ram, disk, redact(url)) if place]
        until = f"; beyond RAM {chosen.store_ttl.until()} (MMCACHE_STORE_TTL)" if directory or url else ""
        lines.append(f"features are kept: {', '.join(places) or 'nowhere'}{until}")
    if _is_somewhere(found, "lazy_processing") and found["features"].state != "on":
        lines.append(f"images go to the engine with their pixels: features are {found['features']}")
    if chosen.files is not None and all(_is_somewhere(found, name) for name in ("identity", "lazy_media")):
        until = f"{chosen.files_ttl.words()} after their upload" if chosen.files_ttl else "they are deleted"
        lines.append(f"files of clients are kept: {redact(chosen.files)}, until {until}")
    if _is_somewhere(found, "observe"):
        lines.append(f"requests are recorded{f': {chosen.observe_file}' if chosen.observe_file else ''}")
    return lines


def _is_somewhere(found: Mapping[str, State], component: str) -> bool:
    return component in found and found[component].state in ("on", "mixed")
