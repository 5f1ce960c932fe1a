# SPDX-License-Identifier: Apache-2.0
"""The pages are in step with the code: settings, links, components and commands."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import summary
from benchmarks.catalogue import BENCHMARKS
from tests.support.sizes import larger

REPO = Path(__file__).parents[3]
PAGES = sorted({*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *REPO.glob("[a-z]*/README.md")})


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script, REPO / "scripts" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section_of(architecture: str, families_page: Any) -> str:
    """Under which heading the written page has an architecture: what it does not name takes no images, it says."""
    section = ""
    lines = families_page.PAGE.read_text().splitlines()
    for line in lines:
        if line.startswith("## "):
            section = line[3:].lower()
        elif architecture in re.findall(r"\w+", line) and section:
            return section
    return section if families_page.OTHERS in lines else ""


@pytest.mark.process
@larger
def test_the_families_page_has_the_whole_registry() -> None:
    """Every architecture of the installed vLLM stands where the walk puts it, the tested ones with their family."""
    families_page = load("families_page")
    walk = [sys.executable, str(REPO / "scripts" / "families_page.py"), "--json"]
    done = subprocess.run(walk, capture_output=True, text=True, check=True, cwd=REPO, timeout=300)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) > 300
    seen = {architecture: finding.partition(":")[0] for architecture, finding in rows.items()}
    written = {name: section_of(name, families_page) for name in seen}
    known = {name: found for name, found in seen.items() if found != "not looked at"}  # packages may be missing here
    assert {name: written[name] for name in known} == known, "run `make families-page`"
    assert all(written.values())
    assert f"Of the {len(rows)} architectures" in families_page.PAGE.read_text()
    for architecture, family in families_page.tested().items():
        assert f"| `{architecture}` | {family} |" in families_page.PAGE.read_text()


def test_the_settings_page_is_the_models() -> None:
    settings_page = load("settings_page")
    assert settings_page.PAGE.read_text() == settings_page.page(), "run `python scripts/settings_page.py`"


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_and_every_package_is_in_the_index() -> None:
    index = (REPO / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", index))
    pages = {path.name for path in (REPO / "docs").glob("*.md")} - {"README.md"}
    assert pages <= linked, pages - linked
    places = ("vllm_mmcache", "vllm_mmcache/components", "tools/mmcache_tools")
    packages = {path.parent.name for place in places for path in (REPO / place).glob("*/__init__.py")}
    assert packages == set(re.findall(r"`([a-z_]+)/`", index))


def test_the_page_of_the_tests_names_their_folders() -> None:
    """Each component and topic once at least; those of unit/ are the package's own."""
    tests = REPO / "tests"
    tops = ("engine", "system", "lab")
    found = {path.relative_to(tests).parts[:2] for top in tops for path in (tests / top).glob("*/**/test_*.py")}
    named = re.findall(r"`(engine|system|lab)/([a-z_0-9]+)/", (tests / "README.md").read_text())
    assert found == set(named)


def test_unit_mirrors_the_package() -> None:
    unit = REPO / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    assert len(folders) > 15
    assert sorted(folder for folder in folders if not (REPO / "vllm_mmcache" / folder).is_dir()) == []


STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: `(\w+)[\w.]*`", re.MULTILINE)
ROOTS = ("vllm_mmcache", "vllm_mmcache/components/features")


def lost_steps(text: str) -> list[str]:
    """The steps of the walks that name a file which is not there, or a name that the file does not define."""
    lost = []
    for path, name in STEP.findall(text):
        sources = [
            found.read_text() for root in ROOTS if (found := REPO / root / path.removeprefix("vllm_mmcache/")).exists()
        ]
        if not any(re.search(rf"^(?:class|def|async def) {name}\b", source, re.MULTILINE) for source in sources):
            lost.append(f"{path}: {name}")
    return lost


def test_the_walks_of_the_architecture_name_what_is_there() -> None:
    text = (REPO / "docs" / "architecture.md").read_text()
    assert len(STEP.findall(text)) > 15
    assert lost_steps(text) == []
    assert lost_steps("1. `components/identity/hooks.py`: `no_such_hook` does it") != []  # the control
    assert lost_steps("2. `components/identity/none.py`: `identify` does it") != []


