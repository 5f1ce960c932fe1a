# SPDX-License-Identifier: Apache-2.0
"""Versions of what is installed, by their metadata. Any process."""

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
