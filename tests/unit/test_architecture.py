# SPDX-License-Identifier: Apache-2.0
"""Who may import what: packages lie in layers without circles, and only named files touch vLLM.

Imports inside functions count as all others do, and so do modules that a string names.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_mmcache

PACKAGE = Path(vllm_mmcache.__file__).parent
# From the lowest layer to the highest: a package imports from those before it.
LAYERS = (
    "version",
    "base",
    "hooking",
    "metrics",
    "content",
    "storage",
    "files",
    "client",
    "traffic",
    "batch",
    "models",
    "reference_attention",
    "components",
    "exactness",
    "trial",
    "lifecycle",
    "audit",
    "prove",
    "environment",
    "cli",
    "plugin",
)
# Components that may import another one.
BESIDE = {
    ("components.image_extraction", "components.lazy_media"),
    ("components.lazy_processing", "components.lazy_media"),
    ("components.features", "components.lazy_processing"),
    ("components.inner_checkpoints", "components.image_checkpoints"),
    ("components.observe", "components.lazy_media"),
}
# In these packages, files of these names alone import vLLM: hooks, and subclasses and callers of its classes.
TOUCHES_VLLM = re.compile(
    r"(audit|batch|components|metrics|models|reference_attention|trial)/(.+/)?(hooks|vllm)(_[a-z_]+)?\.py"
)
# Elsewhere these, each inside a function and for a reason of its own.
MAY_IMPORT_VLLM = {
    "base/versions.py",  # asks for the version
    "hooking/subclasses.py",  # the registry of renderers
    "lifecycle/user_proofs.py",  # asks for the device
    "lifecycle/report.py",  # asks for the renderer
    "lifecycle/tested_engines.py",  # asks for the platform
    "cli/doctor.py",  # reports on it
    "cli/preview.py",  # lets it make its configuration
    "cli/warm.py",  # starts an engine
    "cli/vllm_main.py",  # is its command line
    # What starts engines, in processes of its own:
    "prove/arguments.py",
    "prove/checks.py",
    "prove/look.py",
    "prove/own.py",
    "prove/own_checks.py",
    "prove/rig.py",
}


def imported(text: str) -> Iterator[str]:
    """What a source imports anywhere, inside functions too, by its full name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module: str) -> str:
    """The package that a module of vllm_mmcache belongs to; of components, which one."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["components"] else 1]) or "version"


def graph_of(sources: dict[str, str]) -> dict[str, dict[str, str]]:
    """Which package imports from which, with one such import as an example. sources: module -> text."""
    graph: dict[str, dict[str, str]] = {}
    for module, text in sources.items():
        for name in imported(text):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            if name and package_of(name) != package_of(module):
                graph.setdefault(package_of(module), {})[package_of(name)] = f"{module} imports {name}"
    return graph


def circles(graph: dict[str, dict[str, str]]) -> list[str]:
    """The packages from which imports lead back to themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = set(graph.get(left.pop(), {})) - seen
            seen |= new
            left += new
        return seen

    return [package for package in graph if package in reached(package)]


def against_the_order(graph: dict[str, dict[str, str]]) -> list[str]:
    """Imports from a package that is not below, and that BESIDE does not name."""
    layer = {package: LAYERS.index(package.partition(".")[0]) for one in graph for package in (one, *graph[one])}
    return [
        example
        for package, others in graph.items()
        for other, example in others.items()
        if layer[package] <= layer[other] and (package, other) not in BESIDE
    ]


def sources() -> dict[str, str]:
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in PACKAGE.rglob("*.py")
    }


@pytest.mark.slow
def test_packages_lie_in_layers() -> None:
    graph = graph_of(sources())
    assert against_the_order(graph) == []
    assert circles(graph) == []
    assert len(graph) > 15
    assert all(beside[1] in graph[beside[0]] for beside in BESIDE), "BESIDE names what nobody imports"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "text", "is_wrong"),
    [
        ("base.new", "def f():\n    from vllm_mmcache.components.features import store", True),
        ("storage.new", "from vllm_mmcache import lifecycle", True),
        ("components.identity.new", "from vllm_mmcache.components.observe.record import store", True),
        ("components.observe.new", "from vllm_mmcache.components.lazy_media import media_info", False),
        ("cli.new", "import vllm_mmcache.components.features", False),
    ],
)
def test_a_wrong_import_is_found(module: str, text: str, is_wrong: bool) -> None:
    more = {**sources(), f"vllm_mmcache.{module}": text}
    assert bool(against_the_order(graph_of(more))) == is_wrong


def test_a_circle_is_found() -> None:
    given = {
        "vllm_mmcache.base.a": "from vllm_mmcache.content import b",
        "vllm_mmcache.content.b": "def f():\n    import vllm_mmcache.storage.c",
        "vllm_mmcache.storage.c": "from vllm_mmcache.base.a import x",
        "vllm_mmcache.cli.d": "from vllm_mmcache.base.a import x",
    }
    assert circles(graph_of(given)) == ["base", "content", "storage"]


def test_only_named_files_import_vllm() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "vllm" in {name.partition(".")[0] for name in imported(path.read_text())}
    }
    assert {path for path in found if not TOUCHES_VLLM.fullmatch(path)} == MAY_IMPORT_VLLM


def test_nothing_of_a_server_names_the_tools() -> None:
    """What a server runs does not need vllm-mmcache-tools, which is looked for where a verb or a model needs it."""
    found = {name for name, text in sources().items() if re.search(r"\bmmcache_tools\b", text)}
    assert found == {"vllm_mmcache.base.distributions", "vllm_mmcache.cli.tool_commands"}
