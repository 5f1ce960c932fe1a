# SPDX-License-Identifier: Apache-2.0
"""The patches do for a fork what the plugin does; patches/apply says why, where it does nothing.

Applied to a copy of the installed vLLM, without the plugin, the exactness tests pass; with the plugin, its components
step aside.
"""

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.sizes import WHOLE, larger
from tests.support.vllm_tree import REPO, apply, copy_installed, run_on, unpack_sources

WHEELS = REPO / ".artifacts" / "wheels"
NAMES = sorted(path.stem[5:] for path in (REPO / "patches" / "0.32.0").glob("*.patch"))
TESTS = (
    "tests/system/patches/patched_media.py",
    "tests/engine/exactness/test_exactness.py",
    "tests/engine/image_spans/test_atomic.py",
    "tests/engine/resumed_images/test_resumed_images.py",
    "tests/engine/image_checkpoints/test_checkpoints.py",
    "tests/engine/image_spans/test_gemma4.py",
    "tests/engine/block_keys/test_engine.py",
)
EXACT = (
    "patched_media or (equals_cold_run and (gemma3-main or gemma3-budget96)) or no_span_is_split or adjacent_images "
    "or has_its_images or (workloads_hit and (questions or demos or growing)) or (test_windows and (16 or 128)) "
    "or (preempted_in_its_step and True)"
)
WRONG_ON_STOCK = (
    "gemma3-main-same_again or (workloads_hit and gemma3-main-questions) or (test_windows and 128) "
    "or (leaves_no_keys and True)"
)
IN_CI = f"patched_media or {WRONG_ON_STOCK}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed vLLM; each test leaves it unpatched."""
    return copy_installed(tmp_path_factory.mktemp("patched"))


@pytest.fixture
def patched(tree: Path) -> Path:
    """The copy, with all patches."""
    apply("--reverse", tree)
    assert apply(tree).returncode == 0
    return tree


def counts(said: str) -> dict[str, int]:
    """What pytest's last line counts: passed, failed, ..."""
    return {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error)", said.splitlines()[-1])}


def outcomes_on(tree: Path) -> dict[str, tuple[str, str]]:
    """State and reason of each component, as `mmcache doctor` finds them on a tree."""
    done = run_on(tree, "-m", "vllm_mmcache.cli", "doctor", "--json")
    components = json.loads(done.stdout)["components"]
    return {component: (said["state"], said["reason"]) for component, said in components.items()}


@pytest.mark.engine
def test_exact_without_the_plugin(patched: Path) -> None:
    where = run_on(patched, "-c", "import vllm; print(vllm.__file__)", MMCACHE_DISABLE="1").stdout
    assert Path(where.strip()) == patched / "vllm" / "__init__.py"
    done = run_on(patched, "-m", "pytest", "-q", *TESTS, "-k", EXACT if WHOLE else IN_CI, MMCACHE_DISABLE="1")
    assert done.returncode == 0, done.stdout[-3000:]
    assert counts(done.stdout)["passed"] >= (30 if WHOLE else 8)


@larger
@pytest.mark.engine
def test_wrong_without_the_patches(tree: Path) -> None:
    """Negative control, and what stock does: the same copy, the same tests, patches taken back."""
    apply("--reverse", tree)
    done = run_on(tree, "-m", "pytest", "-q", *TESTS[1:], "-k", WRONG_ON_STOCK, MMCACHE_DISABLE="1")
    assert counts(done.stdout) == {"failed": 4}, done.stdout[-3000:]


@pytest.mark.process
def test_the_plugin_steps_aside(patched: Path) -> None:
    outcomes = outcomes_on(patched)
    aside = {component for component, (_, reason) in outcomes.items() if reason.startswith("vLLM has its own")}
    assert {outcomes[component][0] for component in aside} == {"unneeded"}
    assert aside == {"image_spans", "resumed_images", "image_checkpoints", "lazy_media"}
    others = {component: state for component, (state, _) in outcomes.items() if component not in aside}
    without = ("image_extraction", "lazy_processing", "inner_checkpoints")  # lazy_media, or image_checkpoints
    assert {others.pop(component) for component in without} == {"off"}
    assert others.pop("observe") == "off"  # nobody asked for it
    assert set(others.values()) == {"on"}


@larger
@pytest.mark.engine
def test_the_plugin_works_on_a_part_of_the_patches(tree: Path) -> None:
    """Attention patched, scheduler not: the component stays on for its scheduler's part, and nothing is done twice.

    Identity patched: the patch knows no tenants, so the component stays on, and must win. Of its tests those alone fail
    that say what stock does, since a uuid is not trusted here: the patch is at work.
    """
    part = ("--only", "cpu-attn-mm-prefix", "--only", "content-bound-uuids")
    apply("--reverse", tree)
    assert apply(*part, tree).returncode == 0
    try:
        outcomes = outcomes_on(tree)
        assert outcomes["image_spans"] == outcomes["identity"] == ("on", "")
        files = ("tests/engine/exactness/test_exactness.py", "tests/unit/components/identity/test_hooks.py")
        chosen = "gemma3-main-eight_at or (test_renderer and not different_content)"
        done = run_on(tree, "-m", "pytest", "-q", *files, "-k", chosen)
        failed = re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)
        assert failed == ["test_stock_ids_without_salt_and_arguments", "test_switched_off_by_setting"], done.stdout
        assert counts(done.stdout)["passed"] >= 10
    finally:
        assert apply("--reverse", *part, tree).returncode == 0


