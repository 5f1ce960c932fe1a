# SPDX-License-Identifier: Apache-2.0
"""Tests that take long, and whose case is a variant of one that CI runs: `make matrix` runs them.

CI has to end within 45 minutes on two cores. Most of a test's time is engines that start, and on Qwen3.5 kernels that
are interpreted, so what is here has a server or an engine of its own, or one of those kernels.
"""

from __future__ import annotations

import re

LEFT: dict[str, str] = {
    # tests of servers, and what of the same CI runs
    r"system/identity/test_endpoints\.py::.*\[.*(generate-plugin-(body|api_key)|embed-plugin-(body|header))": (
        "each endpoint with one way of naming a tenant, each way with an endpoint or the attacks"
    ),
    r"system/identity/test_attacks\.py::.*\[(header|api_key)": "all attacks on tenants that the body names",
    r"system/identity/test_nothing_tells\.py::test_(what_another|the_comparison)": "no secret is written",
    r"system/identity/test_batch\.py::": "files of lines, tests/unit/components/identity",
    r"system/deployments/test_servers\.py::test_two_api": "one server and its engine; ranks, tests/unit/lifecycle",
    r"system/deployments/test_ranks\.py::test_a_component": "agreement of ranks, tests/unit/lifecycle",
    r"system/deployments/test_trials\.py::": "the trial in one process, tests/engine/trial",
    r"system/deployments/test_rust\.py::": "the report of a server without our part, tests/unit/lifecycle",
    r"system/deployments/test_reference_attention\.py::": "the same in this process, tests/engine/reference_attention",
    r"system/kubernetes/test_server\.py::": "the files, and a pod's probes",
    r"system/planted/test_server\.py::": "the same packages and files without a server",
    r"system/page/test_panels\.py::": "the dashboard's metrics on a real server, tests/system/page/test_server.py",
    r"system/page/test_server\.py::test_the_keys": "the page's keys without an engine",
    r"system/patches/test_patches\.py::test_(exact_without|the_plugin_steps)": "the patches apply and compile",
    r"system/test_wheels\.py::test_a_model_of_ones_own": "the wheels' content and imports",
    r"system/lifecycle/test_hook_table\.py::test_(wrong_variable|disable_leaves)": "the orders of plugins",
    r"system/servers/test_admission\.py::test_a_model_(whose_every|that_no)": "an image that no step holds",
    r"system/servers/test_client\.py::.*\[stock-httpx\]": "the client before a server with the plugin",
    r"system/test_lazy_media\.py::test_another_process": "records of media in a store, tests/engine/lazy_media",
    r"system/observe/test_stages\.py::": "what stages say, tests/unit/components/observe",
    r"system/cli/test_doctor\.py::test_models_differ": "the doctor's other tests",
    # tests of engines
    r"engine/image_checkpoints/test_checkpoints\.py::test_(mixed|unique)\w*\[qwen3\.5": "the same on Gemma 3",
    r"engine/image_checkpoints/test_checkpoints\.py::test_other\w*\[qwen3\.5-(chunks|interval)": "qwen3.5-match_unit",
    r"engine/image_checkpoints/test_checkpoints\.py::test_workloads\w*\[qwen3\.5-main-(demos|interleaved)": (
        "qwen3.5's other workloads"
    ),
    r"engine/image_checkpoints/test_speculative\.py::": "drafters in tests/engine/speculative",
    r"engine/exactness/test_exactness\.py::test_equals_cold_run\[qwen3\.5-tiny": "preemption of other families",
    r"engine/image_spans/test_guard\.py::test_(stock_backend|image_longer_than_the_window)": "the other refusals",
    r"engine/image_spans/test_triton_engine\.py::test_equals_cold_run\[gemma4": "Gemma 3, and the kernel on both",
    r"engine/features/test_client_hashes\.py::": "names of clients, tests/engine/identity",
    r"engine/lazy_processing/test_restarts\.py::test_another": "restarts with the same processor",
    r"engine/speculative/test_drafters\.py::test_drafters\[(qwen3-vl-eagle3-prefix|qwen3\.5-mtp)": (
        "MTP on V2 by the recipe of Qwen3.6, tests/system/recipes"
    ),
    r"engine/speculative/test_image_prefix\.py::": "MTP on V2 by the recipe of Qwen3.6, tests/system/recipes",
    r"engine/trial/test_trial\.py::test_(a_planted|nothing)\w*\[qwen3\.5": "the same faults on Qwen3-VL and Gemma 3",
}
"""Pattern of a test's node after `tests/` -> what CI runs all the same."""

LEFT_ON_V2 = (
    r"engine/(?!exactness/).*\[.*qwen3\.5",
    r"engine/exactness/test_exactness\.py::test_equals_cold_run\[qwen3\.5-main-(text_turn|image_on_later_turn)",
    r"engine/inner_checkpoints/test_inner_checkpoints\.py::(?!.*\[whole-one image\])",
    r"engine/features/test_cached_kv\.py::",
    r"engine/image_spans/test_arrivals\.py::test_without_turns",
    r"system/deployments/test_audit\.py::",
    r"system/observe/test_worker_counts\.py::.*\[1\]",
)
"""Patterns of tests marked `any_engine` that CI runs on model runner V1 instead: the kernels of V2 are interpreted."""

_ANY = re.compile("|".join(LEFT))
_ANY_ON_V2 = re.compile("|".join(LEFT_ON_V2))


def is_left(node: str) -> bool:
    """Whether `make matrix` alone runs this test. node: as pytest names it."""
    return _ANY.match(node.removeprefix("tests/")) is not None


def is_left_on_v2(node: str) -> bool:
    """Whether `make matrix` alone runs this test on V2 with async scheduling, and CI on V1."""
    return _ANY_ON_V2.match(node.removeprefix("tests/")) is not None
