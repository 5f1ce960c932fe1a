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
from typing import Any, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_mmcache.base.durations import Duration
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.key_file import check_key
from vllm_mmcache.base.settings_messages import PROTECTING, allowed, check_together, is_of_a_service, known, nearest
from vllm_mmcache.base.store_url import (
    WITH_URLS,
    check_files,
    host_and_port,
    redact,
    store_places,
    why_not_in_config,
    with_password,
)
from vllm_mmcache.base.tenant import parse_source

logger = logging.getLogger("vllm.mmcache")

PREFIX = "MMCACHE_"
CONFIG_KEY = "mmcache"

OLDER_NAMES = {"pixels": "lazy_processing", "lifted_bodies": "image_extraction"}
"""Older names of settings, each with the setting that it stands for. Version 0.1 reads them; 0.2 will not."""


class Settings(BaseSettings):
    """The settings in force; each field is also the variable MMCACHE_<NAME>."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    disable: bool = Field(
        default=False,
        description=(
            "Leaves vLLM as it is: no function of vLLM is replaced, and no component is on. It can only be set as a "
            "variable."
        ),
    )
    block_keys: bool | None = Field(
        default=None,
        description="Puts the state of all images so far into the keys of KV blocks. If false, keys are vLLM's own.",
    )
    image_spans: bool | None = Field(
        default=None,
        description=(
            "Lets the tokens of an image attend to each other in both directions on the CPU, for Gemma 3 and Gemma 4, "
            "and keeps the scheduler from splitting an image between two steps."
        ),
    )
    resumed_images: bool | None = Field(
        default=None,
        description=(
            "Sends the image inputs of a preempted request again when it resumes. Without this, a prefix hit that is "
            "shorter than before ends the engine."
        ),
    )
    image_checkpoints: bool | None = Field(
        default=None,
        description=(
            "Keeps the states of sliding-window, Mamba and GDN layers at image boundaries, so that a second question "
            "about an image is a prefix hit."
        ),
    )
    inner_checkpoints: bool | None = Field(
        default=None,
        description=(
            "Keeps GDN states at image boundaries inside a chunk of the prefill. Without it, a chunk ends at each of "
            "them. It needs `image_checkpoints` to be on."
        ),
    )
    checkpoints_per_request: int = Field(
        default=4, ge=0, le=64, description="The largest number of image boundaries that are kept per request."
    )
    checkpoint_min_tokens: int = Field(
        default=64,
        ge=1,
        description=(
            "The smallest distance in tokens between two checkpoints, and between a checkpoint and the start of the "
            "prompt."
        ),
    )
    lazy_media: bool | None = Field(
        default=None,
        description=(
            "Decodes known images and videos only when their pixels are needed. If unset, it is on, except where vLLM "
            "itself does this."
        ),
    )
    lazy_processing: bool | None = Field(
        default=None,
        description=(
            "Runs vLLM's image processor on several images at the same time, and sends known images to the engine "
            "without pixels where features are kept and `identity` is on. If unset, it follows `lazy_media`. It is "
            "off where `lazy_media` is off."
        ),
    )
    image_extraction: bool | None = Field(
        default=None,
        description=(
            "Takes base64 images out of request bodies before their JSON is parsed. If unset, it follows "
            "`lazy_media`. It needs `lazy_media` to be on."
        ),
    )
    media_records: int = Field(
        default=65536,
        ge=1,
        description=(
            "The largest number of images, of videos and of base64 texts that a process knows, each counted on its "
            "own. The budget `media_records_bytes` may be reached earlier: 64MiB hold 10,922 images or 2,978 videos."
        ),
    )
    media_records_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description=(
            "The memory budget for what is known about images. There is the same budget again for videos, and again "
            "for base64 texts."
        ),
    )
    records_ram_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=0,
        description=(
            "The memory budget of an API server for its records, which save decoding and processing known images again."
        ),
    )
    records_disk_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=0,
        description=(
            "The budget for records in the directory of the store. They are kept in an SQLite file, which needs a "
            "local disk. The records that were used longest ago are removed first. With 0, none are kept there."
        ),
    )
    identity: bool = Field(
        default=True,
        description=(
            "Identifies an image by its content within its tenant (see `tenant_from`), and treats the uuids of "
            "clients as other names for it. If false, uuids are trusted, and only KV blocks are kept apart by "
            "`cache_salt`."
        ),
    )
    tenant_from: str = Field(
        default="cache_salt",
        description=(
            "Says where the tenant of a request is found: `cache_salt` for that field of the request's body, "
            "`header:NAME` for a header that the gateway sets, or `api_key` for the API key that the client used. A "
            "digest of the header or the key takes the place of `cache_salt`, for KV blocks, too. With a header or "
            "the API key, a server does not start without `identity`."
        ),
    )
    tenant_key_file: str | None = Field(
        default=None,
        description=(
            "A file with a 32-byte key (raw, as 64 hexadecimal digits, or in base64) for the digests of tenants' "
            "names. All servers that share a store need the same key. If unset, anybody who sees a digest can find "
            "the tenant's name by trying names."
        ),
    )
    require_tenant: bool = Field(
        default=False,
        description=(
            "Refuses images, videos and audio in requests without a tenant, with status 400, and refuses to start "
            "where `identity` is off."
        ),
    )
    require_salt: bool = Field(default=False, description="The older name of `require_tenant`.")
    image_aliases: int = Field(
        default=65536,
        ge=1,
        description="The largest number of uuids that an API server knows, for all tenants together.",
    )
    kv_event_ids: Literal["vllm", "dynamo"] = Field(
        default="vllm",
        description=(
            "The form of the ids of images in KV events, for routers. With `dynamo`, an id is 16 hexadecimal digits "
            "and 48 zeros, and a uuid of this form that comes with an image gives the id its digits."
        ),
    )
    kv_event_salts: bool = Field(
        default=True,
        description=(
            "Publishes the `cache_salt` of a request in KV events, as vLLM does. If false, a router that does not know "
            "the salts finds their KV blocks, too, and its log shows none."
        ),
    )
    metrics: bool | None = Field(
        default=None,
        description="Shows the counters of the engine on `/metrics`, under names that begin with `mmcache:`.",
    )
    observe: bool = Field(
        default=False, description="Records what each request reused, and why it did not reuse the rest."
    )
    admin_key: SecretStr | None = Field(
        default=None,
        description=(
            "The key that opens `/mmcache`, which is not the API key. It has at least 16 printable ASCII characters "
            "and no spaces. Without an admin key, `/mmcache` tells nothing. `mmcache serve --observe` makes one. It "
            "can only be set as a variable, and no log shows it."
        ),
    )
    admin_key_file: str | None = Field(
        default=None,
        description=(
            "A file whose first line is the admin key. Only its owner and its group may be able to read it. If "
            "`MMCACHE_ADMIN_KEY` is set, too, that variable is used."
        ),
    )
    observe_listen: str | None = Field(
        default=None,
        description="An address HOST:PORT at which `/mmcache` is served, without TLS, instead of at vLLM's port.",
    )
    observe_across_salts: bool = Field(
        default=False,
        description=(
            "Compares requests with different values of `cache_salt`, which gives the reason `other_salt`. Readers of "
            "the records can then learn what other tenants have sent."
        ),
    )
    observe_records: int = Field(
        default=2000, ge=1, description="The largest number of records of requests that an API server keeps."
    )
    observe_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description=(
            "The memory budget of an API server for records of requests. An engine has the same budget for its memory "
            "of earlier requests."
        ),
    )
    observe_file: str | None = Field(
        default=None, description="A file to which records of requests are written, one JSON object per line."
    )
    observe_file_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 16,
        description="The budget for the file of `observe_file` and the previous such file, together.",
    )
    allow_causal_images: bool = Field(
        default=False,
        description=(
            "Runs models whose images attend in both directions on attention backends that can't do this. Their "
            "answers are wrong."
        ),
    )
    features: bool | None = Field(
        default=None,
        description="Keeps the outputs of the vision tower (the features), so that the tower runs once per image.",
    )
    feature_ram_bytes: ByteSize = Field(
        default=ByteSize(2 * 1024**3),
        ge=0,
        description=(
            "The memory budget for features in RAM, for each engine with all its workers on this host. With 0, no "
            "features are kept in RAM, and 256 MiB are used for features in transit."
        ),
    )
    store: str | None = Field(
        default=None,
        repr=False,  # a URL in it may hold a password
        description=(
            "Where features and records are kept beyond RAM: a directory (an absolute path, or one that begins with "
            "~), a URL of Redis or Valkey (`redis://`, `rediss://`, `valkey://`, `valkeys://` or `unix://`, and forms "
            "such as `redis+cluster://` and `redis+sentinel://`), or both, with a space or a comma between them. A "
            "URL with a password can only be set as a variable."
        ),
    )
    store_disk_bytes: ByteSize = Field(
        default=ByteSize(10 * 1024**3),
        ge=0,
        description=(
            "The budget for features in the directory of the store. The packages that were used longest ago are "
            "removed first. A package holds the features of one image, and may take a quarter of the budget at most."
        ),
    )
    store_ttl: Duration = Field(
        default=Duration(7 * 86400),
        description=(
            "Features and records that have not been used for this long are removed. It is a number of seconds, or a "
            "number with s, m, h, d or w after it. With 0, they are only removed when their space is needed."
        ),
    )
    store_key_file: str | None = Field(
        default=None,
        description=(
            "A file with a 32-byte key (raw, as 64 hexadecimal digits, or in base64) with which features and records "
            "are encrypted. It needs the extra `encryption`. Entries that were stored before, without this key, are "
            "not used."
        ),
    )
    store_password_file: str | None = Field(
        default=None,
        description=(
            "A file whose first line is the password of Redis or Valkey, for a `store` whose URL holds none. As with "
            "every file that holds a key, only its owner and its group may be able to read it."
        ),
    )
    store_remote_max_bytes: ByteSize = Field(
        default=ByteSize(512 * 1024**2),
        ge=0,
        description=(
            "The largest package that is sent to Redis or Valkey. It is sent in pieces of 4 MiB. The default limit of "
            "Redis and Valkey themselves is 512 MiB."
        ),
    )
    store_remote_timeout_s: float = Field(
        default=0.02,
        gt=0,
        le=10,
        description=(
            "How many seconds to wait until Redis or Valkey accepts a connection, and for each next piece of data. "
            "After a failure, the server is not asked for 5 s. This time doubles with each further failure, up to 60 "
            "s."
        ),
    )
    store_trusted_network: bool = Field(
        default=False,
        description=(
            "Declares that nobody else can reach Redis or Valkey, or the network that leads to it. There is then no "
            "warning where TLS, a password and encryption are missing."
        ),
    )
    tower_one_by_one: bool = Field(
        default=False,
        description=(
            "Runs the vision tower on one image at a time, where `features` is on. Features then do not depend on the "
            "batch, down to the last bit. The store keeps such features apart from others."
        ),
    )
    store_wait_s: float | None = Field(
        default=None,
        ge=0,
        le=60,
        description=(
            "The longest time in seconds that a request waits for stored features while other requests go on. If "
            "unset, it waits as long as the vision tower would take, and a tier that is slower than the tower is not "
            "asked."
        ),
    )
    store_step_wait_s: float = Field(
        default=0.002,
        ge=0,
        le=1,
        description="The longest time in seconds that a step waits for features when no other request is running.",
    )
    files: str | None = Field(
        default=None,
        repr=False,  # a URL in it may hold a password
        description=(
            "Where images are kept that clients upload to `/v1/files`: a directory (an absolute path), a URL of Redis "
            "or Valkey as in `store`, or one that fsspec can write to, such as `s3://bucket/folder`. All replicas need "
            "the same. If unset, there is no `/v1/files`. It needs `identity` and `lazy_media` to be on. A URL with a "
            "password can only be set as a variable."
        ),
    )
    files_ttl: Duration = Field(
        default=Duration(30 * 86400),
        description=(
            "How long an uploaded file is kept, counted from its last upload. With 0, it is kept until it is deleted."
        ),
    )
    files_quota: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=1 << 20,
        description=(
            "The most that the files of one tenant may take. Requests without a tenant share one quota. Each file is "
            "charged 64 KiB beside its content."
        ),
    )
    files_uuids: bool = Field(
        default=False,
        description=(
            "Keeps images that come with a `uuid` where `files` are, too, so that every replica knows the uuid. They "
            "have a quota of their own of the same size."
        ),
    )
    file_bytes: ByteSize = Field(
        default=ByteSize(32 << 20), ge=1 << 10, description="The largest file that can be uploaded."
    )
    audit: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "The share of those requests with images for which a component reused something, that is computed anew and "
            "compared while the engine has nothing else to do: 0.001 for one in a thousand. With 0, nothing is."
        ),
    )
    audit_mismatches: int = Field(
        default=3,
        ge=1,
        description=(
            "The number of requests whose answers differ in the audit after which a component is switched off."
        ),
    )
    audit_time: float = Field(
        default=0.01,
        gt=0,
        le=100,
        description="How much time the audit may take, as a share of the time that the engine takes for requests.",
    )
    unproven: bool = Field(
        default=False,
        description=(
            "Switches on every component that fits this vLLM, also where it is not proven (see `mmcache prove`). A "
            "component's own setting can still switch it off."
        ),
    )
    trial_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description=(
            "The longest time in seconds that an engine tries components while it starts, where they are not proven on "
            "it. A component that passes is on; another is off. With 0, only what is proven is on."
        ),
    )
    trial_all: bool = Field(
        default=False,
        description="Tries at each start also the components that are proven, or were switched on.",
    )
    attention: Literal["backend", "reference"] = Field(
        default="backend",
        description=(
            "With `reference`, all attention is computed in its plainest form, over the whole keys and values in the "
            "paged cache and in float32. It is slow, and a way to find out whether a kernel is wrong."
        ),
    )
    allow_untested_vllm: bool = Field(
        default=False,
        description=(
            "Tries a vLLM outside the tested range. What does not fit this vLLM is left out. It can only be set as a "
            "variable."
        ),
    )

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, value: str | None) -> str | None:
        store_places(value)
        return value

    @field_validator("files")
    @classmethod
    def _files_are_somewhere(cls, value: str | None) -> str | None:
        if value is not None:
            check_files(value)
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
        where = f"additional-config {CONFIG_KEY}.{key}"
        if key in OLDER_NAMES:
            _warn_of_older_name(where, OLDER_NAMES[key])
        else:
            known(where, key, set(Settings.model_fields) - ONLY_VARIABLES, str)
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
    for name in WITH_URLS:
        if name in (config or {}) and (why := why_not_in_config(name, getattr(read, name))):
            raise SettingsError(f"{spelled(name)} {why}")
    check_together(read, spelled)
    return read


def with_newer_names(config: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """`config` with older names renamed, and the older variables that neither `config` nor a newer variable overrides.

    Returns: values by newer name; and, for messages, the older name that each renamed value was given under. `config`
    comes before variables; of two names of one setting in the same place the newer one counts. An empty variable is
    none. Any process that reads settings.
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