@pytest.mark.process
def test_apply_verify_reverse(tree: Path) -> None:
    apply("--reverse", tree)
    file = tree / "vllm" / "v1" / "request.py"
    before = file.read_bytes()
    assert apply("--verify", tree).returncode == 1
    assert apply("--check", tree).returncode == 0
    assert file.read_bytes() == before
    assert apply(tree).returncode == 0
    assert file.read_bytes() != before
    done = apply("--verify", tree)
    assert done.returncode == 0
    assert done.stdout.count(": applied\n") == len(NAMES) == 8
    for again in ([tree], ["--check", tree]):
        done = apply(*again)
        assert (done.returncode, "applied already: " in done.stderr) == (2, True)
    assert apply("--reverse", tree).returncode == 0
    assert file.read_bytes() == before
    done = apply("--reverse", tree)
    assert (done.returncode, "not applied: " in done.stderr) == (2, True)


@pytest.mark.process
def test_any_two_go_together(tree: Path) -> None:
    apply("--reverse", tree)
    for pair in itertools.combinations(NAMES, 2):
        done = apply("--check", *(f"--only={name}" for name in pair), tree)
        assert done.returncode == 0, (pair, done.stderr)


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_each_patch_stands_alone(tree: Path, name: str) -> None:
    apply("--reverse", tree)
    assert apply("--only", name, tree).returncode == 0
    assert apply("--verify", "--only", name, tree).returncode == 0
    assert apply("--reverse", "--only", name, tree).returncode == 0


@pytest.mark.process
def test_what_apply_refuses(tree: Path, tmp_path: Path) -> None:
    apply("--reverse", tree)
    done = apply("--only", "nonsense", tree)
    assert (done.returncode, "no patch nonsense; there are resumed-mm-inputs, " in done.stderr) == (2, True)
    file = tree / "vllm" / "v1" / "request.py"
    before = file.read_text()
    file.write_text(before.replace("def has_encoder_inputs(self) -> bool:", "def has_encoder_inputs(self):"))
    done = apply(tree)
    assert (done.returncode, "mm-replay-boundaries does not fit" in done.stderr) == (2, True)
    assert "vllm/v1/request.py" in done.stderr
    assert "split_at_mm_prefix" not in (tree / "vllm/v1/attention/backends/cpu_attn.py").read_text()
    file.write_text(before)
    done = apply(tmp_path)
    assert (done.returncode, "holds no vllm/__init__.py" in done.stderr) == (2, True)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    done = apply(tmp_path)
    assert (done.returncode, "does not say which vLLM it is" in done.stderr) == (2, True)
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '0.31.0'\n")
    done = apply(tmp_path)
    assert (done.returncode, "there are no patches for vLLM 0.31.0" in done.stderr) == (2, True)


@pytest.mark.process
def test_a_tree_inside_another_repository(tree: Path) -> None:
    """git leaves files alone, and says nothing, that lie below a repository's root; the copy in .venv does."""
    subprocess.run(["git", "init", "-q", str(tree.parent)], check=True)
    try:
        apply("--reverse", tree)
        assert apply("--only", "mm-replay-boundaries", tree).returncode == 0
        assert "mm_boundaries" in (tree / "vllm" / "v1" / "request.py").read_text()
    finally:
        apply("--reverse", "--only", "mm-replay-boundaries", tree)


@pytest.mark.process
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_wheel_of(version: str, tmp_path: Path) -> None:
    """The patches apply to the published wheel and compile."""
    wheels = sorted(WHEELS.glob(f"vllm-{version}-*.whl"))
    if not wheels:
        pytest.skip("no wheel here; `make check-upstream` fetches it and runs this")
    tree = unpack_sources(wheels[0], tmp_path)
    assert apply(tree).returncode == 0
    assert apply("--verify", tree).returncode == 0
    assert apply("--reverse", tree).returncode == 0


@pytest.mark.parametrize(
    "patch", sorted((REPO / "patches").glob("*/*.patch")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_each_message_has_problem_cause_fix_and_test(patch: Path) -> None:
    message, _, diff = patch.read_text().partition("\n---\n")
    assert re.search(r"^Subject: \[PATCH\] \[(Core|CPU|Multimodal)\] .{10,60}$", message, re.MULTILINE)
    for part in ("Problem", "Cause", "Fix", "Test"):
        assert f"\n{part}: " in message
    assert max(map(len, message.splitlines())) <= 76
    assert "mmcache" not in diff, "a patch stands alone"
