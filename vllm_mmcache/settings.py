# SPDX-License-Identifier: Apache-2.0
"""Every setting of mmcache: MMCACHE_* variables, or `--additional-config '{"mmcache": {...}}'`.

The process that makes the VllmConfig reads the variables, and lays over them what the command line adds: the command
line wins. What was set travels with the VllmConfig, so that engines and workers have the same settings, also those
that variables don't reach, as Ray's actors. The model is frozen and swapped whole, so that no reader sees half a
change. Runs in every process.
"""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_mmcache.errors import SettingsError

PREFIX = "MMCACHE_"
CONFIG_KEY = "mmcache"

REMOTE_SCHEMES = ("redis://", "rediss://", "valkey://", "valkeys://", "unix://")


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
            "two key spaces. Unset: on where it is proven. False leaves vLLM's own keys."
        ),
    )
    image_spans: bool | None = Field(
        default=None,
        description=(
            "For models whose images attend both ways (Gemma 3, Gemma 4): attention that does so on the CPU, and a "
            "scheduler that never splits an image. Fixed at start. Unset: on where it is proven."
        ),
    )
    resumed_images: bool | None = Field(
        default=None,
        description=(
            "Send the worker the image inputs again with a preempted request, so that one whose prefix hit is shorter "
            "when it comes back does not kill the engine. Unset: on where it is proven."
        ),
    )
    image_checkpoints: bool | None = Field(
        default=None,
        description=(
            "For models that keep KV states sparsely (sliding windows, Mamba/GDN): keep the states at image "
            "boundaries, so that the second question about an image is a hit. Unset: on where it is proven."
        ),
    )
    checkpoints_per_request: int = Field(
        default=4, ge=0, le=64, description="The most image boundaries of one request that are kept."
    )
    checkpoint_min_tokens: int = Field(
        default=64, ge=1, description="Least distance in tokens of a checkpoint from the prompt's start and the others."
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
    media_records_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description="How many bytes what is known about images may take, and the same for base64 texts.",
    )
    identity: bool = Field(
        default=True,
        description=(
            "An image's identity is its content, within its tenant (cache_salt); a uuid is an alias of the tenant. "
            "Fixed at start. False leaves vLLM's own: a uuid is trusted, and only KV blocks are apart by salt."
        ),
    )
    require_salt: bool = Field(
        default=False,
        description=(
            "Refuse requests with images, videos or audio that have no cache_salt (400), and refuse to start where "
            "identity is not on."
        ),
    )
    image_aliases: int = Field(
        default=65536, ge=1, description="How many uuids an API server may know at a time, of all tenants together."
    )
    metrics: bool | None = Field(
        default=None,
        description="Show what the engine counts on /metrics, as mmcache:*. Unset: on where it is proven.",
    )
    observe: bool = Field(
        default=False,
        description="Record for each request what of its prompt was reused, and why the rest was not.",
    )
    observe_records: int = Field(default=2000, ge=1, description="How many records an API server keeps.")
    observe_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description=(
            "How many bytes an API server's records may take, and what an engine remembers of earlier requests to "
            "compare new ones with."
        ),
    )
    observe_file: str | None = Field(default=None, description="A file to which records go, too, one JSON a line.")
    observe_file_bytes: ByteSize = Field(
        default=ByteSize(64 << 20), ge=1 << 16, description="How large the record file and the one before it may be."
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
    features: bool | None = Field(
        default=None,
        description=(
            "Keep the outputs of the vision tower, so that it runs once per image. Unset: on where it is proven."
        ),
    )
    feature_ram_bytes: ByteSize = Field(
        default=ByteSize(2 * 1024**3),
        ge=0,
        description="Budget of the features kept in RAM by each worker process, such as 512MiB. 0 keeps none there.",
    )
    store: str | None = Field(
        default=None,
        description=(
            "Where features are kept beyond RAM: a directory (absolute or ~), a Redis or Valkey URL (redis://, "
            "rediss://, valkey://, valkeys://, unix://), or one of each with a space or a comma between them."
        ),
    )
    store_disk_bytes: ByteSize = Field(
        default=ByteSize(10 * 1024**3),
        ge=0,
        description="Budget of the store's directory; the packages used longest ago go first.",
    )
    store_remote_ttl_s: int = Field(
        default=7 * 24 * 3600, ge=1, description="Seconds that Redis or Valkey keeps a package after it was written."
    )
    store_remote_max_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024**2), ge=0, description="Packages larger than this do not go to Redis or Valkey."
    )
    store_remote_timeout_s: float = Field(
        default=0.02,
        gt=0,
        le=10,
        description=(
            "Seconds that a request waits for Redis or Valkey to accept a connection, and for each read from it. "
            "After a failure it is left alone for 5 s, doubling up to 60 s."
        ),
    )
    tower_one_by_one: bool = Field(
        default=False,
        description=(
            "Run the vision tower image by image, so that features don't depend on what else was in the batch to the "
            "last bit, and peak memory is that of one image."
        ),
    )
    tower_trap: bool = Field(
        default=False,
        description="Fail the run if the vision tower is entered for an image whose features are stored; for tests.",
    )
    unproven: bool = Field(
        default=False,
        description=(
            "Switch on what fits, also where nobody has shown that it is exact (see `mmcache prove`). A room that a "
            "setting of its own switches off stays off."
        ),
    )
    allow_untested_vllm: bool = Field(
        default=False,
        description=(
            "Try the swaps on a vLLM outside the tested range too; each is still checked and left out if it "
            "does not fit. Only as the variable MMCACHE_ALLOW_UNTESTED_VLLM."
        ),
    )

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, value: str | None) -> str | None:
        store_places(value)
        return value


