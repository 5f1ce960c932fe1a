# SPDX-License-Identifier: Apache-2.0
"""`mmcache explain [ID]`: what was reused of the last requests, or of one, and why the rest was not.

Asks a server that records (`mmcache serve --observe`), or reads a record file; needs no vLLM.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_mmcache.base.errors import RecordsError

if TYPE_CHECKING:
    from vllm_mmcache.components.observe.record.schema import Record

URL = "http://127.0.0.1:8000"


def explain(
    record_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="The id of a record, or of a request (chatcmpl-...). Without it, the last requests are listed.",
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help=f"The address of the server. [default: {URL}]")] = None,
    admin_key_file: Annotated[
        str | None,
        typer.Option(
            help=(
                "A file with the server's admin key. Without it, the key is that of MMCACHE_ADMIN_KEY, or of the file "
                "that MMCACHE_ADMIN_KEY_FILE names."
            )
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read a file of recorded requests instead of asking a server.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="How many requests to list.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new requests until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON, one on each line.")] = False,
) -> None:
    """Show for each request what was reused, and why the rest was not.

    The server has to record requests (`mmcache serve MODEL --observe`).
    """
    from vllm_mmcache.base.settings import load_settings
    from vllm_mmcache.components.observe.page import admin
    from vllm_mmcache.components.observe.record import reader as readers

    if file is not None and url is not None:
        raise RecordsError("--url and --file: give one of the two")
    if record_id is not None and follow:
        raise RecordsError("--follow goes with the list, not with one request: leave out the id")
    source: readers.Reader
    if file is not None:
        source = readers.FileReader(file.expanduser())
    else:
        source = readers.ServerReader(
            url or URL, admin.read(admin_key_file) if admin_key_file else admin.admin_key(load_settings())
        )
    if record_id is not None:
        found = source.named(record_id)
        if len(found) == 1:
            tell(found[0], as_json)
        else:
            show_list(found, as_json)
        return
    show_list(source.follow(last) if follow else source.newest(last), as_json)


def tell(record: "Record", as_json: bool) -> None:
    """Print one record: the lines of text.full, or one line of JSON."""
    from vllm_mmcache.components.observe.record import text
    from vllm_mmcache.components.observe.record.schema import to_json

    if as_json:
        print(json.dumps(to_json(record)))
        return
    for line in text.full(record):
        print(line)


def show_list(records: "Iterable[Record]", as_json: bool) -> None:
    """Print each record on a line of its own as it comes; of a source that goes on, it never returns."""
    from vllm_mmcache.components.observe.record import text
    from vllm_mmcache.components.observe.record.schema import to_json

    if not as_json:
        print(text.LIST_HEAD)
    for record in records:
        print(json.dumps(to_json(record)) if as_json else text.list_line(record), flush=True)
