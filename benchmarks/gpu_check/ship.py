# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` on a machine without a network: the Python packages that it lacks go there in pieces.

There, with the interpreter that is to run it:   python -m benchmarks.gpu_check.ship look > facts.json
Here, with a network:                            python -m benchmarks.gpu_check.ship pack --facts facts.json
Here, a command that sends and runs:             python -m benchmarks.gpu_check.ship send --through scripts/my-send
  which for each piece has there:                python -m benchmarks.gpu_check.ship receive .artifacts/ship/01
There, as often as it needs:   python -m benchmarks.gpu_check.ship run --commit abc1234 --out results -- --seconds 500
Here, what came back:                            python -m benchmarks.gpu_check.ship record results/nvidia-h100.json

There needs this checkout's files, Python 3.11 or later with Python.h, glibc 2.28, a C compiler and a driver; look,
receive and run are of the standard library. my-send is called with a folder and a command, with ssh for example: `scp
-r "$1" gpu:vllm-mmcache/.artifacts/ship/ && ssh gpu "cd vllm-mmcache && $2"`. With a torch that fits there it is 7
pieces, else over 30. Exit codes: 0 done, 1 a piece is damaged or can't be had, 2 pieces are missing; of run, that of
gpu-check.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import pieces
from benchmarks.gpu_check.found import REPO, project

SENT = Path(".artifacts/ship")
ARRIVED = Path(".artifacts/arrived")
MODULE = "benchmarks.gpu_check.ship"


def main() -> int:
    options = parse()
    os.chdir(REPO)
    code: int = options.verb(options)
    return code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="verb")

    def add(name: str, verb: Any) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=verb.__doc__.partition(".")[0], description=verb.__doc__)
        one.set_defaults(verb=verb)
        return one

    add("look", look)
    one = add("pack", pack)
    one.add_argument("--facts", type=Path, help="what look said there; default: this machine")
    one.add_argument("--require", nargs="+", default=["vllm==0.33.0"], help="beside what the plugin needs")
    one.add_argument(
        "--instead", nargs="+", default=[], help="for these names, whatever others ask: `torch`, `certifi`"
    )
    one.add_argument("--piece-mib", type=float, default=56, help="no piece is larger")
    one.add_argument("--whole", action="store_true", help="keep the files that the checks don't need on 9.0 GPUs")
    one = add("send", send)
    one.add_argument("--through", required=True, help="called with a folder, and what to run there when it has arrived")
    one.add_argument("--python", default="python3", help="the interpreter there")
    one.add_argument("--only", nargs="+", help="these pieces")
    one = add("receive", receive)
    one.add_argument("folders", type=Path, nargs="+")
    one = add("run", run)
    one.add_argument("--commit", required=True, help="of these files, for the result")
    one.add_argument("--out", type=Path, help="copy results and log here, too")
    one.add_argument("arguments", nargs="*", help="after --: gpu-check's own")
    one = add("record", record)
    one.add_argument("result", type=Path)
    return parser.parse_args()


def look(options: argparse.Namespace) -> int:
    """Say as JSON what is there: Python, libc, packages, GPU, and what Triton needs to compile its launchers."""
    print(json.dumps(facts(), indent=1))
    return 0


def facts() -> dict[str, Any]:
    """This machine and interpreter. libc: major and minor version."""
    libc = platform.libc_ver()[1].split(".")
    query = "--query-gpu=name,compute_cap,driver_version,memory.total"
    gpu = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
        "libc": [int(part) for part in libc[:2]] if len(libc) > 1 else [2, 17],
        "gpu": gpu.stdout.strip() if gpu else None,
        "compiler": shutil.which("cc") or shutil.which("gcc"),
        "python_headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "packages": {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()},
    }