# These decide whether register() replaces anything, before any command line is seen.
ONLY_VARIABLES = frozenset({"disable", "allow_untested_vllm"})

# Pairs that can't both be meant: (name, value), (name, value), and why.
_CONTRADICTIONS: tuple[tuple[tuple[str, bool], tuple[str, bool], str], ...] = (
    (("disable", True), ("require_salt", True), "nothing would keep tenants apart"),
    (("require_salt", True), ("identity", False), "nothing would keep tenants apart"),
    (("lifted_bodies", True), ("lazy_media", False), "what is lifted out of a body is opened by the lazy media"),
    (("observe", True), ("metrics", False), "records travel the way that the metrics do"),
    (("attention_reference", True), ("image_spans", False), "the reference is a form of that attention"),
    (("tower_trap", True), ("features", False), "nothing is stored that the trap could spring for"),
)


def load_settings(config: Mapping[str, Any] | None = None) -> Settings:
    """Read the variables, then lay `config` over them.

    Raises: SettingsError naming the field, the value seen and what is allowed, also for an unknown name; naming both,
    where two settings contradict each other.
    """
    names = set(Settings.model_fields)
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX):
            _known(variable, variable.removeprefix(PREFIX).lower(), names, lambda name: PREFIX + name.upper())
    for key in config or {}:
        _known(f"additional-config {CONFIG_KEY}.{key}", key, names - ONLY_VARIABLES, str)

    def spelled(name: str) -> str:
        return f"additional-config {CONFIG_KEY}.{name}" if name in (config or {}) else PREFIX + name.upper()

    try:
        read = Settings(**dict(config or {}))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        raise SettingsError(
            f"{spelled(name)} = {without_secrets(first['input'])!r} is not allowed: "
            f"{first['msg'].removeprefix('Value error, ')} "
            f"({_allowed(name)}; default {Settings.model_fields[name].default!r})"
        ) from None
    for one, other, why in _CONTRADICTIONS:
        if all(getattr(read, name) is value for name, value in (one, other)):
            said = " and ".join(f"{spelled(name)} = {value}" for name, value in (one, other))
            raise SettingsError(f"{said} contradict each other: {why}. Leave out one of the two")
    return read


def carried(settings: Settings) -> dict[str, Any]:
    """What was set, as plain data for another process; see `received`."""
    return settings.model_dump(mode="json", exclude_unset=True, exclude=set(ONLY_VARIABLES))


def received(given: Mapping[str, Any]) -> Settings:
    """The settings of the process that `carried` them. Variables of this one that differ are not used.

    Raises: SettingsError where another version of mmcache has sent them.
    """
    try:
        read = Settings(**dict(given))
    except ValidationError as error:
        raise SettingsError(
            f"the settings that came with the configuration don't fit here: {error.errors()[0]['msg']}. Have the same "
            "version of mmcache in every process"
        ) from None
    own = read.model_fields_set - set(given) - ONLY_VARIABLES
    return read.model_copy(update={name: Settings.model_fields[name].default for name in own})


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


def store_places(store: str | None) -> tuple[str | None, str | None]:
    """The directory and the URL that the setting `store` names, each None where it names none.

    Raises: ValueError for a part that is neither, or for two of a kind.
    """
    directory = url = None
    for part in re.split(r"[\s,]+", store or ""):
        if part.startswith(REMOTE_SCHEMES):
            if url is not None:
                raise ValueError("only one URL can be given")
            url = part
            _check_port(url)
        elif part.startswith(("/", "~")):
            if directory is not None:
                raise ValueError("only one directory can be given")
            directory = os.path.expanduser(part)
            if not directory.startswith("/"):
                raise ValueError(f"there is no user of {part!r}")
        elif part:
            raise ValueError(f"{without_secrets(part)!r} is neither an absolute directory nor a URL that is known")
    return directory, url


def _check_port(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:  # its message can quote a piece of the password
        raise ValueError("its port is no number from 0 to 65535 (a / in a password is written %2F)") from None


def without_secrets(value: Any) -> Any:
    """`value` as it may be shown: a URL's user and password are hidden."""
    return re.sub(r"//\S*@", "//***@", value) if isinstance(value, str) else value


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
    if annotation is ByteSize:
        return "allowed: a number of bytes, or a size such as 512MiB or 10GiB"
    if name == "store":
        return f"allowed: a directory such as /path, a URL with {', '.join(REMOTE_SCHEMES)}, or one of each"
    bounds = [str(bound) for bound in Settings.model_fields[name].metadata]
    return ", ".join([f"allowed: {getattr(annotation, '__name__', annotation)}", *bounds])
