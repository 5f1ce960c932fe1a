# SPDX-License-Identifier: Apache-2.0
"""Walks the first minutes of a newcomer and times them: clone, install, demo, a server, a question, uninstall.

    python scripts/first_minutes.py [--write]      # the table, into docs/first_minutes.md

In an empty directory, with an empty home, and of the environment PATH and pip's variables alone. Each step must end
well and print what it should. About 5 minutes and 5 GB. Exit code 1 if a step fails.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "first_minutes.md"
TABLE = re.compile(r"(?<=<!-- walked by scripts/first_minutes.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEAD = "| step | seconds | what it prints, among others |\n|---|---|---|\n"
READY = (" in force: ", "startup complete")
WELL_WITHIN_S = 300
ASK = re.compile(r"```python\n(.*?)```", re.DOTALL)  # ask.py, in the page
# What is run below the clone, and what it must print, as a regular expression.
STEPS = [
    ("git clone URL vllm-mmcache && cd vllm-mmcache", r""),
    ("make venv", r"venv: installed \d+ packages"),
    ("make demo", r"all \d+ answers equal the cold run, token by token"),
    ("source .venv/bin/activate", r""),
    ("mmcache zoo build qwen3-vl tiny", r"tiny"),
    ("mmcache doctor tiny", r"no findings"),
    ("mmcache serve tiny --observe --enforce-eager --max-model-len 1024", r"mmcache \S+ in force: \w+"),
    ("python ask.py", r"cached_tokens [1-9]\d*"),
    ("mmcache explain", r"chatcmpl-\S+"),
    ("mmcache store ls", r"[1-9]\d* packages, \d+ bytes"),
    ("mmcache uninstall", r"removed [1-9]\d* files"),
]


class Walk:
    """The state of a walk: directories, environment, and the server once it runs."""

    def __init__(self, root: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("PIP_")}
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "MMCACHE_ADMIN_KEY": "a-key-of-this-walk", "COLUMNS": "200"}
        self.clone, self.log = root / "vllm-mmcache", root / "server.log"
        self.environ = kept | settings | {"HOME": str(root / "home")}
        self.server: subprocess.Popen[bytes] | None = None
        (root / "home").mkdir()

    def run(self, command: str) -> str:
        """What a step printed. Raises: RuntimeError."""
        if command.startswith("git clone"):
            command = f"cd .. && git clone --quiet {REPO} {self.clone}"
            self.clone.mkdir()
        elif command.startswith("source"):
            self.environ["PATH"] = f"{self.clone}/.venv/bin:{self.environ['PATH']}"
            (self.clone / "ask.py").write_text(ASK.findall(PAGE.read_text())[0])
        elif command.startswith("mmcache serve"):
            return self.serve(["bash", "-c", f"exec {command}"])
        elif command == "mmcache uninstall":
            self.end()
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=self.clone, env=self.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def serve(self, command: list[str]) -> str:
        """Start the server; it is ready when it has said what is in force, and that it is up."""
        with self.log.open("wb") as file:
            self.server = subprocess.Popen(command, cwd=self.clone, env=self.environ, stdout=file, stderr=file)
        end = time.monotonic() + WELL_WITHIN_S
        while not all(sign in self.log.read_text() for sign in READY):
            if self.server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[-1]}: not ready\n{self.log.read_text()[-3000:]}")
            time.sleep(0.5)
        return self.log.read_text()

    def end(self) -> None:
        """Stop the server, if one runs."""
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGINT)
            self.server.wait(60)


def walk(root: Path) -> str:
    """The table's rows. Raises: RuntimeError for the step that fails."""
    rows, state = "", Walk(root)
    try:
        for command, expected in STEPS:
            start = time.monotonic()
            said = state.run(command)
            if not (found := re.findall(expected, said)):
                raise RuntimeError(f"{command}: printed no {expected!r}:\n{said[-2000:]}")
            rows += f"| `{command}` | {time.monotonic() - start:.0f} | {f'`{found[-1]}`' if found[-1] else ''} |\n"
            print(rows.splitlines()[-1], flush=True)
    finally:
        state.end()
    return rows


def main() -> int:
    """Walk; returns the exit code."""
    with tempfile.TemporaryDirectory() as name:
        try:
            rows = walk(Path(name).resolve())
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if "--write" in sys.argv[1:]:
        PAGE.write_text(TABLE.sub(lambda _: HEAD + rows, PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
