# SPDX-License-Identifier: Apache-2.0
"""Every setting of mmcache: MMCACHE_* variables, or `--additional-config '{"mmcache": {...}}'`.

The process that makes the VllmConfig reads the variables, and lays over them what the command line adds: the command
line wins. What was set travels with the VllmConfig, so that engines and workers have the same settings, also those
that variables don't reach, as Ray's actors. The model is frozen and swapped whole, so that no reader sees half a
change. Runs in every process.
"""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_mmcache.durations import Duration
from vllm_mmcache.errors import SettingsError
from vllm_mmcache.places import check_key, host_and_port
from vllm_mmcache.places import store_places as store_places
from vllm_mmcache.places import without_secrets as without_secrets
from vllm_mmcache.settings_messages import allowed, check_together, known

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
            "Leave an image or a video undecoded whose bytes this process has decoded before, until its pixels are "
            "needed. Unset: on, unless vLLM has lazy media of its own."
        ),
    )
    pixels: bool | None = Field(
        default=None,
        description=(
            "Process images side by side, and send an image whose record is known to the engine without its pixels, "
            "which are made there if the vision tower needs them. Unset: on where lazy_media is on, which it needs; "
            "pixels stay behind where features are kept, and identity is on."
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
        description=(
            "How many images, how many videos, and how many base64 texts, a process may know at a time, if "
            "media_records_bytes has room for them: the default has it for 10,922 images and 2,978 videos."
        ),
    )
    media_records_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description="How many bytes what is known about images may take, and the same for videos and for base64 texts.",
    )
    records_ram_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=0,
        description="Budget of an API server's records in RAM: what saves a decode, or a run of the processor.",
    )
    records_disk_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=0,
        description=(
            "Budget of the records in the store's directory; those used longest ago go first. They are an SQLite file, "
            "which needs a local disk; 0 keeps none there."
        ),
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
    admin_key: SecretStr | None = Field(
        default=None,
        description=(
            "The key that /mmcache asks for: 16 printable ASCII characters or more, none of them a space. Without one "
            "nothing is told there; `mmcache serve --observe` makes one. It is another key than the clients' API key. "
            "Only as the variable MMCACHE_ADMIN_KEY, which is shown nowhere."
        ),
    )
    admin_key_file: str | None = Field(
        default=None,
        description="A file whose first line is the admin key; MMCACHE_ADMIN_KEY wins. Read once, by an API server.",
    )
    observe_listen: str | None = Field(
        default=None,
        description="HOST:PORT on which /mmcache is served, without TLS, instead of on vLLM's own port.",
    )
    observe_across_salts: bool = Field(
        default=False,
        description=(
            "Compare requests of different cache_salts, too, so that a record says what is known under another one "
            "(`other_salt`). Who reads records can then find out what another tenant has sent."
        ),
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
        description=(
            "Budget of the features kept in RAM, such as 512MiB: by each engine for all of its workers on this host. 0 "
            "keeps none there, and takes 256 MiB for what is on its way."
        ),
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
        description=(
            "Budget of the store's directory; the packages used longest ago go first. One package may have a quarter "
            "of it."
        ),
    )
    store_ttl: Duration = Field(
        default=Duration(7 * 86400),
        description=(
            "What was not used for so long is removed from the directory, and expires in Redis or Valkey, features and "
            "records: seconds, or a number with s, m, h, d or w after it. 0 keeps it until there is no room."
        ),
    )
    store_key_file: str | None = Field(
        default=None,
        description=(
            "A file with a key of 32 bytes (as they are, 64 hex digits, or base64): features and records are encrypted "
            "with it in the directory and in Redis or Valkey. Needs the extra `encryption`; what was stored before is "
            "not used."
        ),
    )
    store_remote_max_bytes: ByteSize = Field(
        default=ByteSize(512 * 1024**2),
        ge=0,
        description=(
            "Packages larger than this do not go to Redis or Valkey; these take no more than 512 MiB themselves, "
            "unless they are told to. Packages travel in pieces of 4 MiB."
        ),
    )
    store_remote_timeout_s: float = Field(
        default=0.02,
        gt=0,
        le=10,
        description=(
            "Seconds that a load waits for Redis or Valkey to accept a connection, and for the next bytes to come. "
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
    store_wait_s: float | None = Field(
        default=None,
        ge=0,
        le=60,
        description=(
            "Longest time that a request is held back, while others go on, for features that are read from the store. "
            "Unset: as long as the vision tower would take, and a tier that would take longer is not asked."
        ),
    )
    store_step_wait_s: float = Field(
        default=0.002,
        ge=0,
        le=1,
        description=(
            "Longest time in one step that the scheduler itself waits for features, where no other request is running."
        ),
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

    @field_validator("observe_listen")
    @classmethod
    def _address_is_one(cls, value: str | None) -> str | None:
        if value is not None:
            host_and_port(value)
        return value

    @field_validator("admin_key")
    @classmethod
    def _admin_key_is_one(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_key(value.get_secret_value())
        return value


# Two decide whether register() replaces anything, before any command line is seen; a key is to be in no command line.
ONLY_VARIABLES = frozenset({"disable", "allow_untested_vllm", "admin_key"})


def load_settings(config: Mapping[str, Any] | None = None) -> Settings:
    """Read the variables, then lay `config` over them.

    Raises: SettingsError naming the field, the value seen and what is allowed, also for an unknown name; naming both,
    where two settings contradict each other; for a key of the store that can't be used.
    """
    names = set(Settings.model_fields)
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX):
            known(variable, variable.removeprefix(PREFIX).lower(), names, lambda name: PREFIX + name.upper())
    for key in config or {}:
        known(f"additional-config {CONFIG_KEY}.{key}", key, names - ONLY_VARIABLES, str)

    def spelled(name: str) -> str:
        return f"additional-config {CONFIG_KEY}.{name}" if name in (config or {}) else PREFIX + name.upper()

    try:
        read = Settings(**dict(config or {}))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        seen = "***" if name == "admin_key" else repr(without_secrets(first["input"]))
        raise SettingsError(
            f"{spelled(name)} = {seen} is not allowed: "
            f"{first['msg'].removeprefix('Value error, ')} "
            f"({allowed(name, Settings.model_fields[name])}; default {Settings.model_fields[name].default!r})"
        ) from None
    check_together(read, spelled)
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
