# SPDX-License-Identifier: Apache-2.0
"""docker/kubernetes: valid for the API, in step with each other, with the image, with the settings and with vLLM."""

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM
from pydantic import ByteSize, TypeAdapter

from tests.system.docker.test_files import STEPS
from vllm_mmcache.base import key_file, settings, tenant
from vllm_mmcache.base.store_url import store_places

REPO = Path(__file__).parents[3]
FOLDER = REPO / "docker" / "kubernetes"
VERSIONS = ("1.30", "1.37")
"""The API's versions that the manifests are validated against: the oldest that they are for, and the newest."""

MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
}
POD: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ENVIRONMENT: dict[str, str] = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
MOUNTS: dict[str, str] = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
VOLUMES: dict[str, Any] = {volume["name"]: volume for volume in POD["volumes"]}
LABELS: dict[str, str] = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]


def num_bytes(quantity: str) -> int:
    """A quantity of Kubernetes, such as 24Gi, in bytes."""
    return TypeAdapter(ByteSize).validate_python(re.sub(r"([KMGT]i)$", r"\1B", quantity))


def test_the_files_are_those_of_the_walk() -> None:
    assert set(MANIFESTS) == {"Deployment", "Service", "PodDisruptionBudget"}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_api_takes_it(kind: str, version: str) -> None:
    """Strict: a field that the schema does not know is an error, too."""
    assert kubernetes_validate.validate(MANIFESTS[kind], version, strict=True) == version


def spoil(path: str, value: object) -> Any:
    """The Deployment with another value at a path of dots; None removes what is there."""
    spoilt = copy.deepcopy(MANIFESTS["Deployment"])
    place = spoilt
    *names, last = path.split(".")
    for name in names:
        place = place[int(name) if name.isdigit() else name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return spoilt


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.template.spec.containers.0.securityContext.readOnlyRootFileSystem", True),  # one letter
        ("spec.template.spec.containers.0.env.0.value", 1),
        ("spec.template.spec.containers.0.startupProbe.httpGet.port", None),
        ("spec.template.spec.containers.0.name", None),
        ("spec.selector", None),
        ("spec.replicas", "two"),
    ],
)
def test_the_api_refuses_what_is_wrong(path: str, value: object) -> None:
    """Negative control."""
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoil(path, value), VERSIONS[-1], strict=True)


