# SPDX-License-Identifier: Apache-2.0
"""Puts the CPU backend of this component in the place of CPU_ATTN, through vLLM's public `register_backend`."""

from vllm_mmcache.base.errors import HookDisturbed
from vllm_mmcache.hooking import installer

PATH = "vllm_mmcache.components.image_spans.vllm_backend.ImageSpanBackend"
OWN = "vllm.v1.attention.backends.cpu_attn:split_at_mm_prefix"  # of vLLM itself; patches/ brings it


def install() -> None:
    """Override CPU_ATTN on the CPU platform, unless it has image spans of its own.

    Raises: HookDisturbed if another plugin has overridden it.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu() or installer.is_there(OWN):
        return
    backend = AttentionBackendEnum.CPU_ATTN
    if backend.is_overridden() and backend.get_path() != PATH:
        raise HookDisturbed(f"CPU_ATTN is overridden by {backend.get_path()}; only one plugin can serve it")
    register_backend(backend, PATH)


def undo() -> None:
    """Give CPU_ATTN back, if it is ours."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if AttentionBackendEnum.CPU_ATTN.get_path() == PATH:
        AttentionBackendEnum.CPU_ATTN.clear_override()
