# SPDX-License-Identifier: Apache-2.0
"""The command `mmcache`: one file per verb, and one way to end.

Runs in a short-lived process; `serve` turns that process into vLLM's API server. Verbs import what is heavy
(vLLM, torch, the OpenAI client) when they run, so that `mmcache --help` answers at once. A mistake of the
user is one line on stderr, `error: ...`, and exit status 2; with --json it is `{"error": "..."}` on stdout as well.
Only a bug of ours shows a traceback.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import vllm_mmcache
from vllm_mmcache.base.errors import MMCacheError
from vllm_mmcache.cli import doctor, estimate, explain, preflight, prove, serve, store, tool_commands, uninstall

app = typer.Typer(
    name="mmcache",
    help=(
        "Exact, image-aware caching for vLLM.\n\n"
        "Every command ends with exit status 0 if all is well, with 1 if it has found something wrong, and with 2 if "
        "it could not do what was asked. With --json, what it could not do is a JSON object with the field `error`."
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(is_asked: bool) -> None:
    """Print the version and end, if it was asked for."""
    if is_asked:
        print(f"mmcache {vllm_mmcache.__version__}")
        raise typer.Exit


@app.callback()
def before_all(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What holds for every command; its help is the app's."""


# The list of commands shows short_help whole; it cuts what it takes from a docstring.
app.command(context_settings=serve.PASS_ON, short_help="Serve a model with vLLM and this plugin.")(serve.serve)
app.command(
    context_settings=serve.PASS_ON,
    short_help="Show which components will be on for a model on this machine, and what is wrong.",
)(doctor.doctor)
app.command(short_help="Say from logs of requests what this plugin would save, before it is installed.")(
    estimate.estimate
)
app.command(short_help="Show for each request what was reused, and why the rest was not.")(explain.explain)
app.command(short_help="Check on this machine which components are exact, and switch those on.")(prove.prove)
app.command(short_help="Remove what mmcache keeps on this machine.")(uninstall.uninstall)
app.add_typer(
    store.store_app, name="store", short_help="List, check, shrink, empty or fill the store of features and records."
)
tool_commands.add_to(app)


def main() -> None:
    """Run the command line and exit; the entry point of `mmcache`."""
    try:
        status = typer.main.get_command(app)(standalone_mode=False, prog_name=app.info.name)
    except MMCacheError as error:
        for note in getattr(error, "__notes__", ()):  # the end of a server's log
            print(note, file=sys.stderr)
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if preflight.has_vllm():
            raise
        _fail(f"this needs the package {error.name}, which comes with vLLM: {preflight.vllm_cure()}")
    except Exception as error:
        # Usage errors of typer: their classes moved between typer 0.16 and 0.29, this method did not.
        if isinstance(error, typer.Abort):
            sys.exit(130)
        if not hasattr(error, "format_message"):
            raise
        # No arguments at all: the help is the message, already printed or carried by the error.
        if type(error).__name__ == "NoArgsIsHelpError":
            if text := error.format_message():
                print(text)
            sys.exit(2)
        verb = getattr(getattr(error, "ctx", None), "command_path", app.info.name)
        _fail(f"{_said(error)} (see `{verb} --help`)")
    sys.exit(status if isinstance(status, int) else 0)


def _said(error: Any) -> str:
    """A usage error, with the options that may be meant in the words that typer has for commands."""
    near = getattr(error, "possibilities", None)
    if near:
        return f"No such option: {error.option_name}. Did you mean {' or '.join(sorted(near))}?"
    return str(error.format_message()).removesuffix(".")


def _fail(message: str) -> None:
    message = " ".join(message.split())
    if is_json_asked(sys.argv[1:]):
        print(json.dumps({"error": message}))
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def is_json_asked(arguments: Sequence[str]) -> bool:
    """Whether --json is among the arguments of the verb; what follows `--` is for vLLM."""
    return "--json" in itertools.takewhile(lambda argument: argument != "--", arguments)
