# SPDX-License-Identifier: Apache-2.0
"""Who may import what: importing the package stays cheap, and only named files touch vLLM."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vllm_mmcache

PACKAGE = Path(vllm_mmcache.__file__).parent
TOOLS = tomllib.loads((PACKAGE.parent / "tools" / "pyproject.toml").read_text())

# The files that tie a component to vLLM.
TIES = {
    "block_keys/request_hasher.py",
    "features/runner.py",
    "features/scheduler.py",
    "identity/endpoints.py",
    "identity/renderer.py",
    "image_checkpoints/scheduler.py",
    "image_spans/admission/requests.py",
    "image_spans/attention/backend.py",
    "image_spans/scheduler.py",
    "lazy_media/loader.py",
    "lazy_media/video/loader.py",
    "lifted_bodies/server.py",
    "observe/carrier.py",
    "pixels/renderer.py",
    "resumed_images/requests.py",
}
# Others that import vLLM, each inside a function and for a reason of its own.
MAY_IMPORT_VLLM = {
    "upstream/subclasses.py",  # the registry of renderers
    "upstream/__init__.py",  # asks for the version
    "upstream/start.py",  # asks for the platform
    "upstream/proofs.py",  # asks for the device
    "upstream/report.py",  # asks for the renderer
    "cli/doctor.py",  # reports on it
    "cli/foreseen.py",  # lets it make its configuration
    "cli/warm.py",  # starts an engine
    "cli/vllm_main.py",  # is its command line
    "image_spans/attention/registration.py",  # the public registries
    "lazy_media/origin.py",  # opens media in any process
    "lazy_media/video/recorded.py",  # vLLM's pair of media and bytes
    "features/probe.py",
    "features/vllm_facts.py",  # asks for platform, version and ranks
    # What is made of vLLM's items, by vLLM's processor:
    "pixels/item.py",
    "pixels/record.py",
    "pixels/processing.py",
    "pixels/cache.py",
    "pixels/making.py",
    # What starts engines, in processes of its own:
    "prove/arguments.py",
    "prove/checks.py",
    "prove/engines.py",
    "prove/look.py",
    "prove/own.py",
    "prove/own_checks.py",
}


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere, by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_only_named_files_import_vllm() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "vllm" in imported(path)}
    assert found <= TIES | MAY_IMPORT_VLLM


def named(text: str) -> set[str]:
    """The modules of this package that a source names anywhere: in imports, and in strings that are nothing else."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm_mmcache[.\w]*(:[.\w]+)?", str(node.value)):
            names.add(str(node.value).partition(":")[0])
    return {name for name in names if name.partition(".")[0] == "vllm_mmcache"}


def of_tools(names: set[str]) -> set[str]:
    """Those that vllm-mmcache-tools brings."""
    parts = TOOLS["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].values()
    modules = {part.removesuffix(".py").replace("/", ".") for part in parts}
    return {name for name in names if any(f"{name}.".startswith(f"{module}.") for module in modules)}


def test_the_seam_to_the_tools_is_one_file() -> None:
    """What a server runs does not need vllm-mmcache-tools: nothing of it names a module of the tools but tools.py."""
    modules = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    found = {
        str(path.relative_to(PACKAGE)): of_tools(named(path.read_text()))
        for path, module in modules.items()
        if not of_tools({module})
    }
    assert len(found) > 150
    assert {path: names for path, names in found.items() if names} == {"tools.py": {"vllm_mmcache.zoo"}}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("from vllm_mmcache.zoo import FAMILIES", True),
        ("def f():\n    from vllm_mmcache import zoo", True),
        ("import vllm_mmcache.lint.check", True),
        ("from vllm_mmcache.upstream import check", True),
        ("from vllm_mmcache.cli import demo, serve", True),
        ("WORKER = 'vllm_mmcache.demo.run:run'", True),
        ("from vllm_mmcache.upstream import bodies", False),
        ("from vllm_mmcache.environment import check", False),
        ("from vllm_mmcache import zoology", False),
        ("MESSAGE = 'what vllm_mmcache.zoo has'", False),
    ],
)
def test_the_seam_is_seen_to_be_passed_by(text: str, seen: bool) -> None:
    assert bool(of_tools(named(text))) == seen


def loaded_by(modules: str) -> set[str]:
    """What a fresh interpreter has in sys.modules after it imported `modules`, a list with commas."""
    code = f"import sys, {modules}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    found = set(done.stdout.split())
    assert {name.strip() for name in modules.split(",")} <= found
    return found


def test_importing_the_package_is_cheap() -> None:
    found = loaded_by(
        "vllm_mmcache, vllm_mmcache.zoo, vllm_mmcache.block_keys, vllm_mmcache.environment, vllm_mmcache.prove.items"
    )
    assert not found & {"torch", "vllm", "transformers", "numpy", "pydantic", "rich", "typer", "wrapt"}


def test_the_client_is_cheap() -> None:
    found = loaded_by("vllm_mmcache.client")
    assert not found & {"torch", "vllm", "numpy", "PIL", "pydantic", "openai", "httpx", "prometheus_client"}


def test_the_feature_store_loads_what_it_needs() -> None:
    found = loaded_by(
        "vllm_mmcache.features.directory, vllm_mmcache.features.package, vllm_mmcache.features.message, "
        "vllm_mmcache.features.threads"
    )
    assert not found & {"torch", "numpy", "vllm", "redis", "pydantic", "safetensors"}
    found = loaded_by("vllm_mmcache.features.disk, vllm_mmcache.features.remote")
    assert not found & {"torch", "numpy", "vllm", "safetensors"}
    found = loaded_by("vllm_mmcache.records.disk, vllm_mmcache.lazy_media.records")
    assert not found & {"torch", "numpy", "vllm", "redis", "safetensors", "PIL"}
    found = loaded_by("vllm_mmcache.features.store, vllm_mmcache.features.disk")
    assert not found & {"torch", "vllm", "redis"}
    found = loaded_by("vllm_mmcache.features.engine, vllm_mmcache.features.copies")
    assert not found & {"vllm", "redis"}


def test_reading_records_and_templates_needs_no_vllm() -> None:
    found = loaded_by("vllm_mmcache.observe.reader, vllm_mmcache.observe.text, vllm_mmcache.observe.web")
    assert not found & {"torch", "vllm", "transformers", "numpy", "fastapi"}
    found = loaded_by("vllm_mmcache.lint.check, vllm_mmcache.lint.template")
    assert not found & {"torch", "vllm", "transformers", "jinja2", "pydantic"}
