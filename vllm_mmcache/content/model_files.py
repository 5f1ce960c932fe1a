# SPDX-License-Identifier: Apache-2.0
"""Digests of the files that a model's tokenizer and processor are made of, by their content.

A name does not say what they are: a model's directory may be changed in place, and a branch of the hub moves on. Files
are read rather than the objects that were made of them: a tokenizer may be of any class, a processor has code of its
own, and to read them takes milliseconds. Any process, once at start.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from blake3 import blake3

# As vLLM's own list (vllm/transformers_utils/repo_utils.py) of what no tokenizer and no processor reads; then what
# only chats and sampling depend on, and what an item's record does not.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data")
_MEDIA = ("*.png", "*.jp*g", "*.gif", "*.webp", "*.mp[34]", "*.wav", "*.flac", "*.parquet", "*.arrow", "*.ipynb")
_OTHERS = ("*.zip", "*.tar*", "*.index.json", "*.jinja", "chat_template.json", "generation_config.json", "*.md", ".*")
_LEFT_OUT = (*_WEIGHTS, *_MEDIA, *_OTHERS)


def files_digest(name: str, revision: str | None) -> str:
    """Digest of all that a tokenizer or a processor may be made of, of a directory or of a repository of the hub.

    64 hex digits. Where the files can't be found or read, another text each time: then nobody can say that they are the
    same ones.
    """
    folder = folder_of(name, revision)
    with suppress(OSError):
        if folder is not None:
            return _digest(folder, lambda name: not any(fnmatch(name, pattern) for pattern in _LEFT_OUT))
    return _unknown()


def code_digest(name: str, revision: str | None) -> str:
    """Digest of a model's own code, 64 hex digits; empty where it has none, and as files_digest where it isn't found.

    Raises: OSError.
    """
    folder = folder_of(name, revision)
    if folder is None:
        return _unknown()
    return _digest(folder, lambda name: name.endswith(".py")) if any(folder.glob("*.py")) else ""


def folder_of(name: str, revision: str | None) -> Path | None:
    """The directory that a model is loaded from, without asking a hub; None where it is not known."""
    if Path(name).is_dir():
        return Path(name)
    try:
        if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
            from modelscope.hub.snapshot_download import snapshot_download
        else:
            from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # the last for what is not there, or is no name of a repository
        return None


def _unknown() -> str:
    return f"unknown {secrets.token_hex(32)}"


def _digest(folder: Path, is_wanted: Callable[[str], bool]) -> str:
    digest = blake3()
    for path in sorted(folder.iterdir()):
        if is_wanted(path.name) and path.is_file():
            content = path.read_bytes()
            for part in (path.name.encode("utf-8", "surrogateescape"), content):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
