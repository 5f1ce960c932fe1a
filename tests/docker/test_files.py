# SPDX-License-Identifier: Apache-2.0
"""The files in docker/: linted, pinned, not root, healthy, and in step with each other and with `make`.

No daemon is needed. `make docker-steps` does what the CPU file says, which takes minutes.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).parents[2]
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


def hadolint(text: str) -> "subprocess.CompletedProcess[str]":
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, "-"], input=text, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = hadolint(path.read_text())
    assert (done.returncode, done.stdout) == (0, "")


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
    assert "scripts/make_venv python3 /opt/mmcache/venv cpu" in runs
    assert '@scripts/make_venv "$(PYTHON)" "$(VENV)"' in (REPO / "Makefile").read_text()


def test_the_build_context_has_what_the_package_has() -> None:
    """.dockerignore lets through every file of the package, and nothing of tests or results."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    files = set(STEPS.context())
    assert {file for file in listed if file.startswith("vllm_mmcache/")} <= files
    assert {"pyproject.toml", "README.md", "scripts/make_venv"} <= files
    assert {file.partition("/")[0] for file in files} == {"pyproject.toml", "README.md", "scripts", "vllm_mmcache"}


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
    from vllm_mmcache.settings import load_settings, store_places

    for name, value in SERVICES["replica-1"]["environment"].items():
        if name.startswith("MMCACHE_"):
            monkeypatch.setenv(name, value)
    assert store_places(load_settings().store) == ("/var/lib/mmcache/features", "valkey://valkey:6379")
