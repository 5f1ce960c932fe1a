# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` on a machine without a network: the Python packages that it lacks go there in pieces.

There, with the interpreter that is to run it:   python -m scripts.gpu_check.ship look > facts.json
Here, with a network:                            python -m scripts.gpu_check.ship pack --facts facts.json
Here, a command that sends and runs:             python -m scripts.gpu_check.ship send --through scripts/my-send
  which for each piece has there:                python -m scripts.gpu_check.ship receive .artifacts/ship/01
There, as often as it needs:   python -m scripts.gpu_check.ship run --commit abc1234 --out results -- --seconds 500
Here, what came back:                            python -m scripts.gpu_check.ship record results/nvidia-h100.json

There needs this checkout's files, Python 3.11 or later with Python.h, glibc 2.28, a C compiler and a driver; look,
receive and run are of the standard library. my-send is called with a folder and a command, with ssh for example: `scp
-r "$1" gpu:vllm-mmcache/.artifacts/ship/ && ssh gpu "cd vllm-mmcache && $2"`. With a torch that fits there it is 7
pieces, else over 30. Exit codes: 0 done, 1 a piece is damaged or can't be had, 2 pieces are missing; of run, that of
gpu-check.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from scripts.gpu_check.found import REPO, project, seen_of_gpu

SENT = Path(".artifacts/ship")
ARRIVED = Path(".artifacts/arrived")
DIGESTS = "digests.json"  # of the pieces, by name; beside each of them
STORE, ENVIRONMENT = ARRIVED / "pieces", ARRIVED / "environment"
MIB = 1 << 20
MODULE = "scripts.gpu_check.ship"
CHECK = "scripts.gpu_check.run"


def main() -> int:
    options = parse()
    os.chdir(REPO)
    code: int = options.verb(options)
    return code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="verb")
    add = {}
    for verb in (look, pack, send, receive, run, record):
        one = verbs.add_parser(verb.__name__, help=str(verb.__doc__).partition(".")[0], description=verb.__doc__)
        one.set_defaults(verb=verb)
        add[verb] = one.add_argument
    add[pack]("--facts", type=Path, help="what look said there; default: this machine")
    add[pack]("--require", nargs="+", default=["vllm==0.33.0"], help="beside what the plugin needs")
    add[pack]("--instead", nargs="+", default=[], help="for these names, whatever others ask: `torch`, `certifi`")
    add[pack]("--piece-mib", type=float, default=56, help="no piece is larger")
    add[pack]("--whole", action="store_true", help="keep the files that the checks don't need on 9.0 GPUs")
    add[send]("--through", required=True, help="called with a folder, and what to run there when it has arrived")
    add[send]("--python", default="python3", help="the interpreter there")
    add[send]("--only", nargs="+", help="these pieces")
    add[receive]("folders", type=Path, nargs="+")
    add[run]("--commit", required=True, help="of these files, for the result")
    add[run]("--out", type=Path, help="copy results and log here, too")
    add[run]("--module", default=CHECK, help="another command that is to run there, such as scripts.gpu_check.timings")
    add[run]("arguments", nargs="*", help="after --: the command's own")
    add[record]("result", type=Path)
    return parser.parse_args()


def look(options: argparse.Namespace) -> int:
    """Say as JSON what is there: Python, libc, packages, GPU, and what Triton needs to compile its launchers."""
    print(json.dumps(facts(), indent=1))
    return 0


def facts() -> dict[str, Any]:
    """This machine and interpreter. libc: major and minor version."""
    libc = platform.libc_ver()[1].split(".")
    has_compiler = bool(shutil.which("cc") or shutil.which("gcc"))
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
        "libc": [int(part) for part in libc[:2]] if len(libc) > 1 else [2, 17],
        "gpu": seen_of_gpu(),
        "can_compile": has_compiler and (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "packages": {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()},
    }


def pack(options: argparse.Namespace) -> int:
    """Download what the other machine lacks, and cut it into pieces under .artifacts/ship, a folder for each."""
    from scripts.gpu_check import wheels

    there = json.loads(options.facts.read_text()) if options.facts else facts()
    with tempfile.TemporaryDirectory(dir=made(SENT.parent)) as work:
        downloads, environment = made(Path(work) / "wheels"), made(Path(work) / "environment")
        try:
            needed = wheels.download([*options.require, *project()["dependencies"]], there, options.instead, downloads)
            if not needed:
                print("nothing is lacking there; run gpu-check itself")
                return 0
            wheels.install(needed, there, environment)
        except wheels.CannotHave as error:
            print(f"error: {error}\n--instead names a requirement that holds in place of others'", file=sys.stderr)
            return 1
        for path in sorted(needed, key=lambda path: path.stat().st_size):
            print(f"{path.stat().st_size / MIB:8.1f} MiB  {path.name}")
        for name, why in ({} if options.whole else wheels.prune(environment)).items():
            print(f"left out: {name}: {why}")
        number = split(environment, SENT, int(options.piece_mib * MIB))
    print(f"{len(needed)} wheels in {number} pieces; for each, there: {receiving('python3', SENT / '01')}")
    if not there["can_compile"]:
        print("There is no C compiler there, or no Python.h: Triton can't compile its launchers, so V2 won't start.")
    return 0


