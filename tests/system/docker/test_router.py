# SPDX-License-Identifier: Apache-2.0
"""docker/router.conf in a real nginx: what clients need goes through as it was written, and nothing else does.

The replicas are sockets that note what reaches them. nginx compares a path after decoding it and passes it on as it
came, and vLLM's routes are found after another decoding: a rule has to hold for all three.
"""

import re
import socket
import socketserver
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mmcache_tools.harness.server import free_port

from tests.support.programs import program

pytestmark = pytest.mark.process

CONF = (Path(__file__).parents[3] / "docker" / "router.conf").read_text()
NGINX = (
    "daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}\nhttp {{ access_log off; {temp}\n"
)

FILE = f"file-{0:064x}"
OPEN = (
    "GET /health",
    "GET /v1/models",
    "GET /v1/models?limit=/../metrics",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/embeddings",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/files",
    "GET /v1/files?limit=2",
    f"DELETE /v1/files/{FILE}",
    f"GET /v1/files/{FILE}/content",
)

# Counters and records, however they are written; what the operator of a replica does; what vLLM has for development.
CLOSED = (
    "/metrics",
    "/metrics/",
    "/metrics/x",
    "/metrics?a=1",
    "//metrics",
    "///metrics//",
    "/./metrics",
    "/%6detrics",
    "/%6Detrics/",
    "/metric%73",
    "/%2fmetrics",
    "/%2Fmetrics",
    "/%252fmetrics",
    "/v1/../metrics",
    "/v1/%2e%2e/metrics",
    "/v1/..%2fmetrics",
    "/v1%2f..%2fmetrics",
    "/v1/models/../../metrics",
    "/v1/models/..;/metrics",
    # nginx sees the open path that these come down to, and a replica what they begin with: vLLM mounts /metrics.
    "/metrics/../v1/models",
    "/metrics%2f..%2fv1/models",
    "/metrics/%2e%2e/health",
    "/mmcache/..%2f../health",
    "/mmcache",
    "/mmcache/",
    "/mmcache/data",
    "/mmcache/records?since=0",
    "//mmcache",
    "/%6dmcache",
    "/v1/../mmcache",
    "/",
    "/docs",
    "/openapi.json",
    "/version",
    "/load",
    "/ping",
    "/invocations",
    "/server_info",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/pause",
    "/update_weights",
    "/scale_elastic_ep",
    "/start_profile",
    "/inference/v1/generate",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/chat/completions/render",
    "/v1/responses/resp_1",
    "/v1/models/",
    "/v1/files/",
    "/v1/files/../../metrics",
    f"/v1/files/{FILE}/",
    f"/v1/files/{FILE}/metrics",
    "/v1/models%00",
    "/health/../metrics",
    "/healthz",
    "/V1/models",
)


