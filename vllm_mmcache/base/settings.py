# SPDX-License-Identifier: Apache-2.0
"""Every setting of mmcache: MMCACHE_* variables, or `--additional-config '{"mmcache": {...}}'`.

The process that makes the VllmConfig reads the variables, and lays over them what the command line adds: the command
line wins. What was set travels with the VllmConfig, so that engines and workers have the same settings, also those
that variables don't reach, as Ray's actors. The model is frozen and swapped whole, so that no reader sees half a
change. Runs in every process.

A wrong value stops the start. A variable that is no setting does not, and is one line in the log: Kubernetes sets some
for a Service of our name, and those of a newer version are still there after a rollback.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_mmcache.base.durations import Duration
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.settings_messages import PROTECTING, allowed, check_together, is_of_a_service, known, nearest
from vllm_mmcache.base.store_url import PASSWORD_SHOWN, check_key, holds_password, host_and_port, with_password
from vllm_mmcache.base.store_url import redact as redact
from vllm_mmcache.base.store_url import store_places as store_places
from vllm_mmcache.base.tenant import parse_source

logger = logging.getLogger("vllm.mmcache")

PREFIX = "MMCACHE_"
CONFIG_KEY = "mmcache"

OLDER_NAMES = {"pixels": "lazy_processing", "lifted_bodies": "image_extraction"}
"""Older names of settings, each with the setting that it stands for. Version 0.1 reads them; 0.2 will not."""


class Settings(BaseSettings):
    """The settings in force; each field is also the variable MMCACHE_<NAME>."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    disable: bool = Field(default=False, description="Leave vLLM as it is: nothing is replaced. Variable only.")
    block_keys: bool | None = Field(
        default=None, description="KV block keys with the cumulative image state. False: vLLM's own."
    )
    image_spans: bool | None = Field(
        default=None,
        description="Gemma 3, Gemma 4: images attend both ways on the CPU, and the scheduler never splits one.",
    )
    resumed_images: bool | None = Field(
        default=None,
        description="Send a preempted request's image inputs again: a shorter prefix hit does not kill the engine.",
    )
    image_checkpoints: bool | None = Field(
        default=None,
        description=(
            "Sliding windows, Mamba, GDN: keep states at image boundaries, so the second question about an image hits."
        ),
    )
    checkpoints_per_request: int = Field(default=4, ge=0, le=64, description="Most image boundaries kept per request.")
    checkpoint_min_tokens: int = Field(
        default=64, ge=1, description="Least tokens between a checkpoint and the prompt's start, or another."
    )
    lazy_media: bool | None = Field(
        default=None,
        description="Decode known images and videos only when pixels are needed. Unset: on, unless vLLM does so.",
    )
    lazy_processing: bool | None = Field(
        default=None,
        description=(
            "Process images side by side. Known images travel without pixels where features are kept and identity is "
            "on. Unset: as lazy_media, which it needs."
        ),
    )
    image_extraction: bool | None = Field(
        default=None,
        description="Take base64 images out of request bodies before parsing. Unset: as lazy_media, which it needs.",
    )
    media_records: int = Field(
        default=65536,
        ge=1,
        description=(
            "Most images, videos and base64 texts, each, that a process knows; 64MiB hold 10,922 images, 2,978 videos."
        ),
    )
    media_records_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description="Budget of what is known about images; the same for videos and base64 texts.",
    )
    records_ram_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=0,
        description="Budget of an API server's records in RAM; they save decoding and processing.",
    )
    records_disk_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=0,
        description="Budget of records in the store's directory (SQLite: local disk), LRU. 0: none.",
    )
    identity: bool = Field(
        default=True,
        description=(
            "An image is its content within its tenant (see tenant_from); uuids are other names for it. False: uuids "
            "are trusted, only KV is apart by cache_salt."
        ),
    )
    tenant_from: str = Field(
        default="cache_salt",
        description=(
            "Where a request's tenant is found: `cache_salt`, the body's field; `header:NAME`, a header that the "
            "gateway sets; or `api_key`, the API key that was used. A header or key becomes a digest that takes the "
            "place of cache_salt, also for KV blocks; a start without identity is refused then."
        ),
    )
    tenant_key_file: str | None = Field(
        default=None,
        description=(
            "File with a 32-byte key (raw, 64 hex digits, base64) for the digests of tenants' names; the same on all "
            "servers that share a store. Unset: who sees a digest can try names."
        ),
    )
    require_tenant: bool = Field(
        default=False,
        description="Refuse images, videos and audio without a tenant (400), and a start without identity.",
    )
    require_salt: bool = Field(default=False, description="The older name of require_tenant.")
    image_aliases: int = Field(
        default=65536, ge=1, description="Most uuids that an API server knows, all tenants together."
    )
    metrics: bool | None = Field(default=None, description="Show the engine's counters on /metrics, as mmcache:*.")
    observe: bool = Field(default=False, description="Record what each request reused, and why not the rest.")
    admin_key: SecretStr | None = Field(
        default=None,
        description=(
            "Key of /mmcache (not the API key): at least 16 printable ASCII characters, no spaces. Without one nothing "
            "is told; `mmcache serve --observe` makes one. Variable only, in no log."
        ),
    )
    admin_key_file: str | None = Field(
        default=None,
        description="File whose first line is the admin key; the variable wins. Readable by its owner or group alone.",
    )
    observe_listen: str | None = Field(
        default=None, description="HOST:PORT that serves /mmcache, without TLS, instead of vLLM's port."
    )
    observe_across_salts: bool = Field(
        default=False,
        description=(
            "Compare requests across cache_salts (`other_salt`): readers of records can learn what other tenants sent."
        ),
    )
    observe_records: int = Field(default=2000, ge=1, description="Most records that an API server keeps.")
    observe_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description="Budget of an API server's records, and of an engine's memory of earlier requests.",
    )
    observe_file: str | None = Field(default=None, description="File for records, one JSON a line.")
    observe_file_bytes: ByteSize = Field(
        default=ByteSize(64 << 20), ge=1 << 16, description="Budget of the record file and the one before it together."
    )
    allow_causal_images: bool = Field(
        default=False, description="Run images that attend both ways on backends that can't: wrong answers."
    )
    features: bool | None = Field(default=None, description="Keep the vision tower's outputs: it runs once per image.")
    feature_ram_bytes: ByteSize = Field(
        default=ByteSize(2 * 1024**3),
        ge=0,
        description=(
            "Budget of features in RAM, per engine, for all its workers on this host. 0: none kept, 256 MiB in transit."
        ),
    )
    store: str | None = Field(
        default=None,
        repr=False,  # a URL in it may hold a password
        description=(
            "Where features go beyond RAM: a directory (absolute or ~), a URL (redis://, rediss://, valkey://, "
            "valkeys://, unix://; redis+cluster://, redis+sentinel://), or both, with space or comma between. With a "
            "password in the URL: variable only."
        ),
    )
    store_disk_bytes: ByteSize = Field(
        default=ByteSize(10 * 1024**3),
        ge=0,
        description="Budget of the store's directory, LRU. One package: at most a quarter.",
    )
    store_ttl: Duration = Field(
        default=Duration(7 * 86400),
        description=(
            "Features and records unused for so long are removed: seconds, or a number with s, m, h, d, w. 0: only for "
            "lack of room."
        ),
    )
    store_key_file: str | None = Field(
        default=None,
        description=(
            "File with a 32-byte key (raw, 64 hex digits, base64) that encrypts features and records. Needs the extra "
            "`encryption`; older entries are not used."
        ),
    )
    store_password_file: str | None = Field(
        default=None,
        description=(
            "File whose first line is the password of Redis or Valkey, for a `store` that holds none. Readable by its "
            "owner or group alone, as all files of keys."
        ),
    )
    store_remote_max_bytes: ByteSize = Field(
        default=ByteSize(512 * 1024**2),
        ge=0,
        description="Largest package for Redis or Valkey, sent in 4 MiB pieces. Their own default limit: 512 MiB.",
    )
    store_remote_timeout_s: float = Field(
        default=0.02,
        gt=0,
        le=10,
        description=(
            "Seconds to wait for Redis or Valkey to connect, and for the next bytes. After a failure: left alone for 5 "
            "s, doubling up to 60 s."
        ),
    )
    store_trusted_network: bool = Field(
        default=False,
        description=(
            "Nobody else can reach Redis or Valkey, nor the network to it: no warning where TLS, password and "
            "encryption are missing."
        ),
    )
    tower_one_by_one: bool = Field(
        default=False,
        description=(
            "Run the vision tower image by image: features independent of the batch to the last bit, peak memory of "
            "one image."
        ),
    )
    store_wait_s: float | None = Field(
        default=None,
        ge=0,
        le=60,
        description=(
            "Longest wait in seconds of a request for stored features, while others go on. Unset: the tower's time; "
            "slower tiers are not asked."
        ),
    )
    store_step_wait_s: float = Field(
        default=0.002,
        ge=0,
        le=1,
        description="Longest wait in seconds for features in a step where no other request runs.",
    )
    unproven: bool = Field(
        default=False,
        description=(
            "Switch on what fits, unproven too (see `mmcache prove`). A component's own setting still switches it off."
        ),
    )
    allow_untested_vllm: bool = Field(
        default=False, description="Try a vLLM outside the tested range; what does not fit is left out. Variable only."
    )

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, value: str | None) -> str | None:
        store_places(value)
        return value

    @field_validator("tenant_from")
    @classmethod
    def _source_is_one(cls, value: str) -> str:
        parse_source(value)
        return value

    @field_validator("store_key_file", "store_password_file", "tenant_key_file", "admin_key_file", "observe_file")
    @classmethod
    def _home_is_known(cls, value: str | None) -> str | None:
        try:
            Path(value or "/").expanduser()
        except RuntimeError:
            raise ValueError("there is no user of that name, or no home directory: give an absolute path") from None
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

    @property
    def requires_tenant(self) -> bool:
        """Whether images without a tenant are refused."""
        return self.require_tenant or self.require_salt

    @property
    def promised_by(self) -> tuple[str, ...]:
        """The settings by which tenants must be kept apart, so that nothing may start where identity can't do that."""
        names = [name for name in ("require_tenant", "require_salt") if getattr(self, name)]
        return (*names, "tenant_from") if self.tenant_from != "cache_salt" else tuple(names)