def test_all_select_the_same_pods() -> None:
    deployment, service, budget = (MANIFESTS[kind]["spec"] for kind in ("Deployment", "Service", "PodDisruptionBudget"))
    assert deployment["selector"]["matchLabels"] == service["selector"] == budget["selector"]["matchLabels"] == LABELS
    assert POD["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"] == LABELS
    assert 0 < budget["minAvailable"] < deployment["replicas"], "a node could never be drained"
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert [port["targetPort"] for port in service["ports"]] == ["http"]
    probes = [CONTAINER[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all(probe == {"path": "/health", "port": "http"} for probe in probes)
    scraped = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/scrape"] == "true"
    assert int(scraped["prometheus.io/port"]) == ports["http"]


def start_allowed_s() -> int:
    """How long the startup probe waits for a container."""
    probe = CONTAINER["startupProbe"]
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


def test_a_first_start_is_given_its_time() -> None:
    """Nothing that waits for a start gives up before the startup probe does."""
    deployment = MANIFESTS["Deployment"]["spec"]
    default_s = 600  # of Kubernetes, counted from the pod on, so that the image is pulled in that time, too
    assert deployment.get("progressDeadlineSeconds", default_s) > start_allowed_s()
    waits = re.search(r"rollout status deployment/mmcache --timeout=(\d+)m", (REPO / "docs" / "operate.md").read_text())
    assert waits is not None
    assert int(waits[1]) * 60 >= deployment["progressDeadlineSeconds"]
    for path in (REPO / "docker").glob("*.Dockerfile"):
        check = dict(STEPS.instructions(path.read_text()))["HEALTHCHECK"]
        period = re.search(r"--start-period=(\d+)s ", check)
        assert period is not None, path.name
        assert int(period[1]) >= start_allowed_s(), path.name


def test_it_fits_the_image() -> None:
    found = dict(STEPS.instructions((REPO / "docker" / "cuda.Dockerfile").read_text()))
    assert POD["securityContext"]["runAsUser"] == int(found["USER"])
    assert CONTAINER["ports"][0]["containerPort"] == int(found["EXPOSE"])
    assert "command" not in CONTAINER, "the image's entry point is `mmcache serve`"
    for name in ("cpu", "cuda"):
        assert "encryption" in (REPO / "docker" / f"{name}.Dockerfile").read_text(), "store_key_file needs it"


def test_no_more_rights_than_needed() -> None:
    """What tests/system/kubernetes/test_server.py runs under, and what is called `restricted` in Kubernetes."""
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is POD["enableServiceLinks"] is False


def test_what_is_written_lies_on_a_volume() -> None:
    assert MOUNTS.keys() == VOLUMES.keys()
    writable = [place for name, place in MOUNTS.items() if "emptyDir" in VOLUMES[name]]
    for place in (ENVIRONMENT["HOME"], ENVIRONMENT["HF_HOME"], ENVIRONMENT["MMCACHE_STORE"], "/tmp", "/dev/shm"):
        assert any(Path(place).is_relative_to(volume) for volume in writable), place
    assert all(VOLUMES[name]["emptyDir"]["sizeLimit"] for name in MOUNTS if "emptyDir" in VOLUMES[name])


@pytest.fixture
def as_in_the_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The manifest's variables, with a key in the place of the Secret's, of the mode that a volume gives it."""
    (secret,) = (volume["secret"] for volume in VOLUMES.values() if "secret" in volume)
    for name, value in ENVIRONMENT.items():
        if name.startswith(settings.PREFIX):
            monkeypatch.setenv(name, value)
    for name in ("store-key", "tenant-key"):
        key, variable = tmp_path / name, f"MMCACHE_{name.upper().replace('-', '_')}_FILE"
        key.write_text("5" * 64)
        key.chmod(secret["defaultMode"])
        assert ENVIRONMENT[variable] == f"{MOUNTS['secrets']}/{name}"
        monkeypatch.setenv(variable, str(key))


@pytest.mark.usefixtures("as_in_the_pod")
def test_the_settings_are_known_and_right() -> None:
    assert settings.unknown_variables(ENVIRONMENT) == {}
    chosen = settings.load_settings()
    assert chosen.requires_tenant
    assert tenant.parse_source(chosen.tenant_from).header == "x-tenant"
    assert store_places(chosen.store) == ("/var/lib/mmcache/store", None)


@pytest.mark.usefixtures("as_in_the_pod")
def test_the_key_may_be_read_by_the_group_and_by_nobody_else(tmp_path: Path) -> None:
    """The Secret's files belong to root and to the group fsGroup."""
    chosen = settings.load_settings()
    assert chosen.store_key_file is not None
    assert (tmp_path / "store-key").stat().st_mode & 0o777 == 0o440
    assert key_file.read_key(chosen.store_key_file) == bytes.fromhex("5" * 64)


@pytest.mark.usefixtures("as_in_the_pod")
def test_the_store_never_fills_its_volume() -> None:
    """A pod whose volume is above its limit is evicted. Records may take some pages more while they are tidied."""
    chosen = settings.load_settings()
    limit = num_bytes(VOLUMES["store"]["emptyDir"]["sizeLimit"])
    assert (chosen.store_disk_bytes + chosen.records_disk_bytes) * 1.1 < limit
    in_memory = num_bytes(VOLUMES["shm"]["emptyDir"]["sizeLimit"]) + chosen.feature_ram_bytes
    assert in_memory * 4 < num_bytes(CONTAINER["resources"]["limits"]["memory"])


@pytest.mark.process
def test_vllm_takes_the_arguments() -> None:
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_mmcache.cli.serve import command

    model, *rest = CONTAINER["args"]
    parser = make_arg_parser(FlexibleArgumentParser())
    _, served = command(model, rest)[2:4]
    taken = parser.parse_args(command(model, rest)[4:])
    assert (served, taken.model_tag) == ("serve", model)
    assert taken.max_model_len == 32768
    with pytest.raises(SystemExit):
        parser.parse_args([model, "--max-model-length", "32768"])  # control
