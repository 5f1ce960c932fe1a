# SPDX-License-Identifier: Apache-2.0
"""Does what docker/cpu.Dockerfile says in a clean directory, for machines without a container daemon.

    python scripts/docker_steps.py [--list] [DIRECTORY]

COPY takes what .dockerignore lets through; RUN steps are run by sh with the image's absolute paths below DIRECTORY;
steps that need root are named and left out. At the end the ENTRYPOINT serves a tiny model until the HEALTHCHECK says
that it is well. About 4 minutes, most of it the installation of vLLM. Exit code 1 if a step fails.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mmcache_tools.harness.server import free_port

REPO = Path(__file__).parents[1]
DOCKERFILE = REPO / "docker" / "cpu.Dockerfile"
IMAGE_PATHS = ("/opt/mmcache", "/var/lib/mmcache")
NEEDS_ROOT = ("apt-get", "useradd")
WELL_WITHIN_S = 300


def instructions(text: str) -> list[tuple[str, str]]:
    """Keyword and argument of each instruction, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def context() -> list[str]:
    """The files that a build gets: tracked or new ones that .dockerignore lets through.

    Its lines are `*`, then `!path` for what goes through and `path` for what of that does not.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    lines = [line for line in (REPO / ".dockerignore").read_text().splitlines() if not line.startswith(("#", "*"))]

    def is_named(file: str, mark: str) -> bool:
        return any(f"{mark}{file}/".startswith(f"{line}/") for line in lines)

    return [file for file in listed if is_named(file, "!") and not is_named(file, "")]


class Build:
    """The state of a build: environment and working directory, with the image's root at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.directory = root
        self.health: list[str] = []
        self.entrypoint: list[str] = []

    def place(self, text: str) -> str:
        """`text` with the image's own paths below the root."""
        for path in IMAGE_PATHS:
            text = re.sub(rf"(?<![\w/.]){re.escape(path)}", f"{self.root}{path}", text)
        return text

    def do(self, word: str, rest: str) -> None:
        """One instruction. Raises: CalledProcessError; ValueError for one that this does not know."""
        if word == "RUN":
            if any(need in rest for need in NEEDS_ROOT):
                print(f"left out, needs root: {' '.join(rest.split())}")
                return
            print(f"RUN {rest}", flush=True)
            subprocess.run(["sh", "-ec", self.place(rest)], cwd=self.directory, env=self.environ, check=True)
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                self.environ[name] = self.place(value).replace("$PATH", self.environ["PATH"])
        elif word == "WORKDIR":
            self.directory = Path(self.place(rest))
            self.directory.mkdir(parents=True, exist_ok=True)
        elif (word, rest) == ("COPY", ". ."):
            for file in context():
                (self.directory / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / file, self.directory / file)
        elif word == "HEALTHCHECK":
            self.health = json.loads(rest.partition("CMD")[2])
        elif word == "ENTRYPOINT":
            self.entrypoint = json.loads(rest)
        elif word not in ("FROM", "ARG", "USER", "VOLUME", "EXPOSE"):
            raise ValueError(f"docker_steps.py does not know {word} {rest}")

    def serve(self) -> None:
        """Serve a tiny model by the entry point until the health check passes. Raises: RuntimeError."""
        port = str(free_port())
        environ = self.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        model = str(self.root / "model")
        where: dict[str, Any] = {"cwd": self.directory, "env": environ}
        # Popen looks programs up in our own PATH, not in the one it hands on.
        entry = [shutil.which(self.entrypoint[0], path=environ["PATH"]) or "", *self.entrypoint[1:]]
        zoo = [sys.executable, "-m", "vllm_mmcache.cli", "zoo"]  # this clone's: the image has no tools
        subprocess.run([*zoo, "build", "qwen3-vl", model], cwd=REPO, check=True)
        command = [*entry, model, "--port", port, "--enforce-eager", "--max-model-len", "1024"]
        python = shutil.which(self.health[0], path=environ["PATH"]) or ""
        check = [python, *(part.replace(":8000", f":{port}") for part in self.health[1:])]
        server = subprocess.Popen(command, **where)
        try:
            end = time.monotonic() + WELL_WITHIN_S
            while subprocess.run(check, check=False, stderr=subprocess.DEVNULL, **where).returncode:
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server is not well: exit code {server.poll()}")
                time.sleep(2)
            print("the health check passes")
        finally:
            server.terminate()
            server.wait(60)


def main() -> int:
    """Do the steps; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the steps and the files of the build context only")
    parser.add_argument("directory", nargs="?", type=Path, help="an empty directory; default: a temporary one")
    options = parser.parse_args()
    steps = instructions(DOCKERFILE.read_text())
    if options.list:
        print("\n".join(f"{word} {' '.join(rest.split())}" for word, rest in steps))
        print("\n".join(context()))
        return 0
    with tempfile.TemporaryDirectory() as name:
        build = Build((options.directory or Path(name)).resolve())
        try:
            for word, rest in steps:
                build.do(word, rest)
            build.serve()
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
