# SPDX-License-Identifier: Apache-2.0
"""What CI runs on model runner V2 with synchronous scheduling, which users get with ngram, pooling or their own choice.

V2's kernels are interpreted here, and the two ways of scheduling share most of what the components touch. So this is a
part of what V2 runs with asynchronous scheduling: each family and each component that works in the engine, on the one
engine that most tests of the family share, with negative controls.
"""

from __future__ import annotations

FAMILIES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3")
"""The zoo's first families, by name: every run of the tests reads this, and the zoo takes long to import."""
EXACTNESS = "tests/engine/exactness/test_exactness.py"

SYNCHRONOUS: dict[str, tuple[str, ...]] = {
    "exactness": tuple(
        f"{EXACTNESS}::{test}"
        for family in FAMILIES
        for test in (
            f"test_equals_cold_run[{family}-main-same_again]",
            f"test_equals_cold_run[{family}-main-swapped_image]",
            f"test_wrong_picture_is_detected[{family}]",
        )
    ),
    "block_keys": (
        f"{EXACTNESS}::test_spoiled_kv_is_detected[qwen3-vl]",
        "tests/engine/block_keys/test_engine.py::test_keys_of_the_engine[qwen3-vl]",
    ),
    "image_spans": (f"{EXACTNESS}::test_causal_images_are_detected[gemma3]",),
    "resumed_images": ("tests/engine/resumed_images/test_resumed_images.py::test_a_resumed_request_has_its_images",),
    "image_checkpoints": tuple(
        f"tests/engine/image_checkpoints/test_checkpoints.py::{test}"
        for test in (
            "test_workloads_hit_and_are_exact[gemma3-main-questions]",
            "test_without_checkpoints_the_second_question_misses[gemma3-main]",
            "test_without_checkpoints_the_second_question_misses[qwen3.5-main]",
        )
    ),
    "inner_checkpoints": (
        "tests/engine/inner_checkpoints/test_inner_checkpoints.py::"
        "test_first_requests_take_the_steps_of_stock_and_answer_as_it_does[whole-one image]",
    ),
    "features": tuple(
        f"tests/engine/features/test_tower_runs.py::{test}"
        for test in (
            "test_the_tower_runs_once_per_image[qwen3-vl]",
            "test_the_tower_runs_once_per_image[gemma3]",
            "test_switched_off_it_is_stock[qwen3-vl]",
            "test_weights_that_change_where_nobody_sees_it[qwen3-vl]",
        )
    ),
    "metrics": ("tests/engine/observe/test_overlapped_steps.py::",),
}
"""By component, the tests: nodes as pytest names them, or a file's with `::` at the end."""

_ALL = tuple(node for nodes in SYNCHRONOUS.values() for node in nodes)


def is_synchronous(node: str) -> bool:
    """Whether CI runs this test on V2 with synchronous scheduling."""
    return any(node == one or (one.endswith("::") and node.startswith(one)) for one in _ALL)
