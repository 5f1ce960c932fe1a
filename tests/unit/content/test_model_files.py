# SPDX-License-Identifier: Apache-2.0
"""Files that a model's processor is made of: in a directory, in ModelScope's cache, and nowhere."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_mmcache.content import model_files
from vllm_mmcache.content.model_files import code_digest, files_digest

NAME = "somebody/of-no-hub"


def test_what_is_not_found_is_another_one_each_time() -> None:
    for digest in files_digest, code_digest:
        first, second = digest(NAME, None), digest(NAME, None)
        assert first != second
        assert first.startswith("unknown ")


def test_a_model_without_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert code_digest(str(tmp_path), None) == ""
    (tmp_path / "processing.py").write_text("SIZE = 1")
    assert len(code_digest(str(tmp_path), None)) == 64


def test_a_model_of_modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found where ModelScope keeps it, as vLLM finds it."""

    def snapshot_download(model_id: str, *, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        if (model_id, revision) != (NAME, "a revision"):
            raise ValueError("Cannot find the requested files in the cached path")
        return str(tmp_path)

    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    for name in "modelscope", "modelscope.hub", "modelscope.hub.snapshot_download":
        module = ModuleType(name)
        module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "processing.py").write_text("SIZE = 1")
    assert model_files.folder_of(NAME, "a revision") == tmp_path
    assert code_digest(NAME, "a revision") == code_digest(str(tmp_path), None)
    assert model_files.folder_of(NAME, None) is None
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
    assert model_files.folder_of(NAME, "a revision") is None
