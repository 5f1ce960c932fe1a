# SPDX-License-Identifier: Apache-2.0
"""Which engine each component was exercised on; elsewhere it is off unless its setting says on.

tested_engines.json has a row for each kind of engine: vLLM's minor version, model runner, scheduling and platform, the
components that passed there, and the evidence, a command or a file of this repository. What was not checked proves
nothing. Components that are no engine component work everywhere.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vllm_mmcache.lifecycle.registry import COMPONENTS

ENGINE_COMPONENTS = tuple(component.name for component in COMPONENTS.values() if component.proven_per)
TOUCHES_TENSORS = frozenset(component.name for component in COMPONENTS.values() if component.proven_per == "device")
"""Components that read or write tensors on the device: proven for each platform on its own. The others are the same
Python in the scheduler and around the runner, wherever the tensors live."""

FILE = Path(__file__).with_name("tested_engines.json")


@dataclass(frozen=True)
class Engine:
    """A kind of engine; None is what is not known before there is a VllmConfig."""

    vllm: str
    """The minor version, such as 0.33."""
    platform: str | None
    """vLLM's name: cpu, cuda, rocm, xpu. (ROCm's device_type is cuda; it is another platform.)"""
    runner: int | None = None
    """vLLM's model runner, 1 or 2."""
    scheduling: Literal["sync", "async"] | None = None

    def __str__(self) -> str:
        runner = f"model runner V{self.runner} with {self.scheduling} scheduling" if self.runner else "any model runner"
        return f"vLLM {self.vllm}, {runner}, {self.platform}"

    def includes(self, other: "Engine") -> bool:
        """Whether `other` is this kind of engine; what is None here can be anything."""
        return all(mine in (None, its) for mine, its in zip(astuple(self), astuple(other), strict=True))


@dataclass(frozen=True)
class Row:
    """The components that passed on an engine."""

    engine: Engine
    components: tuple[str, ...]
    evidence: str

    def as_json(self) -> dict[str, Any]:
        """The row as tested_engines.json has it: the engine's fields beside components and evidence."""
        return {**asdict(self.engine), "components": list(self.components), "evidence": self.evidence}


def rows() -> list[Row]:
    """The table. Raises: TypeError where a row lacks a value or has another."""
    return [
        Row(components=tuple(row.pop("components")), evidence=row.pop("evidence"), engine=Engine(**row))
        for row in json.loads(FILE.read_text(encoding="utf-8"))
    ]


def written(table: Iterable[Row]) -> str:
    """The table as the text of tested_engines.json: a value a line, lists in one."""
    texts = []
    for row in table:
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in row.as_json().items())
        texts.append(f"  {{\n{lines}\n  }}")
    return "[\n" + ",\n".join(texts) + "\n]\n"


TABLE = rows()


def minor_of(version: str) -> str:
    """The minor version, 0.33, of a version, 0.33.0."""
    return ".".join(version.split(".")[:2])


def why_unproven(component: str, engine: Engine) -> str:
    """Why a component is off on this engine unless it is switched on; empty where tested and for other components."""
    if component not in ENGINE_COMPONENTS:
        return ""
    kind = engine if component in TOUCHES_TENSORS else replace(engine, platform=None)
    if any(component in row.components and kind.includes(row.engine) for row in TABLE):
        return ""
    return f"not yet proven on {engine}: `mmcache prove` tries it here, MMCACHE_{component.upper()}=1 switches it on"