def send(options: argparse.Namespace) -> int:
    """Send every piece, one call each, through a command: it gets the folder and a command line to run there."""
    for folder in sorted(SENT.glob("*/")):
        if not options.only or folder.name in options.only:
            command = [*shlex.split(options.through), str(folder), receiving(options.python, folder)]
            code = subprocess.run(command, check=False).returncode
            if code not in (0, 2):
                print(f"error: piece {folder.name} did not arrive (exit code {code})", file=sys.stderr)
                return 1
    return code


def receiving(python: str, folder: Path) -> str:
    return f"{python} -m {MODULE} receive {folder}"


def receive(options: argparse.Namespace) -> int:
    """Keep the pieces of these folders; with the last one, unpack. The same piece again changes nothing."""
    for folder in options.folders:
        if not take(folder, STORE):
            print(f"error: piece {folder.name} is damaged: its digest is another; send it again", file=sys.stderr)
            return 1
    if left := missing(STORE):
        print(f"missing: {' '.join(left)}")
        return 2
    join(STORE, ENVIRONMENT)
    print(f"unpacked: {ENVIRONMENT}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Run gpu-check, or another command, with what arrived before this interpreter's own packages."""
    environment, log = REPO / ENVIRONMENT, REPO / ARRIVED / "gpu_check.log"
    if not environment.is_dir():
        print(f"error: pieces are missing: {' '.join(missing(STORE))}", file=sys.stderr)
        return 2
    environ = os.environ | {"BENCH_COMMIT": options.commit}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(environment), os.environ.get("PYTHONPATH")]))
    environ["PATH"] = os.pathsep.join([str(environment / "bin"), os.environ.get("PATH", "")])
    own = ["--log", str(log)] if options.module == CHECK else []
    command = [sys.executable, "-m", options.module, *own, *options.arguments]
    code = subprocess.run(command, env=environ, check=False).returncode
    if options.out:
        for path in [*(Path(__file__).parent / "results").glob("*.json"), *filter(Path.exists, [log])]:
            shutil.copy(path, made(options.out))
    return code


def record(options: argparse.Namespace) -> int:
    """Put a result that came back beside the others, and what it proves into the plugin's table."""
    from scripts.gpu_check import results

    result = json.loads(options.result.read_text())
    path = results.path_of(result["machine"])
    results.save(path, result)
    results.record(result, path)
    return 0


def split(folder: Path, into: Path, piece_bytes: int) -> int:
    """Pack a folder into pieces of at most so many bytes, in place of what `into` held. Returns their number.

    A piece lies in a folder of its own (`01`, `02`, ...) beside the SHA-256 of all, so that any one of them can be sent
    by itself, in any order, and again. What arrives is kept in a store under its digest.
    """
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    whole, digests = into / "whole", dict[str, str]()
    # Most of it are libraries whose GPU code is compressed already: higher levels take long and gain little.
    with tarfile.open(whole, "w:gz", compresslevel=3) as archive:
        archive.add(folder, ".")
    with whole.open("rb") as file:
        while part := file.read(piece_bytes):
            place = into / f"{len(digests) + 1:02}"
            place.mkdir()
            (place / "piece").write_bytes(part)
            digests[place.name] = hashlib.sha256(part).hexdigest()
    whole.unlink()
    for name in digests:
        (into / name / DIGESTS).write_text(json.dumps(digests))
    return len(digests)


def take(sent: Path, store: Path) -> bool:
    """Keep a piece; the same again changes nothing. Whether it is what was sent."""
    digest = digest_of(sent / "piece")
    if digest not in json.loads((sent / DIGESTS).read_text()).values():
        return False
    shutil.copyfile(sent / DIGESTS, made(store) / DIGESTS)
    shutil.copyfile(sent / "piece", store / digest)
    return True


def missing(store: Path) -> list[str]:
    """The names of the pieces that are not there, or are damaged there."""
    if not (store / DIGESTS).is_file():
        return ["all"]
    digests = json.loads((store / DIGESTS).read_text())
    return [name for name, digest in digests.items() if digest_of(store / digest) != digest]


def join(store: Path, into: Path) -> None:
    """Unpack the folder that was sent, of which nothing is missing, in place of one that is there."""
    whole, unpacking = store / "whole", into.with_name(into.name + ".unpacking")
    with whole.open("wb") as file:
        for digest in json.loads((store / DIGESTS).read_text()).values():
            file.write((store / digest).read_bytes())
    shutil.rmtree(unpacking, ignore_errors=True)
    with tarfile.open(whole) as archive:
        archive.extractall(unpacking, filter="data")
    whole.unlink()
    shutil.rmtree(into, ignore_errors=True)
    unpacking.rename(into)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file; empty without one."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
