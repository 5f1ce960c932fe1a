# SPDX-License-Identifier: Apache-2.0
"""Serves with the naive attention, as the setting attention=reference asks. Worker process."""

from typing import Any

from vllm_mmcache.reference_attention.vllm_layers import ReferenceLayers, serve_with, why_unusable


def serve_with_reference(worker: Any) -> str:
    """From now on this worker's attention is the naive form's. Returns "", or why it can't be, with nothing changed."""
    runner = worker.model_runner
    if reason := why_unusable(runner):
        return reason
    serve_with(ReferenceLayers(runner))
    return ""