# Two decide whether register() replaces anything, before any command line is seen; a key is to be in no command line.
ONLY_VARIABLES = frozenset({"disable", "allow_untested_vllm", "admin_key"})


def load_settings(config: Mapping[str, Any] | None = None) -> Settings:
    """Read the variables, then lay `config` over them. An older name counts where the newer one is not given.

    Raises: SettingsError naming the field, the value seen and what is allowed, also for an unknown name in `config`;
    naming both, where two settings contradict each other; for a key or password of the store that can't be used; for a
    password in `config`, which command lines and vLLM's log show.
    """
    for key in config or {}:
        allowed_names = set(Settings.model_fields) - ONLY_VARIABLES
        known(f"additional-config {CONFIG_KEY}.{key}", key, allowed_names, str, OLDER_NAMES)
        if key in OLDER_NAMES:
            _warn_of_older_name(f"additional-config {CONFIG_KEY}.{key}", OLDER_NAMES[key])
    given, older = with_newer_names(config or {}, os.environ)

    def spelled(name: str) -> str:
        as_given = older.get(name, name)
        return f"additional-config {CONFIG_KEY}.{as_given}" if as_given in (config or {}) else PREFIX + as_given.upper()

    try:
        read = Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        seen = "***" if name == "admin_key" else repr(redact(first["input"]))
        raise SettingsError(
            f"{spelled(name)} = {seen} is not allowed: "
            f"{first['msg'].removeprefix('Value error, ')} "
            f"({allowed(name, Settings.model_fields[name])}; default {Settings.model_fields[name].default!r})"
        ) from None
    if "store" in (config or {}) and holds_password(read.store or ""):
        raise SettingsError(f"{spelled('store')} {PASSWORD_SHOWN}")
    check_together(read, spelled)
    return read


