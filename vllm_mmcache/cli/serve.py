# SPDX-License-Identifier: Apache-2.0
"""`mmcache serve MODEL [vLLM arguments]`: vLLM's API server with prefix caching, its accounting, and kept features.

Checks what would otherwise fail half a minute later, deep in a traceback, then becomes the server (exec): the
same process id, the same signals. Works with both distributions (see vllm_main.py). Imports no vLLM itself.
"""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from vllm_mmcache.base.directories import admin_key_file, default_directory
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.base.store_url import STORE, WITH_URLS, why_not_in_config
from vllm_mmcache.cli import plugins
from vllm_mmcache.cli.preflight import check_vllm, compiler_hint

if TYPE_CHECKING:
    from vllm_mmcache.base.settings import Settings

# Everything after MODEL belongs to vLLM, its --help too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

DEFAULT_PORT = 8000
OBSERVE = "--observe"
HEADLESS = "--headless"  # vLLM starts engines, which an API server on another machine uses
OBJECT_STORES = ("s3://", "gs://", "az://")  # those that vLLM knows (transformers_utils/runai_utils.py)
ADMIN_KEY = "MMCACHE_ADMIN_KEY"
ADMIN_KEY_FILE = "MMCACHE_ADMIN_KEY_FILE"
CONFIG_KEY = "mmcache"
DEFAULTS = ("enable-prefix-caching", "enable-prompt-tokens-details")


def serve(
    model: Annotated[str, typer.Argument(help="A model directory, or a model name that vLLM can resolve.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[VLLM ARGUMENTS]...", help="These are passed on to vLLM as they are.")
    ] = None,
    observe: Annotated[
        bool,
        typer.Option(
            "--observe",
            help=(
                "Record what each request reused and why it missed the rest, and show it at /mmcache. The option may "
                "also follow MODEL."
            ),
        ),
    ] = False,
) -> None:
    """Serve MODEL with vLLM and this plugin.

    Everything that follows MODEL goes to vLLM. `mmcache serve MODEL --help` shows vLLM's options.
    """
    rest = [argument for argument in arguments or [] if argument != OBSERVE]
    observe = observe or OBSERVE in (arguments or [])
    if model.startswith("-"):
        raise EnvironmentProblem(f"the model comes first, seen {model!r}: mmcache serve MODEL [vLLM arguments]")
    if not wants_help(rest):
        check_before_start(model, rest)
        if hint := compiler_hint(rest):
            print(f"mmcache: {hint}", file=sys.stderr)
        wishes = [keep_features(rest), observe_requests() if observe else ""]
        if wanted := ", ".join(filter(None, wishes)):
            print(f"mmcache: wanted: {wanted}. What is so, the server says when its engines are ready", file=sys.stderr)
        if observe and (said := provide_admin_key(rest)):
            print(f"mmcache: {said}", file=sys.stderr)
    elif importlib.util.find_spec("vllm") is None:
        check_vllm()
    become(command(model, rest))


def keep_features(arguments: Sequence[str]) -> str:
    """Ask for features in the user's cache directory, unless a setting names another store or none; in words.

    Raises: SettingsError.
    """
    in_force = settings_of(arguments)
    settled = STORE in os.environ or "store" in in_force.model_fields_set
    place = default_directory()
    if settled or in_force.disable or in_force.features is False or place is None:
        return ""
    os.environ[STORE] = place
    return (
        f"features kept in {place} {in_force.store_ttl.until()} ({STORE}=/path chooses another place, {STORE}= none, "
        "MMCACHE_STORE_TTL another time)"
    )


def observe_requests() -> str:
    """Ask for records, and name our endpoint to vLLM beside every plugin that it would have loaded anyway; in words."""
    from vllm_mmcache.base.settings import load_settings

    if load_settings().disable:
        raise EnvironmentProblem(f"{OBSERVE} and MMCACHE_DISABLE=1: leave out one of the two")
    os.environ[plugins.VARIABLE] = ",".join(dict.fromkeys([*plugins.loaded(), plugins.ENDPOINT]))
    os.environ["MMCACHE_OBSERVE"] = "1"
    return "requests recorded"


