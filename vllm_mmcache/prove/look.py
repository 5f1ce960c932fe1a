# SPDX-License-Identifier: Apache-2.0
"""What `mmcache prove` must know before the first item, from a process of its own: vLLM, the arguments, the model.

python -P -m vllm_mmcache.prove.look, with {"model", "arguments", "fixed"} as JSON on stdin; says a Seen as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_mmcache.base import distributions
from vllm_mmcache.base.errors import EnvironmentProblem, one_line
from vllm_mmcache.base.versions import vllm_version

ERROR = "mmcache prove: "  # what a line begins with that is for the user


@dataclass(frozen=True)
class Target:
    """vLLM's version, its platform and first device; what is left out of the arguments; the model's architecture."""

    vllm: str
    platform: str
    device: str
    lines: tuple[str, ...]
    is_eager: bool
    """Whether the arguments say --enforce-eager."""
    architecture: str
    """Empty without a model."""


def look(model: str, arguments: Sequence[str], fixed: Sequence[str] = ()) -> Target:
    """Look, in a process of its own. Raises: EnvironmentProblem where nothing can be checked.

    `fixed`: names of vLLM's arguments that a model of the zoo has its own of.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=json.dumps({"model": model, "arguments": list(arguments), "fixed": list(fixed)}),
        env=os.environ | {"MMCACHE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        mine = [line.removeprefix(ERROR) for line in said if line.startswith(ERROR)]
        why = mine[-1] if mine else f"vLLM can't be imported by {sys.executable}: {said[-1] if said else 'no word'}"
        raise EnvironmentProblem(why)
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    return Target(**seen | {"lines": tuple(seen["lines"])})


def see(model: str, arguments: Sequence[str], fixed: Sequence[str] = ()) -> Target:
    """In the process of its own. Raises: EnvironmentProblem."""
    from vllm.platforms import current_platform

    from vllm_mmcache.hooking.hook import TESTED_VLLM
    from vllm_mmcache.hooking.installer import version_supported
    from vllm_mmcache.lifecycle.tested_engines import platform_name
    from vllm_mmcache.prove.arguments import given, taken
    from vllm_mmcache.prove.items import UNTESTED

    version = vllm_version()
    if not version_supported(version, TESTED_VLLM) and os.environ.get(UNTESTED) != "1":
        raise EnvironmentProblem(
            f"vLLM {version} is outside {TESTED_VLLM}, which mmcache is written for: install one inside, "
            f"or set {UNTESTED}=1 to try it all the same"
        )
    found = given(arguments)
    kept, lines = taken(found, fixed)
    return Target(
        vllm=version,
        platform=platform_name(),
        device=str(current_platform.get_device_name()),
        lines=tuple(lines),
        is_eager=bool(kept.get("enforce_eager")),
        architecture=architecture_in(model, found) if model else "",
    )


def architecture_in(model: str, found: dict[str, Any]) -> str:
    """The first architecture in a model's config.json: of a directory, or of a name that Transformers can resolve.

    Raises: EnvironmentProblem.
    """
    place = Path(model).expanduser()
    try:
        if place.is_dir():
            config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        else:
            from transformers import PretrainedConfig

            config, _ = PretrainedConfig.get_config_dict(model, revision=found.get("revision"))
        return str(config["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        families = distributions.load(distributions.ZOO, "").BY_NAME if distributions.are_here() else ()
        also = f"; {model} is a family of the zoo: mmcache prove --families {model}" if model in families else ""
        raise EnvironmentProblem(
            f"the config of {model} can't be read ({one_line(error)}): give a model's directory with a "
            f"config.json, or a name that Transformers finds{also}"
        ) from None


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(see(**json.load(sys.stdin)))))
    except EnvironmentProblem as problem:
        sys.exit(ERROR + str(problem))