def with_newer_names(config: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of `config` under the newer names of settings, and those of older variables that nothing overrides.

    Returns: the values, and of each newer name the older one that it was given by. The order of precedence is that of
    settings: `config` before variables; of two names of one setting in the same place, the newer.
    """
    given = {name: value for name, value in config.items() if name not in OLDER_NAMES}
    spelled = {}
    for older, newer in OLDER_NAMES.items():
        variable = environ.get(PREFIX + older.upper())
        if older in config and newer not in config:
            given[newer], spelled[newer] = config[older], older
        elif variable and newer not in given and not environ.get(PREFIX + newer.upper()):
            given[newer], spelled[newer] = variable, older
    return given, spelled


def store_in_use(settings: Settings) -> tuple[str | None, str | None]:
    """The directory and the URL of the store, with the password that comes from a file. Raises: SettingsError."""
    directory, url = store_places(settings.store)
    return directory, url and with_password(url, settings.store_password_file)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """The variables MMCACHE_* that are no setting, each with the setting's that is nearest, None where none is near.

    Those that Kubernetes sets for a Service are left out.
    """
    found = {}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name in Settings.model_fields or name in OLDER_NAMES:
            continue
        if not is_of_a_service(variable, environ[variable]):
            near = nearest(name, Settings.model_fields)
            found[variable] = PREFIX + near.upper() if near else None
    return found


def is_protecting(variable: str | None) -> bool:
    """Whether this variable sets something that protects tenants or what is stored."""
    return variable is not None and variable.removeprefix(PREFIX).lower() in PROTECTING


_warned_of: set[str] = set()


def warn_of_unknown_variables() -> None:
    """Log a line for each variable that is no setting, once in a process; an error where a protection was meant.

    A variable with the older name of a setting has its line, too.
    """
    for older, newer in OLDER_NAMES.items():
        if os.environ.get(PREFIX + older.upper()):
            _warn_of_older_name(PREFIX + older.upper(), PREFIX + newer.upper())
    for variable, near in unknown_variables().items():
        if variable not in _warned_of:
            _warned_of.add(variable)
            log = logger.error if is_protecting(near) else logger.warning
            hint = f"did you mean {near}?" if near else "`mmcache doctor --settings` lists them"
            log("mmcache: %s is no setting and has no effect: %s", variable, hint)


def _warn_of_older_name(older: str, newer: str) -> None:
    if older not in _warned_of:
        _warned_of.add(older)
        logger.warning(
            "mmcache: %s is an older name of %s: write the newer one, version 0.2 reads no other", older, newer
        )


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
            f"additional-config {CONFIG_KEY} is of type {type(part).__name__}, expected an object such as "
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
