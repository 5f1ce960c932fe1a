# SPDX-License-Identifier: Apache-2.0
"""Repairs what `diagnose` found: uninstalls what can't be imported, and installs the torchvision hook.

Runs in the process of the command line. It writes three files, all in this environment's site-packages: the
hook, the `.pth` file that loads it, and a stamp that makes the next run a matter of milliseconds while the
builds are the same.
"""

import importlib.util
import json
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.base.versions import installed
from vllm_mmcache.environment import hook
from vllm_mmcache.environment.checks import CHECKED, Problem, diagnose, has_cpu_torch, missing_library

HOOK_NAME = "_mmcache_torchvision_hook"
# Python prints a traceback for each line of a .pth file that raises, so a missing hook must stay silent.
PTH_LINE = f"import importlib.util as u; u.find_spec('{HOOK_NAME}') and __import__('{HOOK_NAME}')\n"


def site_packages() -> Path:
    """Where this environment's own packages are."""
    return Path(sysconfig.get_paths()["purelib"])


def hook_files() -> tuple[Path, Path]:
    """The hook and the .pth file that loads it, whether they exist or not."""
    return site_packages() / f"{HOOK_NAME}.py", site_packages() / f"{HOOK_NAME}.pth"


def install_hook(torch: str, torchvision: str) -> None:
    """Write the hook for exactly this pair of builds."""
    text = Path(hook.__file__).read_text(encoding="utf-8")
    text = text.replace('TORCH = ""', f"TORCH = {torch!r}", 1)
    text = text.replace('TORCHVISION = ""', f"TORCHVISION = {torchvision!r}", 1)
    module, pth = hook_files()
    module.write_text(text, encoding="utf-8")
    pth.write_text(PTH_LINE, encoding="utf-8")


def remove_hook() -> None:
    """Take the hook away again."""
    module, pth = hook_files()
    for path in (pth, module, Path(importlib.util.cache_from_source(str(module)))):
        path.unlink(missing_ok=True)


def stamp_path() -> Path:
    """Where the builds that were found well are written down, whether the file exists or not."""
    return site_packages() / "_mmcache_environment.json"


def fingerprint() -> dict[str, str | None]:
    """What the verdict depends on: Python, the builds, the hook in place and the one to be written."""
    module, pth = hook_files()
    return {
        "python": platform.python_version(),
        "torch": hook.installed_version("torch"),
        **{package: hook.installed_version(package) or installed(package) for package in CHECKED},
        "hook": module.read_text(encoding="utf-8") if module.exists() and pth.exists() else None,
        "hook_source": Path(hook.__file__).read_text(encoding="utf-8"),
    }


def is_stamped() -> bool:
    """True when this very set of builds was already found well."""
    try:
        return bool(json.loads(stamp_path().read_text(encoding="utf-8")) == fingerprint())
    except (OSError, ValueError):
        return False


def problems() -> list[Problem]:
    """What is broken here; packages are imported only where this set of builds is new (3 to 7 s)."""
    return missing_library() + ([] if is_stamped() else diagnose())


def check() -> None:
    """Look before vLLM is started. Raises: EnvironmentProblem that says what is broken, and what cures it.

    Beside a torch for CUDA packages are not imported: there a broken one is rare, and each look would cost seconds.
    """
    is_new = has_cpu_torch() and not is_stamped()
    refuse(missing_library() + (diagnose() if is_new else []))
    if is_new:
        with suppress(OSError):  # the next look is quick then
            stamp()


def refuse(found: Sequence[Problem]) -> None:
    """Raises: EnvironmentProblem that names every problem with its cure; nothing where there are none."""
    if found:
        raise EnvironmentProblem("; ".join(f"{problem.package}: {problem.seen}: {problem.cure}" for problem in found))


def stamp() -> None:
    """Keep the verdict that this set of builds is well. Raises: OSError."""
    stamp_path().write_text(json.dumps(fingerprint(), indent=1), encoding="utf-8")


def to_forget_written() -> list[str]:
    """What `take_back` would remove now."""
    found = ["the start-up hook for torchvision"] if any(path.exists() for path in hook_files()) else []
    return [*found, "the verdict about this environment"] if stamp_path().exists() else found


def take_back() -> list[str]:
    """Remove all that `repair` has written, and say what that was. Raises: EnvironmentProblem."""
    done = to_forget_written()
    try:
        remove_hook()
        stamp_path().unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"can't remove {error.filename}: {error.strerror}: run this as its owner") from None
    return done


def repair(force: bool = False) -> list[str]:
    """Repair this environment and say, one line each, what was done.

    Raises: EnvironmentProblem when something is broken that this can't cure, or still is after the cure.
    """
    if not force and is_stamped():
        return []
    done: list[str] = []
    try:
        hook_module, _ = hook_files()
        if hook_module.exists() and not _hook_fits(hook_module):
            remove_hook()
            done.append("removed the torchvision hook: it was for other builds of torch and torchvision")
        found = diagnose()
        for problem in found:
            if not problem.repairable:
                continue
            if problem.package == "torchvision":
                torch = hook.installed_version("torch")
                torchvision = hook.installed_version("torchvision")
                assert torch is not None
                assert torchvision is not None
                install_hook(torch, torchvision)
                done.append(
                    f"installed a start-up hook for torchvision {torchvision} beside torch {torch}: {problem.seen}"
                )
            else:
                _uninstall(problem.package)
                done.append(f"uninstalled {problem.package}: {problem.seen}")
        refuse(missing_library() + (diagnose() if found else []))
        stamp()
    except OSError as error:
        raise EnvironmentProblem(
            f"can't write in {site_packages()}: {error}: run this in a virtual environment of your own"
        ) from error
    return done


def _hook_fits(module: Path) -> bool:
    text = module.read_text(encoding="utf-8")
    return all(
        f"{name} = {hook.installed_version(package)!r}\n" in text
        for name, package in (("TORCH", "torch"), ("TORCHVISION", "torchvision"))
    )


def _uninstall(package: str) -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", package],
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode != 0:
        raise EnvironmentProblem(
            f"pip could not uninstall {package}: {' '.join(outcome.stderr.split())[-300:]}: uninstall it by hand"
        )
