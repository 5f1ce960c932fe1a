# SPDX-License-Identifier: Apache-2.0
"""Redis or Valkey as a file system of fsspec, as far as files of clients need one. API server process, any thread.

A folder of files is one hash, whose fields are the files. So a tenant's files are listed without a look at other names
of the server, and each change is done as a whole. A hash expires by itself when nothing was written to it for as long
as its files may live.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec import AbstractFileSystem

from vllm_mmcache.base.store_url import error_without_secrets
from vllm_mmcache.storage.redis_nodes import Nodes

if TYPE_CHECKING:
    import redis

T = TypeVar("T")

PREFIX = "mmcache:"
TIMEOUT_S = 5.0
"""The longest wait for a connection, and for the next bytes of a file."""
AT_ONCE = 500  # names in one question of SCAN


class RedisFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Paths are TOP/FOLDER/NAME. Each folder below `top` is a hash; folders do not nest.

    ttl_s: seconds after the last write to a folder, at which all of it expires; 0 for never.

    Raises: SettingsError for a URL that can't be used. All methods: OSError when the server fails or refuses; its
    message contains no secret of the URL.
    """

    protocol = "redis"
    cachable = False

    def __init__(self, url: str, top: str, ttl_s: int) -> None:
        super().__init__()
        self._url = url
        self._top = top
        self._nodes = Nodes(url, TIMEOUT_S, "files of clients")
        self._ttl_s = ttl_s

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What lies in a folder: its files, or the folders below it. Raises: FileNotFoundError where there is none."""
        if path == self._top:
            found = [{"name": name, "type": "directory", "size": 0} for name in self._call(self._folders)]
        else:
            key = PREFIX + path
            sizes = self._run(key, lambda client: _sizes(client, key))
            found = [{"name": f"{path}/{name}", "type": "file", "size": size} for name, size in sizes.items()]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [one["name"] for one in found]

    def exists(self, path: str, **_: Any) -> bool:
        """Whether a folder has anything below it."""
        try:
            return bool(self.ls(path))
        except FileNotFoundError:
            return False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The content of a file. Raises: FileNotFoundError."""
        key, name = _key_and_field(path)
        content = self._run(key, lambda client: client.hget(key, name))
        if content is None:
            raise FileNotFoundError(path)
        return bytes(content)[start:end]  # type: ignore[arg-type]

    def cat_ranges(
        self, paths: list[str], starts: Any, ends: Any, max_gap: Any = None, on_error: str = "return", **_: Any
    ) -> list[Any]:
        """The contents of whole files, and a FileNotFoundError for each that is not there; many in one question."""
        found: dict[str, Any] = {}
        for folder, asked in _by_folder(paths).items():
            for start in range(0, len(asked), AT_ONCE):
                key, names = PREFIX + folder, [_key_and_field(path)[1] for path in asked[start : start + AT_ONCE]]
                contents = self._run(key, partial(_contents, key, names))
                found |= {f"{folder}/{name}": content for name, content in zip(names, contents, strict=True)}
        return [FileNotFoundError(path) if (content := found[path]) is None else bytes(content) for path in paths]

    def modified(self, path: str) -> datetime:
        """The server's time: a file that was written just now was written then. Files themselves have no times."""
        key, _ = _key_and_field(path)
        seconds, microseconds = self._run(key, _time)
        return datetime.fromtimestamp(seconds + microseconds / 1e6, UTC)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a file as a whole, over one that is there, whatever `mode` says."""
        key, name = _key_and_field(path)

        def write(client: "redis.Redis") -> None:
            with client.pipeline(transaction=False) as pipeline:
                pipeline.hset(key, name, value)
                if self._ttl_s:
                    pipeline.expire(key, self._ttl_s)
                else:
                    pipeline.persist(key)
                pipeline.execute()

        self._run(key, write)

    def rm_file(self, path: str) -> None:
        """Remove a file. Raises: FileNotFoundError."""
        key, name = _key_and_field(path)
        if not self._run(key, lambda client: client.hdel(key, name)):
            raise FileNotFoundError(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: a folder is there while it has a file."""

    def _run(self, key: str, ask: "Callable[[redis.Redis], T]") -> T:
        return self._call(lambda: self._nodes.run(key, ask))

    def _call(self, ask: "Callable[[], T]") -> T:
        try:
            return ask()
        except Exception as error:  # a server that is no Redis makes redis-py raise anything
            raise OSError(error_without_secrets(error, self._url)) from None

    def _folders(self) -> list[str]:
        below = f"{PREFIX}{self._top}/"
        names = {
            name.decode().removeprefix(PREFIX)
            for client in self._nodes.primaries()
            for name in client.scan_iter(match=f"{below}*", count=AT_ONCE, _type="hash")
        }
        return sorted(names)


def _sizes(client: "redis.Redis", key: str) -> dict[str, int]:
    """The files of a folder and their bytes."""
    names: Any = client.hkeys(key)
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hstrlen(key, name)
        return {name.decode(): size for name, size in zip(names, pipeline.execute(), strict=True)}


def _contents(key: str, names: list[str], client: "redis.Redis") -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hget(key, name)
        return list(pipeline.execute())


def _time(client: "redis.Redis") -> tuple[int, int]:
    said: Any = client.time()
    return int(said[0]), int(said[1])


def _by_folder(paths: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(path.rpartition("/")[0], []).append(path)
    return found


def _key_and_field(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return PREFIX + folder, name
