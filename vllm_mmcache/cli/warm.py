# SPDX-License-Identifier: Apache-2.0
"""`mmcache store warm PICTURES --model M`: fills the feature store before anybody asks.

Starts an engine of its own in this process and asks for one token about each picture, read as a server would read it.
The tower runs only for pictures that the store lacks, so it may be stopped and started again, and may run beside a
server. The rest of the arguments goes to vLLM: features depend on dtype, quantization and the processor's settings, so
give the server's own.
"""

import base64
import json
import mimetypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mmcache.base import tenant
from vllm_mmcache.base.errors import EnvironmentProblem, MMCacheError, StoreUnusable, one_line
from vllm_mmcache.base.secret_files import read_secret
from vllm_mmcache.base.store_url import STORE, places_in_use
from vllm_mmcache.cli import preflight
from vllm_mmcache.content.tenant_source import configured_source

if TYPE_CHECKING:
    from vllm import LLM

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})

REFUSED = (OSError, SyntaxError, ValueError)
"""What Pillow raises for what is no picture, and vLLM for a request that it does not take."""

WRITING_S = 600.0  # longest wait for the disk, per batch

Conversation = list[dict[str, Any]]


def warm(
    pictures: Annotated[Path, typer.Argument(help="A directory of pictures, or a text file with one path per line.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VLLM ARGUMENTS]...", help="The server's arguments for vLLM, after --."),
    ] = None,
    model: Annotated[str, typer.Option(help="The model that will be served.")] = "",
    place: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="PATH",
            help=f"The store's directory. Without it, {STORE} names the store, else it is that of `mmcache serve`.",
        ),
    ] = None,
    tenant_name: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            metavar="NAME",
            help="The tenant whose pictures these are: what the header of a request would hold.",
        ),
    ] = None,
    tenant_file: Annotated[
        Path | None,
        typer.Option(
            "--tenant-file",
            metavar="PATH",
            help="A file with the tenant's name, for a name that is a secret, such as an API key or a salt.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="How many pictures are sent to the model at once.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Fill the store with the features of pictures, before anybody asks about them.

    The exit status is 1 if a picture could not be read.
    """
    if not model:
        raise EnvironmentProblem("no model is given: mmcache store warm PICTURES --model MODEL")
    paths = listed(pictures)
    prepare(place)  # before anything reads the settings, which name the store then
    tenant.SALT.set(salt_of(tenant_name, tenant_file))
    preflight.check_vllm()
    report = fill(paths, model, arguments or [], batch)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for failure in report["failed"]:
            print("not read:", ascii(failure["path"])[1:-1], ascii(failure["why"])[1:-1])
        print(f"{report['encoded']} pictures encoded, {report['present']} were there, {len(report['failed'])} not read")
    raise typer.Exit(1 if report["failed"] else 0)


def salt_of(name: str | None, file: Path | None) -> str | None:
    """The salt of the tenant that the options name, as a server with these settings makes it; None for no tenant.

    Raises: EnvironmentProblem for a name that is empty or no text; SettingsError for a file that can't be read, or that
    others may read.
    """
    if name is not None and file is not None:
        raise EnvironmentProblem("--tenant and --tenant-file name a tenant each: give one of the two")
    if file is not None:
        content = read_secret("--tenant-file", str(file), "name a file that holds the tenant's name alone")
        try:
            name = content.decode().strip()
        except UnicodeDecodeError:
            raise EnvironmentProblem(f"--tenant-file {file} is no text: it is to hold the tenant's name") from None
    if name is None:
        return None
    if not name.strip():
        raise EnvironmentProblem("the name of the tenant is empty: give it, or leave the option out for no tenant")
    return configured_source().salt_of(name)


def listed(pictures: Path) -> list[Path]:
    """The pictures of a directory and those below it, or of a list, whose paths may be relative to it.

    Raises: EnvironmentProblem where there is none.
    """
    place = pictures.expanduser()
    try:
        if place.is_dir():
            found = sorted(path for path in place.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
        else:
            lines = place.read_text(encoding="utf-8").splitlines()
            found = [place.parent / Path(line.strip()).expanduser() for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(f"{pictures} can't be read: {error}: give a directory, or a list of paths") from None
    if not found:
        raise EnvironmentProblem(f"there is no picture in {pictures}: files with {', '.join(sorted(ENDINGS))} count")
    return found


def prepare(place: Path | None) -> None:
    """Settle the environment that the engine reads. Raises: StoreUnusable where features would not outlive it."""
    from vllm_mmcache.base.settings import load_settings

    if place is not None:
        os.environ[STORE] = str(place.expanduser().absolute())
    elif (directory := places_in_use(load_settings().store)[0]) and STORE not in os.environ:
        os.environ[STORE] = directory
    if not load_settings().store:
        raise StoreUnusable(f"{STORE} asks for no store: use --dir PATH, or set it")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the store is asked in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the result


def fill(paths: Sequence[Path], model: str, arguments: Sequence[str], batch: int) -> dict[str, Any]:
    """Start the engine, and put every picture to it; the tower runs for those that the store lacks.

    Raises: EnvironmentProblem if the engine does not start, or has no store.
    """
    from rich.console import Console
    from rich.progress import track

    from vllm_mmcache.components.features.engine.hooks import connector_of
    from vllm_mmcache.metrics import counters

    llm = started(model, arguments)
    store = connector_of(llm.llm_engine.engine_core.engine_core.scheduler)
    if store is None:
        raise EnvironmentProblem("this engine has no feature store; its log says why: see `mmcache doctor`")
    failed: dict[Path, str] = {}
    waiting: dict[Path, Conversation] = {}
    before = counters.totals()
    for number, path in enumerate(track(paths, "encoding", console=Console(stderr=True)), 1):
        try:
            waiting[path] = question(path)
        except REFUSED as error:
            failed[path] = str(error)
        if waiting and (len(waiting) == batch or number == len(paths)):
            failed |= asked(llm, waiting)
            waiting.clear()
            store.flush(WRITING_S)  # or what a slow disk is behind with would be let go from RAM before its turn
    seen = {name: int(count - before.get(name, 0)) for name, count in counters.totals().items()}
    llm.llm_engine.engine_core.shutdown()
    return {
        "encoded": seen.get("tower_images", 0),
        "present": seen.get("tower_images_avoided", 0),
        "failed": [{"path": str(path), "why": failed[path]} for path in paths if path in failed],
    }


def started(model: str, arguments: Sequence[str]) -> "LLM":
    """An engine in this process. Raises: EnvironmentProblem if vLLM refuses an argument, or starts none."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_mmcache.cli import preview

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="mmcache store warm PICTURES --"))
    parser.error = preview.refuse
    try:
        parsed = parser.parse_args(["--model", model, "--enable-prefix-caching", *arguments])
        return LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
    except MMCacheError:
        raise
    except Exception as error:  # whatever vLLM, torch or the file system say
        seen = f"{type(error).__name__}: {preview.sentence(error)}"
        raise EnvironmentProblem(f"vLLM starts no engine: {seen}: see `mmcache doctor {model}`") from error


def asked(llm: "LLM", questions: Mapping[Path, Conversation]) -> dict[Path, str]:
    """Have all of these answered; returns which pictures could not be read, and why.

    vLLM refuses a batch as a whole, so one that it refuses is repeated one by one.
    """
    from vllm import SamplingParams

    try:
        llm.chat(list(questions.values()), SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    except REFUSED as error:
        if len(questions) == 1:
            return dict.fromkeys(questions, one_line(error))
        failed = [asked(llm, {path: question}) for path, question in questions.items()]
        return {path: why for each in failed for path, why in each.items()}
    return {}


def question(path: Path) -> Conversation:
    """A conversation about one picture, as a client would send it: a server gives it the same content id.

    Raises: OSError, SyntaxError or ValueError for what is no picture.
    """
    from PIL import Image

    with Image.open(path) as image:
        image.verify()
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return [{"role": "user", "content": content}]
