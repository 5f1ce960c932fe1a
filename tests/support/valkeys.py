# SPDX-License-Identifier: Apache-2.0
"""Real Valkey servers as fleets run them: a cluster, a primary with a replica under Sentinel, and one behind TLS."""

import asyncio
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from tests.support.store_server import Server, started
from tests.support.tiers import LONG_S, within

NODE_TIMEOUT_MS = 1000
SERVICE = "mmcache"


class Cluster:
    """Primaries in cluster mode, each with as many replicas; nothing is kept when they are killed."""

    def __init__(self, binary: str, folder: Path, num_primaries: int, num_replicas: int) -> None:
        def node(name: str) -> Server:
            (folder / name).mkdir(parents=True)
            settings = {"cluster-enabled": "yes", "cluster-node-timeout": NODE_TIMEOUT_MS, "dir": folder / name}
            # Full coverage is asked for by default: while a slot has no primary, no node answers.
            settings |= {"repl-diskless-sync-delay": 0, "cluster-replica-validity-factor": 0}
            return started(binary, *(str(word) for key, value in settings.items() for word in (f"--{key}", value)))

        self.primaries = [node(f"primary-{number}") for number in range(num_primaries)]
        self.replicas = [node(f"replica-{number}") for number in range(num_primaries * num_replicas)]
        self.nodes = [*self.primaries, *self.replicas]
        self.url = self.primaries[0].url

    def form(self) -> None:
        """Give each primary its slots, and each replica its primary."""
        bounds = [number * REDIS_CLUSTER_HASH_SLOTS // len(self.primaries) for number in range(len(self.primaries) + 1)]
        for number, server in enumerate(self.primaries):
            server.client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            server.client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in self.nodes[1:]:
            self.nodes[0].client.execute_command("CLUSTER MEET", "127.0.0.1", server.port)
        assert within(LONG_S, lambda: all(len(self.known(server)) == len(self.nodes) for server in self.nodes))
        for number, server in enumerate(self.replicas):
            primary = self.primaries[number % len(self.primaries)]
            server.client.execute_command("CLUSTER REPLICATE", primary.client.execute_command("CLUSTER MYID"))
        assert within(LONG_S, self.is_whole)

    def known(self, server: Server) -> list[str]:
        lines = server.client.execute_command("CLUSTER NODES")
        text = lines.decode() if isinstance(lines, bytes) else "\n".join(lines)
        return [line for line in text.splitlines() if line and "handshake" not in line]

    def is_whole(self) -> bool:
        """Whether each node that runs answers for all slots, and each replica follows its primary."""
        return all(
            info(server, "cluster info")["cluster_state"] == "ok"
            and info(server, "info replication").get("master_link_status", "up") == "up"
            for server in self.nodes
            if server.runs
        )

    def primary_of(self, name: str) -> Server:
        """The node that answers for a name now."""
        slot = key_slot(name.encode())
        for server in self.nodes:
            if server.runs and info(server, "info replication")["role"] == "master":
                for first, last, (_, port, *_), *_ in server.client.execute_command("CLUSTER SLOTS"):
                    if first <= slot <= last:
                        return next(one for one in self.nodes if one.port == port)
        raise AssertionError(f"nobody has slot {slot}")

    def flush(self) -> None:
        for server in self.nodes:
            with suppress(redis.ReadOnlyError):
                server.client.flushall()

    def names(self) -> set[str]:
        """Of all entries, on whichever primary."""
        return {
            name.decode()
            for server in self.nodes
            if server.runs and info(server, "info replication")["role"] == "master"
            for name in server.client.keys("*")
        }

    def kill(self) -> None:
        for server in self.nodes:
            server.kill()


def info(server: Server, command: str) -> dict[str, str]:
    """What INFO or CLUSTER INFO says, by name."""
    connection = server.client.connection_pool.get_connection()
    try:
        connection.send_command(*command.upper().split())
        text = connection.read_response().decode()
    finally:
        server.client.connection_pool.release(connection)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


class Watched:
    """A primary, its replica, and a Sentinel that makes the replica the primary when the primary is gone."""

    def __init__(self, binary: str, folder: Path) -> None:
        folder.mkdir()
        there = ("--dir", str(folder), "--repl-diskless-sync-delay", "0")  # a replica writes a file
        self.primary = started(binary, *there)
        self.replica = started(binary, *there, "--replicaof", "127.0.0.1", str(self.primary.port))
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        self.sentinel = started(binary, config=config, sentinel=True)
        self.servers = [self.primary, self.replica, self.sentinel]
        assert within(LONG_S, lambda: info(self.replica, "info replication")["master_link_status"] == "up")
        assert within(LONG_S, lambda: "slaves=1" in info(self.sentinel, "info sentinel")["master0"])

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{SERVICE}"

    def address(self) -> int:
        """The port of the primary, as Sentinel says."""
        return int(self.sentinel.client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


class Authority:
    """A certificate authority of its own, in files of a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = (
            self._begun(self._subject, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issued(self, *hosts: str) -> tuple[Path, Path]:
        """A certificate for these hosts, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([_general(host) for host in hosts])
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
        certificate = self._begun(subject, key).add_extension(alternatives, critical=False)
        paths = self._folder / f"{self._name}-server.pem", self._folder / f"{self._name}-server.key"
        paths[0].write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@contextmanager
def behind_tls(server: Server, certificate: Path, key: Path) -> Iterator[int]:
    """A port that takes TLS and hands it on to the server in the clear, as stunnel does: the server has no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()
    ports: list[int] = []
    ready = threading.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    async def main() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        ports.append(listening.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        listening.close()

    stop = asyncio.Event()
    loop.set_exception_handler(lambda *_: None)  # of clients that refuse the certificate
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(LONG_S)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LONG_S)
