# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a command of a page: verbs, options, targets, modules, extras, routes and files that aren't there.

Each check yields its findings as text. Nothing is run; vLLM is imported by `vllm_problems` and `vllm_options` alone.
"""

import contextlib
import fnmatch
import functools
import importlib.util
import io
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import typer

from benchmarks.catalogue import BENCHMARKS
from tests.system.docs.shell import ASSIGNMENT, PLACEHOLDER, commands
from tests.system.docs.test_docs import REPO
from vllm_mmcache.base.settings import OLDER_NAMES, ONLY_VARIABLES, PREFIX, Settings
from vllm_mmcache.base.settings_messages import is_of_a_service, nearest
from vllm_mmcache.cli import app, doctor, serve
from vllm_mmcache.components.observe.page.web import routes

Words = Sequence[str]

# Programs that examples may use, and that are not looked into but for the files of the repository that they name.
PROGRAM_NAMES = """
    . : [ apt apt-get awk bash cat cd chmod chown cmp cosign coverage cp cut date deactivate df diff du echo envsubst
    false find git grep gunzip gzip hadolint head helm hf htop huggingface-cli id install jq kill kubectl kustomize less
    ln ls lsof mkdir mktemp mount mv mypy nginx nvidia-smi openssl pgrep pipx podman pre-commit printf promtool ps pwd
    pytest readlink redis-cli redis-server rm rmdir rsync ruff scp sed seq set sh sha256sum shred sleep sort source ss
    ssh stat systemctl tail tar tee test touch tr trap true ulimit umask uname uniq unset unzip valkey-cli valkey-server
    virtualenv wait watch wc xargs xz
    """
PROGRAMS = frozenset(PROGRAM_NAMES.split())
MAKEFILE = (REPO / "Makefile").read_text()
FOLDERS = {path.name for path in REPO.iterdir() if path.is_dir() and not path.name.startswith(".")}
VLLM_VERBS = {"bench", "chat", "collect-env", "complete", "launch", "run-batch", "serve"}
PLACEHOLDERS = re.compile(r"N|[A-Z][A-Z0-9_]+|\.\.\.|…|.*[$<].*")


def problems(words: Words) -> Iterator[str]:
    """What is wrong with one command, vLLM's own arguments left out."""
    program = PurePosixPath(words[0]).name if "bin/" in words[0] else words[0]
    if program in CHECKS:
        yield from CHECKS[program](words)
    elif "/" in program:
        yield from script_problems(words)
    elif program not in PROGRAMS and not PLACEHOLDERS.fullmatch(program):
        yield f"{program}: a command that no check knows; if it is right, name it in command_checks.py"
    yield from path_problems(words)


def path_problems(words: Words) -> Iterator[str]:
    """Words that begin with a folder of the repository name something in it."""
    for word in words:
        path = word.partition("::")[0].rpartition("=")[2]
        is_ours = path.partition("/")[0] in FOLDERS and "/" in path and not re.search(r"[:$<]", path)
        if is_ours and not any(REPO.glob(path.rstrip("/"))):
            yield f"{path}: no such file in the repository"


# The command mmcache


def leaf(words: Words) -> tuple[Any, str, list[str]]:
    """The command that `mmcache VERB ...` names, its name, and what follows. Raises: LookupError for another verb."""
    command, name, rest = typer.main.get_command(app), "mmcache", list(words[1:])
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise LookupError(f"{name} {rest[0]}: no such command; there are {', '.join(command.commands)}")
        command, name = command.commands[rest[0]], f"{name} {rest[0]}"
        del rest[0]
    return command, name, rest


def options_of(command: Any) -> set[str]:
    return {"--help"}.union(*(parameter.opts + parameter.secondary_opts for parameter in command.params))


def mmcache_problems(words: Words) -> Iterator[str]:
    """As its own parser says it."""
    try:
        command, name, rest = leaf(words)
    except LookupError as error:
        yield str(error)
        return
    if hasattr(command, "commands"):
        yield from (f"{name} {word}: no such option" for word in rest if word not in options_of(command))
    elif "--help" not in rest:
        yield from (f"{name}: {what}" for what in parsed(lambda given: command.make_context(name, given), rest))
        if name in ("mmcache serve", "mmcache doctor") and rest and rest[0].startswith("-"):
            unknown = [word for word in rest if word.startswith("-") and word not in options_of(command)]
            yield from (f"{name} {word}: the model comes first" for word in unknown)


def mention_problems(code: str) -> Iterator[str]:
    """Of inline code: verbs and options of mmcache that it names are there, whatever is left out."""
    for words in mentioned(code):
        try:
            command, name, rest = leaf(words)
        except LookupError as error:
            yield str(error)
            continue
        if not is_passed_on(name):
            own = rest[: rest.index("--")] if "--" in rest else rest
            given = [word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)]
            yield from (f"{name} {word}: no such option" for word in given if word not in options_of(command))