def pack(options: argparse.Namespace) -> int:
    """Download what the other machine lacks, and cut it into pieces under .artifacts/ship, a folder for each."""
    from benchmarks.gpu_check import wheels
    from benchmarks.machine import commit

    there = json.loads(options.facts.read_text()) if options.facts else facts()
    with tempfile.TemporaryDirectory(dir=made(SENT.parent)) as work:
        downloads, environment = made(Path(work) / "wheels"), Path(work) / "environment"
        try:
            needed = wheels.download([*options.require, *project()["dependencies"]], there, options.instead, downloads)
            if not needed:
                print("nothing is lacking there; run gpu-check itself")
                return 0
            wheels.install(needed, there, made(environment))
        except wheels.CannotHave as error:
            print(f"error: {error}\n--instead names a requirement that holds in place of others'", file=sys.stderr)
            return 1
        sizes = {path.name: path.stat().st_size for path in needed}
        left_out = {} if options.whole else wheels.prune(environment)
        about = {"commit": commit(), "python": there["python"], "wheels": sizes, "files_left_out": left_out}
        manifest = pieces.split(environment, SENT, int(options.piece_mib * pieces.MIB), about)
    for name, size in sorted(sizes.items(), key=lambda one: -one[1])[:10]:
        print(f"{size / pieces.MIB:8.1f} MiB  {name}")
    print("".join(f"left out: {name}: {why}\n" for name, why in left_out.items()), end="")
    mib = sum(piece["bytes"] for piece in manifest["pieces"]) / pieces.MIB
    print(f"{len(sizes)} wheels, the largest shown; {mib:.1f} MiB in {len(manifest['pieces'])} pieces in {SENT}")
    print(f"for each, there: {receiving('python3', SENT / '01')}")
    if not (there["compiler"] and there["python_headers"]):
        print("There is no C compiler there, or no Python.h: Triton can't compile its launchers, so V2 won't start.")
    return 0


def send(options: argparse.Namespace) -> int:
    """Send every piece, one call each, through a command: it gets the folder and a command line to run there."""
    for folder in sorted(path for path in SENT.iterdir() if path.is_dir()):
        if options.only and folder.name not in options.only:
            continue
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
    store = ARRIVED / "pieces"
    try:
        for folder in options.folders:
            manifest = pieces.take(folder, store)
        left = pieces.missing(manifest, store)
        print(f"{len(manifest['pieces']) - len(left)} of {len(manifest['pieces'])} pieces are here")
        if left:
            print(f"missing: {' '.join(left)}")
            return 2
        pieces.join(manifest, store, ARRIVED / "environment")
    except pieces.Damaged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"unpacked: {ARRIVED / 'environment'}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Run gpu-check with what arrived before this interpreter's own packages."""
    environment = REPO / ARRIVED / "environment"
    if not environment.is_dir():
        manifest = ARRIVED / "pieces" / pieces.MANIFEST
        left = pieces.missing(json.loads(manifest.read_text()), manifest.parent) if manifest.is_file() else ["all"]
        print(f"error: pieces are missing: {' '.join(left)}", file=sys.stderr)
        return 2
    environ = os.environ | {"BENCH_COMMIT": options.commit}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(environment), os.environ.get("PYTHONPATH")]))
    environ["PATH"] = os.pathsep.join([str(environment / "bin"), os.environ.get("PATH", "")])
    log = made(ARRIVED) / "gpu_check.log"
    command = [sys.executable, "-m", "benchmarks.gpu_check.run", "--log", str(log.resolve()), *options.arguments]
    code = subprocess.run(command, env=environ, check=False).returncode
    if options.out:
        results = (REPO / "benchmarks" / "gpu_check" / "results").glob("*.json")
        for path in [*results, *ARRIVED.glob("gpu_check.log")]:
            shutil.copy(path, made(options.out))
    return code


def record(options: argparse.Namespace) -> int:
    """Put a result that came back beside the others, and what it proves into the plugin's table."""
    from benchmarks.gpu_check import results

    result = json.loads(options.result.read_text())
    path = results.path_of(result["machine"])
    results.save(path, result)
    for runner, rooms in results.record(result, path).items():
        print(f"proven on {result['platform']}, model runner {runner}: {', '.join(rooms) or 'nothing'}")
    return 0


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
