# SPDX-License-Identifier: Apache-2.0
"""Looks for new paths through the code with atheris: `python -m tests.system.fuzz.guided bodies FOLDER -runs=100000`.

FOLDER is made, if it is not there, with inputs to begin with; those that reach something new are added. What follows
goes to libFuzzer. An input that fails is written to the working directory. Needs the extra `fuzz`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["vllm_mmcache"]):
    from tests.support.packages import packed
    from tests.system.fuzz import checks
    from tests.system.fuzz.cases import body

SEEDS = 200


def one_body(content: bytes) -> None:
    """The first byte says which endpoint it is sent to."""
    if content:
        checks.check_body(content[1:], checks.PATHS[content[0] % len(checks.PATHS)])


def one_frame(content: bytes) -> None:
    """The first 32 bytes are the key."""
    checks.check_frame(content[:32], content[32:])


KINDS: dict[str, Callable[[bytes], object]] = {
    "bodies": one_body,
    "clients": checks.check_client,
    "references": lambda content: checks.check_reference(content.decode("utf-8", "surrogateescape")),
    "packages": checks.check_package,
    "frames": one_frame,
}


def seeds(kind: str) -> list[bytes]:
    """Inputs to begin with: random bytes alone would take long to become JSON or a package."""
    if kind == "bodies":
        chances = [Random(number) for number in range(SEEDS)]
        paths = [number % len(checks.PATHS) for number in range(SEEDS)]
        return [bytes([path]) + body(chance, checks.PATHS[path]) for chance, path in zip(chances, paths, strict=True)]
    if kind == "clients":
        return [body(Random(number), "/v1/chat/completions") for number in range(SEEDS)]
    return [packed(0, checks.SHAPE)] if kind == "packages" else []


def main() -> None:
    """Fuzz until libFuzzer's options say that it is enough."""
    if len(sys.argv) < 3 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python -m tests.system.fuzz.guided {{{','.join(KINDS)}}} FOLDER [options of libFuzzer]")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if not folder.exists():
        folder.mkdir(parents=True)
        for number, content in enumerate(seeds(kind)):
            (folder / f"seed-{number}").write_bytes(content)
    with checks.short_texts():
        atheris.Setup([sys.argv[0], *sys.argv[2:]], KINDS[kind])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
