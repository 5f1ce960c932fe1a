# SPDX-License-Identifier: Apache-2.0
"""Which engine each component was exercised on; elsewhere it is off unless its setting says on.

tested_engines.json has rows for kinds of engines: vLLM's minor version, model runner, scheduling and platform, the
components that passed there, and the evidence, a command or a file of this repository. A row can be about some models
alone, or about one device alone. What was not checked proves nothing. Components that are no engine component work
everywhere.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from vllm_mmcache.base.versions import vllm_version
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


@dataclass(frozen=True)
class Served(Engine):
    """An engine and what it serves; None is again what is not known."""

    architecture: str | None = None
    """The first of the model's config, such as Qwen3VLForConditionalGeneration."""
    num_devices: int | None = None
    """Over all ranks of all parallelism, data parallelism too."""


@dataclass(frozen=True)
class Row:
    """The components that passed on an engine."""

    engine: Engine
    components: tuple[str, ...]
    evidence: str
    architectures: tuple[str, ...] = ()
    """The models that it is about; empty: all that the components know."""
    num_devices: int | None = None
    """The number of devices that it is about; None: any."""

    def is_of(self, engine: Engine) -> bool:
        """Whether the row is about this kind of engine, whatever it serves; what the engine leaves open fits."""
        return all(
            getattr(engine, field.name) in (None, getattr(self.engine, field.name)) for field in fields(self.engine)
        )

    def covers(self, served: Served) -> bool:
        """Whether the row is about this engine and what it serves."""
        has_model = not self.architectures or served.architecture in (None, *self.architectures)
        has_devices = self.num_devices is None or served.num_devices in (None, self.num_devices)
        return self.is_of(served) and has_model and has_devices

    def as_json(self) -> dict[str, Any]:
        """The row as tested_engines.json has it: the engine's fields and its own; limits where there are some."""
        limits: dict[str, Any] = {"architectures": list(self.architectures), "num_devices": self.num_devices}
        limits = {name: value for name, value in limits.items() if value}
        return {**asdict(self.engine), **limits, "components": list(self.components), "evidence": self.evidence}


def rows() -> list[Row]:
    """The table. Raises: TypeError where a row lacks a value or has another."""
    return [
        Row(
            components=tuple(row.pop("components")),
            evidence=row.pop("evidence"),
            architectures=tuple(row.pop("architectures", ())),
            num_devices=row.pop("num_devices", None),
            engine=Engine(**row),
        )
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


def architecture_of(vllm_config: Any) -> str | None:
    """The first architecture of the model's config; None where it names none."""
    named = getattr(getattr(vllm_config.model_config, "hf_config", None), "architectures", None)
    return str(named[0]) if named else None


def engine_here(vllm_config: Any = None) -> Served:
    """The engine of this process; without a VllmConfig its runner, scheduling, model and devices are not known."""
    here = Served(minor_of(vllm_version()), platform_name())
    if vllm_config is None:
        return here
    return replace(
        here,
        runner=2 if vllm_config.use_v2_model_runner else 1,
        scheduling="async" if vllm_config.scheduler_config.async_scheduling else "sync",
        architecture=architecture_of(vllm_config),
        num_devices=_num_devices(vllm_config),
    )


def _num_devices(vllm_config: Any) -> int:
    """The devices that work on one request together.

    Data-parallel engines do so where they share the experts of a model. Others are on their own, and vLLM tells each of
    them that there is one.
    """
    parallel = vllm_config.parallel_config
    return int(parallel.world_size * (parallel.data_parallel_size if vllm_config.model_config.is_moe else 1))


def platform_name() -> str:
    """The platform of this vLLM; its own device_type is "cuda" on an AMD GPU, too."""
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def why_unproven(component: str, engine: Served) -> str:
    """Why a component is off on this engine unless it is switched on; empty where tested and for other components."""
    if component not in ENGINE_COMPONENTS:
        return ""
    kind = engine if component in TOUCHES_TENSORS else replace(engine, platform=None)
    passed = [row for row in TABLE if component in row.components and row.is_of(kind)]
    if any(row.covers(kind) for row in passed):
        return ""
    where = str(engine)
    if passed:  # with other models, or on another number of devices
        where += f", {engine.architecture} on {engine.num_devices} device{'s' if engine.num_devices != 1 else ''}"
    return f"not yet proven on {where}: `mmcache prove` tries it here, MMCACHE_{component.upper()}=1 switches it on"
