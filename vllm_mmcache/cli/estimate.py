# SPDX-License-Identifier: Apache-2.0
"""`mmcache estimate LOG...`: what the plugin would save for the requests of a log. Needs no vLLM, model or GPU."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from vllm_mmcache.base.errors import RecordsError

if TYPE_CHECKING:
    from vllm_mmcache.traffic.logs import Log
    from vllm_mmcache.traffic.report import Result
    from vllm_mmcache.traffic.requests import Prompt


def estimate(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG",
            help=(
                "Files of requests in the order in which they were asked: JSON Lines, a JSON list or HAR, or what "
                "`--observe` has recorded; gzip, too. - for what is piped in."
            ),
        ),
    ],
    model: Annotated[str, typer.Option(help="The model that is asked; a wrong name lists all.")] = "qwen3-vl-8b",
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that the KV cache holds; vLLM's log says it at start.")
    ] = 500_000,
    encoder_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that vLLM's encoder cache holds: those of a step, by default.")
    ] = 8_192,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Tokens of a block of the KV cache; vLLM's log says it where it is not 16. [default: what a record "
                "says, or 16]"
            ),
        ),
    ] = None,
    processor_cache: Annotated[
        str, typer.Option(help="vLLM's --mm-processor-cache-gb: GiB, or a size with its unit.")
    ] = "4GiB",
    features: Annotated[
        str, typer.Option(help="Features that the plugin may keep, in RAM and below, such as 500MB or 2GiB.")
    ] = "2GiB",
    chars_per_token: Annotated[float, typer.Option(min=0.1, help="Characters of text that make a token.")] = 4.0,
    tower_tokens_s: Annotated[
        float | None, typer.Option(min=0.1, help="Tokens of images that your vision tower makes in a second.")
    ] = None,
    prefill_tokens_s: Annotated[
        float | None, typer.Option(min=0.1, help="Tokens of prompts that your GPU computes in a second.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the result as a page to this file.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Also draw how large the store should be to this file; needs matplotlib.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Say from logs of requests what this plugin would save.

    Reads requests of OpenAI's chat completions and Responses and of Anthropic's messages, and plays them through the
    caches of stock vLLM and of the plugin; also what a server has recorded with `--observe` in MMCACHE_OBSERVE_FILE.
    Nothing is asked of a server, and nothing is kept of the requests.
    """
    from vllm_mmcache.traffic import models, report
    from vllm_mmcache.traffic import png as png_plot
    from vllm_mmcache.traffic.estimate import Estimate, Sizes
    from vllm_mmcache.traffic.logs import Log

    log = Log([path.expanduser() for path in logs])
    asked = models.named(model)
    page, plot = (path and path.expanduser() for path in (html, png))
    for option, path in ("--html", page), ("--png", plot):
        if path is not None and not path.parent.is_dir():
            raise RecordsError(f"{option} {path} can't be written: there is no directory {path.parent}")
    if plot is not None:
        png_plot.figure_class()  # says at once that matplotlib is not there
    sizes = Sizes(
        kv_tokens=kv_tokens,
        encoder_tokens=encoder_tokens,
        processor_bytes=_bytes(processor_cache, "--processor-cache", unit="GiB"),
        feature_bytes=_bytes(features, "--features"),
        chars_per_token=chars_per_token,
    )
    prompts = _with_progress(log)
    begin = list(islice(prompts, 1))
    first = log.recorded.first
    if first is not None:
        asked = replace(asked, keeps_all_kv=first.keeps_all_kv, state_blocks=first.state_blocks)
    sizes = replace(sizes, block_tokens=block_tokens or (first and first.block_tokens) or sizes.block_tokens)
    played = Estimate(asked, sizes)
    played.add_all(chain(begin, prompts))
    result = report.Result(played, log.unused, log.recorded, report.Speeds(tower_tokens_s, prefill_tokens_s))
    if page is not None:
        _write(page, result)
    if plot is not None and len(curve := played.distances.curve()) > 1:
        png_plot.write(plot, curve, sizes.feature_bytes)
    elif plot is not None:
        print(f"{plot} is not written: no image would be looked for in the store a second time", file=sys.stderr)
    found_nothing = not played.seen.requests
    if as_json:
        print(json.dumps(report.as_json(result) | ({"error": report.verdict(played)} if found_nothing else {})))
    else:
        for line in report.lines(result):
            print(line)
    if found_nothing:
        raise typer.Exit(2)


def _write(path: Path, result: "Result") -> None:
    """The page. Raises: RecordsError where it can't be written."""
    from vllm_mmcache.traffic.page import page

    try:
        path.write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise RecordsError(f"--html {path} can't be written: {error.strerror}") from error


def _with_progress(log: "Log") -> "Iterator[Prompt]":
    """The prompts of a log; a terminal sees how far it has come."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("reading"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        for prompt in log.prompts():
            progress.update(task, completed=log.num_bytes)
            yield prompt


def _bytes(text: str, option: str, unit: str = "") -> int:
    """unit: of a number alone. Raises: RecordsError for what is no size."""
    is_number = text.replace(".", "", 1).isdecimal()
    try:
        if is_number and not unit and float(text):
            raise RecordsError(f"{option} {text!r} has no unit: give a size such as 500MB or 2GiB")
        return int(TypeAdapter(ByteSize).validate_python(text + unit * is_number))
    except ValidationError as error:
        raise RecordsError(f"{option} {text!r} is no size: give one such as 500MB or 2GiB") from error
