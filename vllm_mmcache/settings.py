# SPDX-License-Identifier: Apache-2.0
"""Every setting of mmcache: MMCACHE_* variables, or `--additional-config '{"mmcache": {...}}'`.

A process reads the variables once, when the plugin is registered, and again with what the command line adds, when
it first sees the VllmConfig (which travels to the engine and to the workers). The command line wins. The model is
frozen and swapped whole, so that no reader sees half a change. Runs in every process.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_mmcache.errors import SettingsError

PREFIX = "MMCACHE_"
CONFIG_KEY = "mmcache"


class Settings(BaseSettings):
    """The settings in force; each field is also the variable MMCACHE_<NAME>."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    disable: bool = Field(
        default=False,
        description="Leave vLLM as it is: nothing is replaced in any process. Only as the variable MMCACHE_DISABLE.",
    )
    block_keys: bool | None = Field(
        default=None,
        description=(
            "Compute KV block keys with the cumulative image state. Fixed at start: switching it midway would mix "
            "two key spaces. Unset: on where this room is proven (CPU). False leaves vLLM's own keys."
        ),
    )
    image_spans: bool | None = Field(
        default=None,
        description=(
            "For models whose images attend both ways (Gemma 3): attention that does so on the CPU, and a scheduler "
            "that never splits an image. Fixed at start. Unset: on where this room is proven (CPU)."
        ),
    )
    resumed_images: bool | None = Field(
        default=None,
        description=(
            "Keep the inputs of images that a prefix hit covers, so that a preempted request whose hit is shorter when "
            "it comes back does not kill the engine. Unset: on where this room is proven (CPU)."
        ),
    )
    lazy_media: bool | None = Field(
        default=None,
        description=(
            "Leave an image undecoded whose bytes this process has decoded before, until its pixels are needed. "
            "Unset: on, unless vLLM has lazy media of its own."
        ),
    )
    lifted_bodies: bool | None = Field(
        default=None,
        description=(
            "Take base64 images out of request bodies before they are parsed. Unset: on where lazy_media is on, "
            "which it needs."
        ),
    )
    media_records: int = Field(
        default=65536,
        ge=1,
        description="How many images, and how many base64 texts, a process may know at a time.",
    )
    media_records_bytes: int = Field(
        default=64 << 20,
        ge=1 << 16,
        description="How many bytes what is known about images may take, and the same for base64 texts.",
    )
    allow_causal_images: bool = Field(
        default=False,
        description="Run a model whose images attend both ways on a backend that can't, with wrong answers.",
    )
    attention_reference: bool = Field(
        default=False,
        description=(
            "Compute attention over images in the naive form: gather all K and V from the pages, then attend with a "
            "mask. Slow; for tests and for reproducing a doubt. CPU only."
        ),
    )
    allow_untested_vllm: bool = Field(
        default=False,
        description=(
            "Try the swaps on a vLLM outside the tested range too; each is still checked and left out if it "
            "does not fit. Only as the variable MMCACHE_ALLOW_UNTESTED_VLLM."
        ),
    )


# These decide whether and what register() replaces, before any command line is seen.
ONLY_VARIABLES = frozenset({"disable", "allow_untested_vllm"})


def load_settings(config: Mapping[str, Any] | None = None) -> Settings:
    """Read the variables, then lay `config` over them.

    Raises: SettingsError naming the field, the value seen and what is allowed, also for an unknown name.
    """
    names = set(Settings.model_fields)
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX):
            _known(variable, variable.removeprefix(PREFIX).lower(), names, lambda name: PREFIX + name.upper())
    for key in config or {}:
        _known(f"additional-config {CONFIG_KEY}.{key}", key, names - ONLY_VARIABLES, str)
    try:
        return Settings(**dict(config or {}))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        where = f"additional-config {CONFIG_KEY}.{name}" if name in (config or {}) else PREFIX + name.upper()
        raise SettingsError(
            f"{where} = {first['input']!r} is not allowed: {first['msg']} "
            f"({_allowed(name)}; default {Settings.model_fields[name].default!r})"
        ) from None


def config_of(vllm_config: Any) -> Mapping[str, Any]:
    """The `mmcache` part of a VllmConfig's additional_config, or {} where there is none.

    Raises: SettingsError if the part is not an object.
    """
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return {}
    part = additional[CONFIG_KEY]
    if not isinstance(part, dict):
        raise SettingsError(
            f"additional-config {CONFIG_KEY} is {part!r}, expected an object such as "
            f'{{"{CONFIG_KEY}": {{"block_keys": false}}}}'
        )
    return part


_current: Settings | None = None


def current() -> Settings:
    """The settings in force in this process; read on first use."""
    global _current
    if _current is None:
        _current = load_settings()
    return _current


def use(settings: Settings) -> None:
    """Put `settings` in force in this process."""
    global _current
    _current = settings


def _known(where: str, name: str, names: set[str] | frozenset[str], spell: Any) -> None:
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {spell(near[0])}? " if near else ""
    raise SettingsError(f"unknown setting {where}: {guess}allowed are {', '.join(spell(n) for n in sorted(names))}")


def _allowed(name: str) -> str:
    annotation = Settings.model_fields[name].annotation
    if annotation in (bool, bool | None):
        return "allowed: 1, true, yes, on, 0, false, no, off"
    return f"allowed: {getattr(annotation, '__name__', annotation)}"
