# SPDX-License-Identifier: Apache-2.0
"""What is said about wrong settings: the name that was meant, what a value may be, what excludes what. Any process."""

import difflib
import re
from collections.abc import Callable, Collection
from typing import Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from vllm_mmcache.base import key_file, remote_url
from vllm_mmcache.base.durations import Duration
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.remote_url import SCHEMES
from vllm_mmcache.base.store_url import REMOTE_SCHEMES, redact, store_places, with_password

# Pairs that can't both be meant: (name, value), (name, value), and why.
_APART = "nothing would keep tenants apart"
_CONTRADICTIONS: tuple[tuple[tuple[str, bool], tuple[str, bool], str], ...] = (
    (("disable", True), ("require_salt", True), _APART),
    (("disable", True), ("require_tenant", True), _APART),
    (("require_salt", True), ("identity", False), _APART),
    (("require_tenant", True), ("identity", False), _APART),
    (("image_extraction", True), ("lazy_media", False), "what is taken out of a body is opened by lazy_media"),
    (("observe", True), ("metrics", False), "records travel the way that the metrics do"),
)

# Whoever misspells one of these relies on a protection that is not there.
PROTECTING = frozenset(
    {"identity", "require_salt", "require_tenant", "tenant_from", "tenant_key_file"}
    | {"store_key_file", "store_password_file", "admin_key_file"}
)

# What Kubernetes sets in every container of a namespace for a Service whose name is `mmcache` or begins with `mmcache-`
# (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
_SERVICE = re.compile(
    r"MMCACHE_(?:[A-Z0-9_]+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_PORT = re.compile(r"MMCACHE_(?:[A-Z0-9_]+_)?PORT")
_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://")


def is_of_a_service(variable: str, value: str) -> bool:
    """Whether Kubernetes sets such a variable, so that it says nothing to us: the address of a Service."""
    is_port = _SERVICE_PORT.fullmatch(variable) and _ADDRESS.match(value)
    return bool(is_port or _SERVICE.fullmatch(variable))


def nearest(name: str, names: Collection[str]) -> str | None:
    """The one of `names` that may have been meant; None where none is like it."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def known(where: str, name: str, names: Collection[str], spell: Callable[[str], str]) -> None:
    """Raises: SettingsError for a name that is none of `names`; spell writes one as it was given."""
    if name in names:
        return
    near = nearest(name, names)
    guess = f"did you mean {spell(near)}? " if near else ""
    raise SettingsError(f"unknown setting {where}: {guess}allowed are {', '.join(spell(n) for n in sorted(names))}")


def allowed(name: str, field: FieldInfo) -> str:
    """What the value of a setting may be, in words."""
    annotation = field.annotation
    if annotation in (bool, bool | None):
        return "allowed: 1, true, yes, on, 0, false, no, off"
    if annotation is ByteSize:
        return "allowed: a number of bytes, or a size such as 512MiB or 10GiB"
    if annotation is Duration:
        return "allowed: 0, a number of seconds, or one with s, m, h, d or w after it, such as 7d"
    if name == "admin_key":
        least = key_file.KEY_CHARS
        return f"allowed: {least} printable ASCII characters or more, such as `openssl rand -hex 32` writes"
    if name == "tenant_from":
        return "allowed: cache_salt, api_key, or header:NAME such as header:X-Tenant"
    if name == "store":
        return f"allowed: a directory such as /path, a URL with {', '.join(SCHEMES)}, or one of each"
    if name == "files":
        others = "one of fsspec's such as s3://bucket/folder"
        return f"allowed: a directory such as /path, a URL with {', '.join(SCHEMES)}, or {others}"
    bounds = [str(bound) for bound in field.metadata]
    return ", ".join([f"allowed: {getattr(annotation, '__name__', annotation)}", *bounds])


def check_together(settings: Any, spelled: Callable[[str], str]) -> None:
    """Raises: SettingsError naming both, where two contradict each other; for a secret or a URL that can't be used."""
    for one, other, why in _CONTRADICTIONS:
        if all(getattr(settings, name) is value for name, value in (one, other)):
            said = " and ".join(f"{spelled(name)} = {value}" for name, value in (one, other))
            raise SettingsError(f"{said} contradict each other: {why}. Leave out one of the two")
    if settings.tenant_from != "cache_salt":
        for name, value in (("disable", True), ("identity", False)):
            if getattr(settings, name) is value:
                raise SettingsError(
                    f"{spelled('tenant_from')} = {settings.tenant_from} and {spelled(name)} = {value} contradict each "
                    f"other: {_APART}. Leave out one of the two"
                )
    if settings.tenant_key_file is not None:
        key_file.read_32_bytes(settings.tenant_key_file, "tenant_key_file")
    if settings.store_key_file is not None:
        key_file.read_key(settings.store_key_file)
    for name, url in _remote_urls(settings).items():
        from vllm_mmcache.base.redis_connect import checked  # imports redis

        try:
            checked(url, 1.0)
        except SettingsError as error:
            raise SettingsError(f"{spelled(name)}: {error}") from None


def why_exposed(settings: Any) -> str:
    """Who else may read and plant what is in Redis or Valkey, and what forbids it; empty where something does."""
    if settings.store_key_file is not None or settings.store_trusted_network:
        return ""
    for url in _remote_urls(settings).values():
        if lacks := remote_url.why_exposed(url):
            what = "nothing encrypts: who reaches it can read what images show, and plant answers"
            return f"{redact(url)} has {lacks}, and {what}"
    return ""


def _remote_urls(settings: Any) -> dict[str, str]:
    """By setting, the URLs of Redis or Valkey, with their passwords."""
    _, url = store_places(settings.store)
    found = {} if url is None else {"store": with_password(url, settings.store_password_file)}
    if settings.files is not None and settings.files.startswith(REMOTE_SCHEMES):
        found["files"] = settings.files
    return found


EXPOSED_CURE = (
    "rediss:// with a password, MMCACHE_STORE_KEY_FILE, or MMCACHE_STORE_TRUSTED_NETWORK=1 if nobody else can"
)