def mentioned(code: str) -> Iterator[Words]:
    """The commands in inline code that are of mmcache and name a verb; a line of the log is none."""
    if f'"{code.partition("…")[0]}' in package_source():
        return
    with contextlib.suppress(ValueError):
        for command in commands(code):
            words = command.words
            if words[0] == "mmcache" and len(words) > 1 and re.fullmatch(r"[a-z][a-z-]*", words[1]):
                yield words


@functools.cache
def package_source() -> str:
    return "\n".join(path.read_text() for path in (REPO / "vllm_mmcache").rglob("*.py"))


def is_passed_on(name: str) -> bool:
    return name in ("mmcache serve", "mmcache doctor")


def parsed(parse: Callable[[list[str]], object], given: Words) -> Iterator[str]:
    """What a parser says of arguments. A placeholder may stand for a number, where the parser wants one."""
    said = ""
    for number in (None, "1"):
        tried = [number if number and PLACEHOLDERS.fullmatch(word) else word for word in given]
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
                parse(tried)
            return
        except SystemExit as end:  # argparse
            if not end.code:
                return
            said = said or errors.getvalue().strip().rpartition("error: ")[2]
        except Exception as error:  # typer's classes have moved; this method has not
            if not hasattr(error, "format_message"):
                raise
            said = said or error.format_message()
    yield " ".join(said.split())


# vLLM


def vllm_arguments(words: Words) -> list[str] | None:
    """The arguments of `vllm serve` in a command, the model first; None where there are none."""
    words = [PurePosixPath(words[0]).name if "bin/" in words[0] else words[0], *words[1:]]
    for inner in inside(words):
        return vllm_arguments(inner)
    if words[:2] == ["vllm", "serve"]:
        return words[2:]
    if words[0] != "mmcache":
        return None
    with contextlib.suppress(LookupError):
        _, name, rest = leaf(words)
        if is_passed_on(name):
            own = {serve.OBSERVE} if name == "mmcache serve" else doctor.OPTIONS
            return [word for word in rest if word not in own and word not in ("VLLM", "ARGUMENTS")]
        if name in ("mmcache prove", "mmcache store warm") and "--" in rest:
            after = rest[rest.index("--") + 1 :]
            return ["MODEL", *(word for word in after if word not in ("VLLM", "ARGUMENTS"))]
    return None


@functools.cache
def vllm_parser() -> Any:
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def vllm_problems(words: Words) -> Iterator[str]:
    """What vLLM's own parser says of the arguments that go to vLLM, and our settings in them."""
    arguments = vllm_arguments(words)
    if not arguments or {"--help", "-h"} & set(arguments):
        return
    given = list(arguments)
    if "--config" in given:  # a file of the user's
        at = given.index("--config")
        del given[at : at + 2]
    yield from (f"vllm serve: {what}" for what in parsed(vllm_parser().parse_args, given))
    for where, config in serve.additional_configs(given):
        known = set(Settings.model_fields) - ONLY_VARIABLES
        yield from (f"{where} {serve.CONFIG_KEY}.{key}: no such setting" for key in config or {} if key not in known)


