# SPDX-License-Identifier: Apache-2.0
"""The real servers of the benchmarks: a model of the zoo under `mmcache serve`, stock or with the plugin."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vllm_mmcache.demo.server import CPU_ARGS, Server, serve

MODEL = "zoo"  # the name that it is served under


@contextlib.contextmanager
def zoo_server(
    model: Path, side: str, *, images: int, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve `model` as one of SIDES until the block ends, with room for `images` in a prompt; logs to model.SIDE.log.

    What is given in `args` wins over the benchmarks' own arguments.
    """
    limits = json.dumps({"image": images})
    with serve(
        model,
        log_path=model.with_name(f"{model.name}.{side}.log"),
        env={"MMCACHE_DISABLE": "1" if side == "stock" else "0", **(env or {})},
        args=(*CPU_ARGS, "--served-model-name", MODEL, "--limit-mm-per-prompt", limits, *args),
    ) as server:
        yield server
