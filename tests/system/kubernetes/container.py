# SPDX-License-Identifier: Apache-2.0
"""Commands under the limits of a container, on real mounts in a namespace: no daemon and no root are needed."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")

# Root read-only; /dev/shm of 64 MiB, as a container has it; /tmp and the volume are the only places to write.
# Of what the new /tmp hides, the folder of these sources comes back, read-only, and that of the test.
POD = """
repo=$1 folder=$2 volume=$3 size=$4
shift 4
exec 8<"$repo" 9<"$folder"
while read -r _ _ _ _ place flags _; do
    case $place in /proc*|/sys*|/dev*) continue ;; esac
    mount -o "remount,bind,$flags,ro" "$place"
done < /proc/self/mountinfo
mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm
mount -t tmpfs -o size=1g,mode=1777 tmp /tmp
mkdir -p "$repo" "$folder"
mount --no-canonicalize --bind /proc/self/fd/8 "$repo"
mount --no-canonicalize --bind /proc/self/fd/9 "$folder"
exec 8<&- 9<&-
mount -t tmpfs -o "size=$size,mode=2770" volume "$volume"
cd "$repo"
exec unshare --user --map-user=12345 --map-group=0 -- "$@"
"""


@functools.cache
def _may_mount() -> bool:
    command = [*UNSHARE, "sh", "-ec", "mount -t tmpfs none /dev/shm; unshare --user --map-user=12345 true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


def require_namespaces() -> None:
    """Leave a test out where the system lets no user mount anything in a namespace of its own."""
    if not _may_mount():
        pytest.skip("this system lets no user mount in a namespace of its own (user namespaces, util-linux 2.38)")


def in_namespace(script: str, folder: Path) -> list[str]:
    """The command that runs a shell script, which may mount; $1 is the folder, $2 this Python."""
    require_namespaces()
    return [*UNSHARE, "sh", "-ec", script, "sh", str(folder), sys.executable]


def in_pod(command: list[str], folder: Path, *, volume_bytes: int = 1 << 30) -> list[str]:
    """The command that runs `command` as user 12345, whom nobody knows, of group 0, in what a container has.

    `folder` is read-only there, but for its folder `volume`, an empty volume of that size.
    """
    require_namespaces()
    (folder / "volume").mkdir(exist_ok=True)
    places = [str(REPO), str(folder), str(folder / "volume"), str(volume_bytes)]
    return [*UNSHARE, "sh", "-ec", POD, "sh", *places, *command]