def vllm_options() -> set[str]:
    """All options of `vllm serve`."""
    return set(vllm_parser()._option_string_actions)


def vllm_verb_problems(words: Words) -> Iterator[str]:
    if len(words) > 1 and not words[1].startswith("-") and words[1] not in VLLM_VERBS:
        yield f"vllm {words[1]}: no such command"


# Containers


def inside(words: Words) -> Iterator[Words]:
    """The command that runs in a container: that of `exec`, or what an image of ours is given."""
    if words[0] in ("docker", "podman", "kubectl"):
        ours = [at for at, word in enumerate(words) if re.fullmatch(r"(?:[\w.:-]+/)*vllm-mmcache(?:[:@].*)?", word)]
        if words[0] == "kubectl":
            if "exec" in words and "--" in words:
                yield words[words.index("--") + 1 :]
        elif "exec" in words:
            after = list(words[words.index("exec") + 1 :])
            while after and after[0].startswith("-"):
                del after[0]
            yield after[1:]
        elif "run" in words and ours and ours[-1] > words.index("run"):
            entry = [words[at + 1] for at, word in enumerate(words) if word == "--entrypoint"] or ["mmcache", "serve"]
            if words[ours[-1] + 1 :]:
                yield [*entry, *words[ours[-1] + 1 :]]


def container_problems(words: Words) -> Iterator[str]:
    for command in inside(words):
        if command:
            yield from problems(command)


# make, Python and pip


def make_problems(words: Words) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    targets |= {f"bench-{name.replace('_', '-')}" for name in BENCHMARKS}
    named = [word for word in words[1:] if not word.startswith("-") and not ASSIGNMENT.match(word)]
    yield from (f"make {name}: no such target" for name in named if name not in targets and name.islower())
    for variable, value in (word.split("=", 1) for word in words[1:] if ASSIGNMENT.match(word)):
        if not re.search(rf"\$[({{]{variable}[)}}]|\$\(or \$\({variable}\)", MAKEFILE):
            yield f"make {variable}=: the Makefile does not use it"
        given = commands(f"program {value}")[0].words[1:]
        for name in named if variable == "ARGS" else ():
            for found in re.findall(r"-m ([\w.]+)", recipe(name)):
                yield from option_problems(found, given)
            for verb in re.findall(r"/mmcache (\w+) \$\(ARGS\)", recipe(name)):
                yield from mmcache_problems(["mmcache", verb, *given])


def recipe(target: str) -> str:
    rule = re.escape(target) if f"\n{target}:" in MAKEFILE else "bench-%"
    found = re.search(rf"^{rule}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    return found[1] if found else ""


def option_problems(module: str, words: Words) -> Iterator[str]:
    """Options of a module of this repository are written in its source, or in that of its neighbours."""
    file = find(module)
    if file is None or not file.is_relative_to(REPO):
        return
    yield from unwritten_options(module, source_beside(file), words)


def source_beside(file: Path) -> str:
    """The source of a file and its neighbours."""
    return "\n".join(path.read_text() for path in file.parent.glob("*.py"))


def unwritten_options(name: str, source: str, words: Words) -> Iterator[str]:
    given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)} - {"--help"}
    yield from (f"{name} {option}: no such option" for option in sorted(given) if f'"{option}"' not in source)


