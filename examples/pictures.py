# SPDX-License-Identifier: Apache-2.0
"""What both examples share: which pictures there are, and which questions of an earlier run are answered."""

import argparse
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pyarrow.dataset

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def arguments(description: str) -> argparse.ArgumentParser:
    """The command line of an example; it can still be given more."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("pictures", help="a directory, or a URL that fsspec lists, such as s3://bucket/folder")
    parser.add_argument("answers", type=Path, help="a directory for Parquet files; what is answered there is not asked")
    parser.add_argument("--question", action="append", required=True, help="asked about each picture; repeat it")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tenant", help="whose the pictures are, where jobs of several share a store")
    parser.add_argument(
        "--store", help="a directory or a Redis URL that keeps what is known of pictures for other jobs"
    )
    parser.add_argument("--engine", default="{}", help="further arguments of vLLM's engine, as JSON")
    return parser


def pictures_in(place: str) -> list[str]:
    """Paths or URLs of the pictures in a directory and all below it, sorted. Raises: SystemExit for none."""
    files, root = fsspec.core.url_to_fs(place)
    found = sorted(path for path in files.find(root) if Path(path).suffix.lower() in SUFFIXES)
    if not found:
        raise SystemExit(f"no pictures in {place}: expected files that end in {', '.join(sorted(SUFFIXES))}")
    return [files.unstrip_protocol(path) if urlsplit(place).scheme else path for path in found]


def answered(folder: Path) -> set[tuple[str, str]]:
    """The pairs of picture and question that a run before has answered; those that failed are asked again."""
    if not any(folder.glob("*.parquet")):
        return set()
    table = pyarrow.dataset.dataset(folder, format="parquet").to_table(["picture", "question", "error"])
    rows = table.to_pylist()
    return {(row["picture"], row["question"]) for row in rows if not row["error"]}


def engine_arguments(given: dict[str, object], store: str | None) -> dict[str, object]:
    """What the engine is told: prefix caching, and the plugin's store if there is one."""
    settings = {"additional_config": {"mmcache": {"store": store}}} if store else {}
    return {"enable_prefix_caching": True, **settings, **given}