class Replica(socketserver.ThreadingTCPServer):
    """Answers every request with 200 and its name, and notes the request line and the headers."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[str] = []
        super().__init__(("127.0.0.1", 0), Talk)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Talk(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Replica)
        while line := self.rfile.readline():
            head = [line.decode("latin-1").rstrip("\r\n")]
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                head.append(line.decode("latin-1").rstrip("\r\n"))
            length = next((int(one.split(":")[1]) for one in head if one.lower().startswith("content-length:")), 0)
            self.rfile.read(length)
            self.server.requests.append("\n".join(head))
            body = self.server.name.encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


class Router:
    """nginx with a configuration, in front of two replicas."""

    def __init__(self, folder: Path, conf: str) -> None:
        self.replicas = [Replica("replica-1"), Replica("replica-2")]
        self.port = free_port()
        for replica in self.replicas:
            conf = conf.replace(f"{replica.name}:8000", replica.address)
        conf = conf.replace("listen 8080;", f"listen 127.0.0.1:{self.port};")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temp = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        file = folder / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, temp=temp) + conf + "}\n")
        self._process = subprocess.Popen(
            [program("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(file)], stderr=(folder / "log").open("wb")
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (folder / "log").read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.01)
        raise RuntimeError("nginx does not listen")

    def ask(self, line: str, *headers: str) -> tuple[int, str, list[str]]:
        """Send a request line as it is; the status, the body, and what reached the replicas."""
        for replica in self.replicas:
            replica.requests.clear()
        head = "\r\n".join((f"{line} HTTP/1.1", "Host: public", "Connection: close", *headers))
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(head.encode("latin-1") + b"\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode("latin-1")
        first, _, rest = answer.partition("\r\n")
        return int(first.split()[1]), rest.partition("\r\n\r\n")[2], [r for one in self.replicas for r in one.requests]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)
        for replica in self.replicas:
            replica.shutdown()
            replica.server_close()


Start = Callable[[str], Router]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    routers: list[Router] = []

    def begin(conf: str) -> Router:
        routers.append(Router(tmp_path_factory.mktemp("nginx"), conf))
        return routers[-1]

    yield begin
    for router in routers:
        router.close()


@pytest.fixture(scope="module")
def router(start: Start) -> Router:
    return start(CONF)


@pytest.mark.parametrize("line", OPEN)
def test_what_clients_need_goes_through_as_it_was_written(router: Router, line: str) -> None:
    status, body, (reached,) = router.ask(line, "Authorization: Bearer k", "Content-Length: 0")
    assert (status, reached.splitlines()[0]) == (200, f"{line} HTTP/1.1")
    assert body.rstrip().endswith(("replica-1", "replica-2"))
    assert "Authorization: Bearer k" in reached


def test_a_client_can_not_name_its_tenant(router: Router, start: Start) -> None:
    """Negative control: where the line that throws the header away is missing, it goes through."""
    asked = ("POST /v1/chat/completions", "X-Tenant: somebody else", "x-tenant: a second one", "Content-Length: 0")
    _, _, (reached,) = router.ask(*asked)
    assert "tenant" not in reached.lower()
    _, _, (reached,) = start(re.sub(r"proxy_set_header X-Tenant .*", "", CONF)).ask(*asked)
    assert "somebody else" in reached


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", CLOSED)
def test_nothing_else_reaches_a_replica(router: Router, path: str, method: str) -> None:
    status, body, reached = router.ask(f"{method} {path}", "Content-Length: 0")
    assert reached == []
    assert status in (400, 404)
    assert "replica" not in body


@pytest.mark.parametrize(
    "line", ["GET http://public/metrics", "GET http://x/v1/models/../../metrics", "OPTIONS *", "TRACE /v1/models"]
)
def test_other_forms_of_a_request_reach_no_replica(router: Router, line: str) -> None:
    status, _, reached = router.ask(line)
    assert (reached, status >= 400) == ([], True)


BEGINNINGS = ("/", "//", "http://x", "http://x/", "http://x:1//")
PIECES = ("metrics", "mmcache", "health", "v1/models", "v1", "..", "%2f", "%2e", "%00", *"//.?#;\\@x")


@given(st.sampled_from(BEGINNINGS), st.lists(st.sampled_from(PIECES), max_size=10).map("".join))
@example("http://x/", "health")
def test_what_reaches_a_replica_is_an_open_path_to_the_letter(router: Router, beginning: str, rest: str) -> None:
    _, _, reached = router.ask(f"GET {beginning}{rest}")
    paths = {line.split()[1] for line in OPEN}
    assert all(one.split()[1].partition("?")[0] in paths for one in reached)
    assert (beginning, rest) != ("http://x/", "health") or reached, "an open path goes through"


def test_the_check_can_fail(start: Start) -> None:
    """Negative control: with every path open, the replicas are reached, and see what nginx had decoded."""
    opened = re.sub(r"if \(\$public = 0\) {[^}]*}", "", CONF)
    assert opened != CONF
    router = start(opened)
    for path in ("/metrics/", "/mmcache", "/metrics%2f..%2fv1/models", "/reset_prefix_cache"):
        _, _, (reached,) = router.ask(f"GET {path}")
        assert reached.startswith(f"GET {path} ")


def test_the_router_is_healthy_without_a_replica(router: Router) -> None:
    assert router.ask("GET /router/health")[::2] == (200, [])


def test_a_conversation_stays_on_one_replica(router: Router) -> None:
    def place(session: str) -> str:
        return router.ask("POST /v1/chat/completions", f"X-Session-Id: {session}", "Content-Length: 0")[1]

    places = {session: place(session) for session in "abcdefghijklmnop"}
    assert set(places.values()) == {"replica-1", "replica-2"}
    assert all(place(session) == one for session, one in places.items())


def test_vllm_has_every_path_that_is_open() -> None:
    """A path that vLLM renames would be open for nothing, and its new name closed to clients."""
    entrypoints = Path(sysconfig.get_path("purelib")) / "vllm" / "entrypoints"
    sources = "\n".join(path.read_text() for path in entrypoints.rglob("api_router.py"))
    sources += (entrypoints / "serve" / "instrumentator" / "health.py").read_text()
    routes = set(re.findall(r"router\.(?:get|post)\(\s*\"([^\"]+)\"", sources))
    paths = {line.split()[1].partition("?")[0] for line in OPEN if "/v1/files" not in line}  # those are ours
    assert paths <= routes
    # All others of vLLM's are closed, also those that begin with one that is open.
    (pattern,) = (found for found in re.findall(r'"~(\^\S+)" 1;', CONF) if "files" not in found)
    assert {route for route in routes if re.match(pattern.replace(r"\z", r"\Z"), route)} == paths