def test_every_decision_is_in_the_list() -> None:
    """docs/decisions/README.md has each page once, and each page says what was rejected and what would change it."""
    decisions = REPO / "docs" / "decisions"
    pages = sorted(page.name for page in decisions.glob("*.md") if page.name != "README.md")
    listed = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\): ", (decisions / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == pages
    for page in pages:
        headings = re.findall(r"^## (.+)$", (decisions / page).read_text(), re.MULTILINE)
        assert {"What was decided", "Why", "What was rejected", "What would change it"} <= set(headings), page


def test_the_readme_has_the_two_commands_and_pages_name_targets_that_exist() -> None:
    text = (REPO / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    makefile = (REPO / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert "\nbench-%:" in makefile
    targets |= {f"bench-{name.replace('_', '-')}" for name in BENCHMARKS}
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z0-9-]+)", page.read_text()))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_the_three_hops_lead_to_a_line_and_a_test() -> None:
    """What docs/architecture.md walks through: the page, the line that decides, the test that would fail."""
    walk = (REPO / "docs" / "architecture.md").read_text().partition("## Three hops")[2]
    checkpoints = REPO / "vllm_mmcache" / "components" / "image_checkpoints"
    (line,) = re.findall(r"^ {7}(\S.*)$", walk, re.MULTILINE)
    assert f"    {line}\n" in (checkpoints / "positions.py").read_text()
    assert "class Underway:" in (checkpoints / "vllm_underway.py").read_text()
    tests = REPO / "tests" / "unit" / "components" / "image_checkpoints"
    assert "def test_order(" in (tests / "test_positions.py").read_text()
    assert (REPO / "tests" / "engine" / "image_checkpoints" / "test_checkpoints.py").exists()
    assert "](docs/checkpoints.md)" in (REPO / "README.md").read_text()


@pytest.mark.process
def test_no_name_is_promised_that_no_index_has() -> None:
    """Until vllm-mmcache is on an index, it is installed from a clone or from git; distributions.py knows which."""
    promise = re.compile(r"pip install (?:[^\n`]*['\" ])?vllm-mmcache(?!(?:\[\w+\]|-tools) @ )")
    assert promise.search("    pip install 'vllm-mmcache[cuda]'")
    assert promise.search("pip install vllm-mmcache")
    assert promise.search("pip install vllm-mmcache-tools")
    assert not promise.search("pip install ./tools   # or 'vllm-mmcache-tools @ git+URL#subdirectory=tools'")
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    texts = [file for file in listed if not file.startswith("tests/") and file.endswith((".md", ".py", "Dockerfile"))]
    assert len(texts) > 100
    assert [file for file in texts if promise.search((REPO / file).read_text())] == []


def test_the_walk_and_its_page_are_in_step() -> None:
    """Every command of scripts/first_minutes.py is in the page's table, with a number of seconds, and none else."""
    walk = load("first_minutes")
    (table,) = walk.TABLE.findall(walk.PAGE.read_text())
    assert table.startswith(walk.HEAD), "run: make first-minutes ARGS=--write"
    rows = re.findall(r"^\| `(.*?)` \| \d+ \|", table, re.MULTILINE)
    assert rows == [command for command, _ in walk.STEPS], "run: make first-minutes ARGS=--write"


def test_upstream_comparison_sees_a_lost_test(tmp_path: Path) -> None:
    """The tool behind a table of upgrade.md: reads reports, and tells lost, gained and expected apart."""
    upstream = load("upstream_tests")
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='tests.a' name='one'/><testcase classname='tests.a' name='two'>"
        "<failure/></testcase><testcase classname='tests.a' name='three'><skipped/></testcase></testsuite></testsuites>"
    )
    stock = dict(upstream.read(report))
    assert stock == {"tests/a::one": "passed", "tests/a::two": "failed", "tests/a::three": "skipped"}
    plugin = {"tests/a::one": "failed", "tests/a::two": "passed"}
    assert upstream.compare(stock, plugin) == (["tests/a::two"], ["tests/a::one"], [])
    assert upstream.compare(stock, {}) == ([], ["tests/a::one"], []), "a file that ends early loses its tests"
    upstream.EXPECTED["tests/a::one"] = "for this test"
    assert upstream.compare(stock, plugin)[1:] == ([], ["tests/a::one"])


def test_the_tables_are_made_from_the_results() -> None:
    for path, content in summary.pages().items():
        text = path.read_text()
        assert summary.between_marks(text, summary.BEGIN, content) == text, "run: make bench-table"
