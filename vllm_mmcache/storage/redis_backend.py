# SPDX-License-Identifier: Apache-2.0
"""Entries in Redis or Valkey, which replicas share. They expire by themselves. Any process, any thread.

A read waits `timeout_s` at most for a connection, and for each time that nothing comes. What comes from the server is
checked like any file: whoever may write there can't make a request fail, but can plant content, so it must be as
trusted as the replicas are.

Large entries go there in pieces, since the server has one thread, under a name of the writer's own, which becomes the
entry's name when all of it is there. So a reader finds a whole entry or none. Small ones go many at a time.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import islice
from uuid import uuid4

import redis
from redis.exceptions import MovedError

from vllm_mmcache.base.store_url import error_without_secrets, redact
from vllm_mmcache.storage.backend import Backend, Buffer, EntryInfo, OpenEntry, Usage
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.redis_nodes import LONGEST_REST_S, MAX_TIMEOUTS, Nodes

FIRST_REST_S = 5.0
# No request waits for a write, and several megabytes into a busy server take their time.
WRITE_TIMEOUT_S = 1.0
INCOMING = "incoming:"
INCOMING_TTL_S = 60
"""What a killed writer leaves is gone so long after its last piece."""
NAME_BYTES = 32
AT_ONCE = 500  # names in one question of `scan`, `sizes` and `clear`


class RedisBackend(Backend):
    """The entries of one kind at the server or cluster `url`, up to `max_bytes` each.

    Units: entries live `ttl_s` from their last use, small ones from when they were last put; 0 is for ever. A read
    waits `timeout_s`. Raises: SettingsError for a URL that can't be meant. Makes no connection until it is used.
    """

    tier = "remote"
    failures = (Exception,)  # a server that is no Redis makes redis-py raise anything
    rest_s = FIRST_REST_S, LONGEST_REST_S
    remedy = "is it running, and is its password in the URL?"
    is_shared = True

    def __init__(self, url: str, kind: Kind, *, ttl_s: int, timeout_s: float, max_bytes: int) -> None:
        self.where = str(redact(url))
        self.ttl_s = ttl_s
        self.max_bytes = max_bytes
        said = kind.said.format(self.where)
        self._url = url
        self._prefix, self._pattern = kind.remote_prefix, kind.remote_pattern
        self._slow_s = timeout_s * MAX_TIMEOUTS
        self._nodes = Nodes(url, timeout_s, f"{said} (reading)")
        self._writing_nodes = Nodes(url, max(timeout_s, WRITE_TIMEOUT_S), f"{said} (writing)")

    def name_of(self, name: bytes) -> str:
        """What an entry is called there."""
        return self._prefix + name.hex()

    def open(self, name: bytes) -> AbstractContextManager[OpenEntry | None]:
        """As Backend says. When a small entry was written is not known: so whoever finds it puts it again."""
        return self._nodes.open(self.name_of(name), self._slow_s, self.ttl_s)

    def touch(self, name: bytes) -> bool:
        """As Backend says. No bytes, or what is no string, is no entry: it is never found, so it is written over."""
        entry = self.name_of(name)

        def mark(client: "redis.Redis") -> bool:
            with client.pipeline(transaction=False) as together:
                _ = together.expire(entry, self.ttl_s) if self.ttl_s else together.persist(entry)
                together.strlen(entry)
                answers = together.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                    raise answer
            return isinstance(answers[1], int) and answers[1] > 0

        return self._writing_nodes.run(entry, mark)

    def put(self, name: bytes, parts: Iterable[Buffer], num_bytes: int) -> Usage:
        """As Backend says."""
        entry = self.name_of(name)
        # The braces have it on the node of a cluster that has the entry: a name can't go from one to another.
        incoming = f"{self._prefix}{INCOMING}{{{entry}}}:{uuid4().hex}"

        def write(client: "redis.Redis") -> None:
            sent_bytes = 0
            try:
                for part in parts:
                    sent_bytes += len(part)
                    with client.pipeline(transaction=False) as together:
                        together.append(incoming, memoryview(part))
                        together.expire(incoming, INCOMING_TTL_S)
                        if together.execute()[0] != sent_bytes:
                            raise redis.ResponseError("what was written before is gone: is the server full?")
                with client.pipeline(transaction=False) as together:
                    _ = together.expire(incoming, self.ttl_s) if self.ttl_s else together.persist(incoming)
                    together.rename(incoming, entry)
                    together.execute()
            except redis.ResponseError:
                with suppress(redis.RedisError):  # it expires
                    client.unlink(incoming)
                raise

        self._writing_nodes.run(incoming, write, again=False)  # the parts come once
        return Usage()

    def put_many(self, entries: Mapping[bytes, bytes]) -> Usage:
        """As Backend says. One node should have all of them (`groups`); one that has moved is put at its new node."""
        named = {self.name_of(name): content for name, content in entries.items()}

        def set_all(client: "redis.Redis") -> list[str]:
            with client.pipeline(transaction=False) as together:
                for name, content in named.items():
                    together.set(name, content, ex=self.ttl_s or None)
                answers = together.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not isinstance(answer, MovedError):
                    raise answer
            return [name for name, answer in zip(named, answers, strict=True) if isinstance(answer, MovedError)]

        for name in self._writing_nodes.run(next(iter(named)), set_all):
            self._set_at_its_node(name, named[name])
        return Usage()

    def groups(self, names: list[bytes]) -> list[list[bytes]]:
        """The names that one node has, as far as is known."""
        known = {self.name_of(name): name for name in names}
        return [[known[name] for name in group] for group in self._writing_nodes.by_node(list(known))]

    def reject(self, name: bytes) -> None:
        """Remove the entry."""
        entry = self.name_of(name)
        self._nodes.run(entry, lambda client: client.unlink(entry))

    def scan(self) -> Iterator[EntryInfo]:
        """As Backend says, without what is being written. SCAN keeps nobody waiting; other programs' names stay."""
        for client, names in self._batches(self._prefix + "*"):
            for entry, num_bytes in zip(names, _each(client, "strlen", names), strict=True):
                name = _name_in(entry, self._prefix)
                if name is not None:
                    yield EntryInfo(name, num_bytes or 0)

    def sizes(self) -> tuple[int, int]:
        """How many entries of any format there are, and their bytes."""
        lengths = [
            length
            for client, names in self._batches(self._pattern)
            for length in _each(client, "strlen", names)
            if length is not None
        ]
        return len(lengths), sum(lengths)

    def clear(self) -> int:
        """Remove every entry of any format, for all servers that use it."""
        return sum(
            removed or 0 for client, names in self._batches(self._pattern) for removed in _each(client, "unlink", names)
        )

    def recover(self, error: Exception) -> str:
        """Close the connections that nobody uses: they may hold the rest of an answer, or lead to nobody."""
        for nodes in (self._nodes, self._writing_nodes):
            nodes.drop()
        return error_without_secrets(error, self._url)

    def close(self) -> None:
        """Close all connections."""
        for nodes in (self._nodes, self._writing_nodes):
            nodes.close()

    def _set_at_its_node(self, name: str, content: bytes) -> None:
        self._writing_nodes.run(name, lambda client: client.set(name, content, ex=self.ttl_s or None))

    def _batches(self, pattern: str) -> Iterator[tuple["redis.Redis", list[bytes]]]:
        """Names that match, once each, with the node that has them."""
        for client in self._nodes.primaries():
            seen: set[bytes] = set()  # SCAN may give a name twice

            def names(client: "redis.Redis" = client, seen: set[bytes] = seen) -> Iterator[bytes]:
                for name in client.scan_iter(match=pattern, count=AT_ONCE):
                    if name not in seen:
                        seen.add(name)
                        yield name

            found = names()
            while batch := list(islice(found, AT_ONCE)):
                yield client, batch


def _name_in(entry: bytes, prefix: str) -> bytes | None:
    """The name of an entry that is called so; None for what is no entry of ours."""
    try:
        name = bytes.fromhex(entry.decode().removeprefix(prefix))
    except ValueError:
        return None
    return name if len(name) == NAME_BYTES else None


def _each(client: "redis.Redis", command: str, names: list[bytes]) -> list[int | None]:
    """What the command answers for each name; None for a name of another type than it is for.

    Raises: ResponseError for what this user may not do.
    """
    with client.pipeline(transaction=False) as together:
        for name in names:
            getattr(together, command)(name)
        answers = together.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, redis.exceptions.NoPermissionError):
            raise answer
    return [answer if isinstance(answer, int) else None for answer in answers]