def find(module: str) -> Path | None:
    """The file that `python -m` runs, without importing a package around it."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        return None
    places = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    candidates = [path for place in places for path in (place / "__main__.py", place.with_suffix(".py"))]
    candidates += [] if rest or spec.submodule_search_locations else [Path(str(spec.origin))]
    return next((path for path in candidates if path.is_file()), None)


def python_problems(words: Words) -> Iterator[str]:
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        del rest[0]
    if rest[:1] == ["-m"] and len(rest) > 1:
        module = rest[1]
        if module == "pip":
            yield from pip_problems(rest[1:])
        elif module in ("vllm_mmcache.cli", "vllm_mmcache.cli.vllm_main"):
            yield from problems(["mmcache" if module.endswith("cli") else "vllm", *rest[2:]])
        elif find(module) is None:
            yield f"python -m {module}: no such module"
        elif module != "pytest":
            yield from option_problems(module, rest[2:])
    elif rest[:1] == ["-c"] and len(rest) > 1:
        try:
            compile(rest[1], "-c", "exec")
        except SyntaxError as error:
            yield f"python -c: {error.msg}"
    elif rest and (REPO / rest[0]).is_file():
        yield from script_problems(rest)


def script_problems(words: Words) -> Iterator[str]:
    """A program that is named by its path: of this repository, unless the path begins elsewhere."""
    if re.match(r"[/~$.]", words[0].removeprefix("./")):
        return
    path = REPO / words[0]
    if not path.is_file():
        yield f"{words[0]}: no such file in the repository"
    elif path.suffix == ".py":
        yield from unwritten_options(words[0], source_beside(path), words[1:])
    else:
        yield from unwritten_options(words[0], path.read_text(), words[1:])


def extras(project: Path) -> set[str]:
    return set(tomllib.loads(project.read_text())["project"].get("optional-dependencies", {}))


DISTRIBUTIONS = {
    "vllm-mmcache": extras(REPO / "pyproject.toml"),
    "vllm-mmcache-tools": extras(REPO / "tools" / "pyproject.toml"),
}
FOLDERS_OF = {".": "vllm-mmcache", "tools": "vllm-mmcache-tools", "./tools": "vllm-mmcache-tools"}


def pip_problems(words: Words) -> Iterator[str]:
    """Distributions of ours that are named are there, and so are their extras; so is a folder that is installed."""
    for word in words[1:]:
        requirement = re.fullmatch(r"([\w./-]+)(?:\[([\w,. -]*)\])?\s*(?:[@=<>!~].*)?", word)
        if requirement is None or word.startswith("-") or word.endswith((".whl", ".gz")):
            continue
        name = FOLDERS_OF.get(requirement[1].rstrip("/"), requirement[1])
        if name not in DISTRIBUTIONS:
            if "mmcache" in name.replace("_", "-"):
                yield f"pip: {name} is no distribution of this repository"
            elif name.startswith("./") and not (REPO / name).exists():
                yield f"pip: {name}: no such folder to install"
            continue
        for extra in filter(None, re.split(r"[, ]+", requirement[2] or "")):
            if extra not in DISTRIBUTIONS[name]:
                yield f"pip: {name} has no extra {extra}"


def uv_problems(words: Words) -> Iterator[str]:
    if words[1:2] == ["pip"]:
        yield from pip_problems(words[1:])


# Routes

SERVER_VARIABLE = re.compile(r"^\$\{?\w*(?:URL|SERVER|BASE)\w*\}?(?=/)")
OTHER_PORTS = {"3000", "9090", "9093"}
"""Grafana's, Prometheus's and that of its alerts."""


@functools.cache
def served() -> list[re.Pattern[str]]:
    """The paths that a server answers: our own routes, and those that vLLM's sources name."""
    import starlette.routing

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    ours = [route.path_regex for route in routes(lambda: None, None, dict)]
    decorator = re.compile(r"@\w+\.(?:get|post|put|delete|head|websocket|api_route)\(\s*f?\"(/[^\"]*)\"")
    sources = Path(spec.submodule_search_locations[0], "entrypoints").rglob("*.py")
    paths = {path for source in sources for path in decorator.findall(source.read_text())}
    assert len(paths) > 20
    paths |= {"/metrics", "/docs", "/openapi.json"}
    return [*ours, *(starlette.routing.compile_path(path)[0] for path in sorted(paths))]