def provide_admin_key(arguments: Sequence[str]) -> str:
    """Give the server a key for /mmcache, where none is set; where the page and its key are, in words.

    A terminal is shown the key of this start. All else that is printed is kept by somebody, as the log of a container:
    there the key is in a file of this user's, made once, and only its path is said. A headless node has no page, and
    gets no key. Raises: SettingsError, also for a key file that can't be used.
    """
    from vllm_mmcache.base.settings import load_settings
    from vllm_mmcache.components.observe.page.admin import admin_key

    if HEADLESS in arguments or admin_key(settings_of(arguments)) is not None:
        return ""
    key, page = secrets.token_urlsafe(32), page_address(arguments)
    if sys.stderr.isatty():
        os.environ[ADMIN_KEY] = key
        return f"the admin key of this start: {page}#key={key}"
    try:
        path = str(keep_once(admin_key_file(), key))
    except (OSError, RuntimeError) as error:
        cure = f"name a file that holds one with {ADMIN_KEY_FILE}"
        return f"no admin key could be kept ({error}), so /mmcache tells nothing: {cure}"
    os.environ[ADMIN_KEY_FILE] = path
    admin_key(load_settings())
    return f"the page is {page}, its admin key is in {path} ({ADMIN_KEY_FILE})"


def keep_once(path: Path, secret: str) -> Path:
    """Write `secret` into a file that its owner alone can read, unless there is one. Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        written, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with open(written, "w", encoding="ascii") as file:
                file.write(f"{secret}\n")
            with contextlib.suppress(FileExistsError):  # of another server, which starts as well
                os.link(name, path)
        finally:
            os.unlink(name)
    return path


def page_address(arguments: Sequence[str]) -> str:
    """Where these arguments of vLLM's put the page; the server's log says it for certain. Raises: SettingsError."""
    if own := settings_of(arguments).observe_listen:
        return f"http://{own}/mmcache"
    if option(arguments, "uds") is not None or option(arguments, "config") is not None:
        return "/mmcache"
    host = option(arguments, "host") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if option(arguments, "ssl-certfile") else "http"
    port = option(arguments, "port") or DEFAULT_PORT
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/mmcache"


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether vLLM is only asked for its help: -h, --help or --help=GROUP (vllm/utils/argparse_utils.py)."""
    return any(argument in ("-h", "--help") or argument.startswith("--help=") for argument in arguments)


def check_before_start(model: str, arguments: Sequence[str]) -> None:
    """Raises: EnvironmentProblem or SettingsError for what can be known to fail before vLLM starts."""
    from vllm_mmcache.base.settings import load_settings

    is_disabled = load_settings().disable
    check_vllm()
    if not is_disabled and (why := plugins.why_left_out()):
        raise EnvironmentProblem(
            f"{why}, so nothing of mmcache would run, and nothing could refuse later: name mmcache in "
            f"{plugins.VARIABLE}, or set MMCACHE_DISABLE=1 to serve without it"
        )
    check_passwords(arguments)
    check_model(model)
    check_port(arguments)


def check_passwords(arguments: Sequence[str]) -> None:
    """Raises: EnvironmentProblem where the arguments hold the password of a URL: vLLM logs them before it asks us."""
    for where, given in additional_configs(arguments):
        for name in WITH_URLS if isinstance(given, dict) else ():
            if why := why_not_in_config(name, given.get(name)):
                raise EnvironmentProblem(f"mmcache.{name} in {where} {why}")


def settings_of(arguments: Sequence[str]) -> "Settings":
    """The settings of a server with these arguments: the variables, and what the arguments lay over them.

    Raises: SettingsError.
    """
    from vllm_mmcache.base.settings import load_settings

    given = [config for _, config in additional_configs(arguments)]
    return load_settings(given[-1] if given and isinstance(given[-1], dict) else {})


def additional_configs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What vLLM's arguments say of our settings: where, and the settings. Of several places vLLM takes the last alone.

    vLLM says what is wrong with the rest.
    """
    if config := option(arguments, "config"):
        with contextlib.suppress(Exception):
            import yaml  # type: ignore[import-untyped]  # comes with vLLM

            for key, value in yaml.safe_load(Path(config).read_text(encoding="utf-8")).items():
                if str(key).replace("_", "-") == "additional-config":
                    yield config, _ours(value if isinstance(value, dict) else _parsed(str(value)))
    name = "--additional-config"
    if (value := option(arguments, "additional-config")) is not None:
        yield name, _ours(_parsed(value))
    if dotted := _dotted(arguments):
        yield name, _ours(dotted)


def _dotted(arguments: Sequence[str]) -> dict[str, Any]:
    """What --additional-config.KEY and --additional-config.KEY.NAME give together (vllm/utils/argparse_utils.py)."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        name, equals, given = argument.partition("=")
        name, *keys = name.split(".", 2)
        if keys and name.replace("_", "-") == "--additional-config":
            value = _dotted_value(given if equals else next(iter(arguments[index + 1 :]), ""))
            key, value = keys[0], {keys[1]: value} if keys[1:] else value
            has_both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = found[key] | value if has_both else value
    return found


