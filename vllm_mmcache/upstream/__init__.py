# SPDX-License-Identifier: Apache-2.0
"""Everything that ties mmcache to one range of vLLM versions: the ledger of swaps and the machine that applies it."""


def vllm_version() -> str:
    """The installed vLLM's own version, whatever its distribution is called. Raises: ImportError."""
    from vllm.version import __version__  # light: reads one generated file, but runs vllm/__init__

    return str(__version__)