def is_served(path: str) -> bool:
    return any(pattern.match(path) for pattern in served())


def is_of_the_server(url: str) -> bool:
    """Whether a URL is one of the example's server: it names a port, or no domain."""
    authority = urlsplit(url if "://" in url else f"http://{url}").netloc
    return authority.rpartition(":")[2] not in OTHER_PORTS and (":" in authority or "." not in authority)


def url_problems(words: Words) -> Iterator[str]:
    for at, given in enumerate(words[1:], 1):
        if words[at - 1] in ("-d", "--data", "--data-raw", "--json") and given.startswith("{"):
            try:
                json.loads(given)
            except ValueError as error:
                yield f"{words[0]} {words[at - 1]}: {error}"
        word = SERVER_VARIABLE.sub("http://localhost:8000", given)
        if re.match(r"https?://|(?:localhost|127\.0\.0\.1|[\w.-]+:\d+)(?:/|$)", word) and is_of_the_server(word):
            path = urlsplit(PLACEHOLDER.sub("x", word) if "://" in word else f"http://{word}").path
            if not is_served(path or "/mmcache"):
                yield f"{words[0]} {path}: no such route"


CHECKS: dict[str, Callable[[Words], Iterator[str]]] = {
    "curl": url_problems,
    "docker": container_problems,
    "kubectl": container_problems,
    "make": make_problems,
    "mmcache": mmcache_problems,
    "pip": pip_problems,
    "pip3": pip_problems,
    "podman": container_problems,
    "python": python_problems,
    "python3": python_problems,
    "python3.11": python_problems,
    "python3.12": python_problems,
    "uv": uv_problems,
    "vllm": vllm_verb_problems,
    "wget": url_problems,
}


# Names in any code


MISSPELT = {"MMCACHE_REQUIRE_SALTS"}
"""Names that a page shows as mistakes."""


def setting_problems(code: str) -> Iterator[str]:
    """Variables MMCACHE_* that are no setting; MMCACHE_STORE_* and MMCACHE_<NAME> stand for several."""
    for found in re.finditer(rf"(?<![A-Z_]){PREFIX}([A-Z0-9_]*)(?=([*<…{{]?))", code):
        name, stands_for_several = found[1].lower(), bool(found[2]) or not found[1]
        if stands_for_several and fnmatch.filter(Settings.model_fields, f"{name}*"):
            continue
        if found[0] in MISSPELT:
            continue
        if name not in (Settings.model_fields.keys() | OLDER_NAMES) and not is_of_a_service(found[0], "tcp://"):
            near = nearest(name, Settings.model_fields)
            yield f"{found[0]} is no setting" + (f"; {PREFIX}{near.upper()} is" if near else "")


@functools.cache
def written_options() -> set[str]:
    """All options written in a source, a script or the Makefile of this repository, and those of benchmarks."""
    places = [*(REPO / "scripts").iterdir(), REPO / "Makefile", REPO / "patches" / "apply"]
    for folder in ("vllm_mmcache", "tools", "scripts", "benchmarks"):
        places += (REPO / folder).rglob("*.py")
    written = {option for path in places if path.is_file() for option in re.findall(r"--[a-z][\w-]+", path.read_text())}
    written |= {f"--{option.replace('_', '-')}" for benchmark in BENCHMARKS.values() for option in benchmark.options}
    root = typer.main.get_command(app)
    groups: list[Any] = [root]
    for command in groups:
        written |= options_of(command)
        groups += getattr(command, "commands", {}).values()
    return written


def named_options(code: str) -> set[str]:
    """The options that a piece of code names, in vLLM's spelling and without what follows a dot."""
    found = re.findall(r"(?:^|(?<=[\s'\"=\[]))--[a-z][\w-]*", code)
    return {option.replace("_", "-") for option in found}
