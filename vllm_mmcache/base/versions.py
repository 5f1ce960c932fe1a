# SPDX-License-Identifier: Apache-2.0
"""Everything that ties mmcache to one range of vLLM versions: the ledger of hooks and the machine that applies it."""

from importlib import metadata


def vllm_version() -> str:
    """The installed vLLM's own version, whatever its distribution is called. Raises: ImportError."""
    from vllm.version import __version__  # light: reads one generated file, but runs vllm/__init__

    return str(__version__)


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, by its metadata, without importing it; None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
