# SPDX-License-Identifier: Apache-2.0
"""The examples of batch jobs, on tiny models: real Ray, its actors and its object store, beside plain LLM().

Needs `pip install '.[ray]'`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.server import CPU_ENV
from mmcache_tools.zoo import build_cached

from tests.support import files, s3
from tests.system.docs.test_docs import REPO
from vllm_mmcache.exactness.conversations import picture

pytest.importorskip("ray.data", reason="pip install '.[ray]'")
pytestmark = [pytest.mark.engine, pytest.mark.answers, pytest.mark.xdist_group("ray_data")]

NUM_PICTURES = 10
QUESTIONS = ("What is in this picture?", "Which colors do you see?")
ENGINE = {
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 2048,
    "dtype": "float32",
    "max_num_seqs": 8,
    "limit_mm_per_prompt": {"image": 1},
}
RUN_S = 240

Answers = dict[tuple[str, str], tuple[str, str]]
"""Answer and error, by the name of the picture and the question."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pictures, one of which is cut off."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(NUM_PICTURES):
        (folder / f"{number}.png").write_bytes(files.saved(picture(7200 + number), "PNG"))
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:100])
    return folder


def run(example: str, model: Path, pictures: Path | str, answers: Path, *arguments: str) -> str:
    """What an example prints. It asks both questions."""
    command = [sys.executable, str(REPO / "examples" / example), str(model), str(pictures), str(answers)]
    for question in QUESTIONS:
        command += ["--question", question]
    command += ["--max-tokens", "8", "--engine", json.dumps(ENGINE), *arguments]
    env = {**os.environ, **CPU_ENV, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}  # a cluster of its own
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def rows_in(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.dataset

    rows: list[dict[str, Any]] = pyarrow.dataset.dataset(folder, format="parquet").to_table().to_pylist()
    return rows


def answers_in(folder: Path) -> Answers:
    return {(Path(row["picture"]).name, row["question"]): (row["answer"], row["error"]) for row in rows_in(folder)}


@pytest.fixture(scope="module")
def expected(model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers of LLM() in one process."""
    folder = tmp_path_factory.mktemp("offline")
    run("offline_questions.py", model, pictures, folder)
    return answers_in(folder)


def test_without_ray(expected: Answers) -> None:
    assert len(expected) == len(QUESTIONS) * (NUM_PICTURES + 1)
    for (name, _), (answer, error) in expected.items():
        assert (answer == "") == (name == "broken.png") == ("Failed to load image" in error)
    assert len({answer for answer, _ in expected.values()}) > NUM_PICTURES, "pictures make a difference"


def test_with_ray(model: Path, pictures: Path, expected: Answers, tmp_path: Path) -> None:
    """The same answers, each row once; what is answered is not asked again, and what has failed is."""
    folder = tmp_path / "answers"
    said = run("ray_data_questions.py", model, pictures, folder, "--cpu", "--tenant", "a")
    assert "mmcache" in said
    assert " in force: " in said
    rows = rows_in(folder)
    assert len(rows) == len(expected)
    assert answers_in(folder) == expected
    (pictures / "broken.png").write_bytes((pictures / "0.png").read_bytes())
    run("ray_data_questions.py", model, pictures, folder, "--cpu", "--tenant", "a")
    added = [row for row in rows_in(folder) if Path(row["picture"]).name == "broken.png" and not row["error"]]
    assert [row["answer"] for row in added] == [expected["0.png", row["question"]][0] for row in added]
    assert len(added) == len(QUESTIONS)
    assert len(rows_in(folder)) == len(expected) + len(QUESTIONS)
    assert "all questions are answered" in run("ray_data_questions.py", model, pictures, folder, "--cpu")


@pytest.mark.skipif(s3.RCLONE is None, reason=s3.NEEDED)
def test_pictures_in_a_bucket(
    model: Path, pictures: Path, expected: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have the pictures' URLs; the engine's actor reads them from a real S3 server, and answers the same."""
    pytest.importorskip("s3fs", reason=s3.NEEDED)
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    for number in range(2):
        shutil.copy(pictures / f"{number}.png", tmp_path / "served" / "bucket")
    with s3.served(tmp_path / "served") as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        run("ray_data_questions.py", model, "s3://bucket", tmp_path / "answers", "--cpu")
    assert {row["picture"] for row in rows_in(tmp_path / "answers")} == {"s3://bucket/0.png", "s3://bucket/1.png"}
    found = answers_in(tmp_path / "answers")
    assert found == {asked: answer for asked, answer in expected.items() if asked in found}
    assert len(found) == 2 * len(QUESTIONS)
