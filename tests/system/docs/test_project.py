# SPDX-License-Identifier: Apache-2.0
"""The files around the code: what a contributor is told to touch is there, and forms, CI and linters are in step."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM

REPO = Path(__file__).parents[3]
ADDRESS = "https://github.com/vllm-mmcache/vllm-mmcache"
FORMS = sorted(form for form in (REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if form.name != "config.yml")
WALKS = {"Add a hook", "Add a component", "Support another image model", "Add a metric", "Release"}


def paths_in(text: str) -> set[str]:
    """The files and folders of this repository that a page names in backticks: those with a slash or a known end."""
    named = re.findall(r"`([\w./-]+)`", text)
    return {
        name
        for name in named
        if re.fullmatch(
            r"(vllm_mmcache|mmcache_tools|tests|tools|docs|docker|scripts|benchmarks)/.*|.*\.(md|toml)", name
        )
        and "NAME" not in name
    }


def test_what_contributors_are_told_to_touch_is_there() -> None:
    text = (REPO / "CONTRIBUTING.md").read_text()
    assert set(re.findall("^## (.+)$", text, re.MULTILINE)) >= WALKS
    paths = paths_in(text)
    assert len(paths) > 30
    assert sorted(path for path in paths if not (REPO / path).exists()) == []


def test_a_path_is_found() -> None:
    """Negative control of the test above."""
    found = paths_in(
        "`vllm_mmcache/gone.py`, `tests/x/`, `docs/NAME.md`, `CHANGELOG.md`, `make lint`, `hooks*.py`, `a/b`"
    )
    assert found == {"vllm_mmcache/gone.py", "tests/x/", "CHANGELOG.md"}


def test_linters_before_a_commit_are_those_of_make_lint() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.+\n)+)", (REPO / "Makefile").read_text(), re.MULTILINE)
    made = [line.removeprefix("\t@").replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    (local,) = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local", "versions are those of .venv"
    assert [hook["entry"] for hook in local["hooks"]] == made
    assert all((hook["language"], hook["pass_filenames"]) == ("system", False) for hook in local["hooks"])


def test_ci_runs_what_anybody_can_run() -> None:
    jobs: dict[str, Any] = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert "bash .ci/run" in [step.get("run") for step in steps]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form(form: Path) -> None:
    """What GitHub asks of a form, and what is needed of a report."""
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input"}
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    required = {field["id"] for field in fields if field.get("validations", {}).get("required")}
    if form.stem != "feature":
        assert required >= {"doctor", "vllm", "model"}
        assert "mmcache doctor MODEL --json" in form.read_text()
        assert f"{ADDRESS}/security/advisories/new" in form.read_text()


def test_there_is_a_form_for_each_kind() -> None:
    assert {form.stem for form in FORMS} == {"bug", "feature", "wrong_answer"}


def test_the_project_has_one_address() -> None:
    """Package metadata, pages and forms name the same; who reviews belongs to its owner."""
    files = [
        REPO / "pyproject.toml",
        REPO / "tools" / "pyproject.toml",
        *REPO.glob("*.md"),
        *REPO.glob(".github/*/*.yml"),
    ]
    texts = [file.read_text() for file in files]
    found = {
        address for text in texts for address in re.findall(r"https://github\.com/[\w-]*mmcache[\w-]*/[\w-]+", text)
    }
    assert found == {ADDRESS}
    urls = tomllib.loads(texts[0])["project"]["urls"]
    assert urls["Homepage"] == ADDRESS
    rules = [line.split() for line in (REPO / ".github" / "CODEOWNERS").read_text().splitlines() if line[:1] not in "#"]
    owner = ADDRESS.split("/")[3]
    assert rules
    assert all(team.startswith(f"@{owner}/") for _, *teams in rules for team in teams)