def _dotted_value(text: str) -> Any:
    """As vLLM reads it: JSON, a number such as 64k or 1M, or the text as it is."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if re.fullmatch(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]", text):
        number, unit = float(text[:-1]), text[-1]
        return int(number * (1000 if unit.islower() else 1024) ** ("kmgt".index(unit.lower()) + 1))
    return text


def _parsed(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return None


def _ours(additional: Any) -> Any:
    return additional.get(CONFIG_KEY) if isinstance(additional, dict) else None


def check_model(model: str) -> None:
    """A model name has at most one slash; anything else that looks like a path must be a model directory.

    What lies in an object store is vLLM's to find.
    """
    if model.lower().startswith(OBJECT_STORES):
        return
    path = Path(model).expanduser()
    if not model or not path.exists():
        if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise EnvironmentProblem(
                f"no model directory {model!r}: give a directory with a config.json, or a model name such as "
                "Qwen/Qwen3-VL-4B-Instruct; `mmcache zoo build qwen3-vl DIR` makes a tiny one"
            )
    elif path.is_dir() and not any((path / name).exists() for name in ("config.json", "params.json")):
        raise EnvironmentProblem(
            f"{model!r} is not a model directory: it has no config.json: give the one that has it; "
            "`mmcache zoo build qwen3-vl DIR` makes a tiny one"
        )


def check_port(arguments: Sequence[str]) -> None:
    """Raises: EnvironmentProblem when the port that the server would listen on is taken or not allowed."""
    value = option(arguments, "port")
    if HEADLESS in arguments or option(arguments, "uds") is not None:
        return
    if value is None and option(arguments, "config") is not None:
        return
    try:
        port = DEFAULT_PORT if value is None else int(value)
        if not 0 <= port <= 65535:
            raise ValueError(port)
    except ValueError:
        raise EnvironmentProblem(f"--port {value}: expected a number from 0 to 65535") from None
    host = option(arguments, "host") or ""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise EnvironmentProblem(f"--host {host}: {error.strerror}: give an address of this machine") from None
        except OSError as error:
            raise EnvironmentProblem(
                f"can't listen on {host or '*'}:{port}: {error.strerror}: stop what uses it, or choose another "
                "with --port"
            ) from None


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value given for --name in vLLM's spelling: dashes or underscores, `--name value` or `--name=value`."""
    value = None
    for index, argument in enumerate(arguments):
        key, equals, given = argument.partition("=")
        if key.startswith("--") and key[2:].replace("_", "-") == name:
            value = given if equals else next(iter(arguments[index + 1 :]), "")
    return value


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """Add our two defaults, unless the arguments or vLLM's --config file say something about them."""
    said = {argument.partition("=")[0].lstrip("-").replace("_", "-").removeprefix("no-") for argument in arguments}
    in_config = ""
    if config := option(arguments, "config"):
        with contextlib.suppress(OSError, ValueError):  # vLLM says what is wrong with the file
            in_config = Path(config).read_text(encoding="utf-8").replace("_", "-")
    return [*arguments, *(f"--{name}" for name in DEFAULTS if name not in said and name not in in_config)]


def command(model: str, arguments: Sequence[str]) -> list[str]:
    """The command that serves: vLLM's own `serve`, by way of ours."""
    model = str(Path(model).expanduser()) if model.startswith("~") else model
    return [sys.executable, "-m", "vllm_mmcache.cli.vllm_main", "serve", model, *with_defaults(arguments)]


def become(command_line: list[str]) -> NoReturn:
    """Replace this process by that command: the same process id, nothing of this program is left. Never returns.

    Raises: OSError where the program can't be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command_line[0], command_line)
