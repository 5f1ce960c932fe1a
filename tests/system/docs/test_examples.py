# SPDX-License-Identifier: Apache-2.0
"""What the pages show works: each block of code is parsed by what it is for, and clients' examples are run.

Commands are checked by the parsers that they meet, ours and vLLM's, and against the Makefile, the modules, the extras,
the routes and the files that there are. Each check has its negative control.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM

from tests.system.docs import command_checks, example_server, python_checks
from tests.system.docs.blocks import EXAMPLE_PAGES, Block, blocks_of, inline_code, name_of
from tests.system.docs.shell import PLACEHOLDER, commands, typed
from tests.system.docs.test_docs import REPO

SHELLS = {"bash", "sh", "console"}
LANGUAGES = SHELLS | {
    "python",
    "yaml",
    "json",
    "toml",
    "text",
    "mermaid",
    "diff",
    "ini",
    "nginx",
    "dockerfile",
    "jinja",
}
# An indented block names no language. It is a shell's where its first word is one of these, or a file to run.
FIRST_WORDS = {*command_checks.CHECKS, "export", "git", "openssl", "pre-commit"}
COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S* )*(?:\S*bin/)?([\w./-]+)")
# Of containers, pip, git and kubectl; all other options in inline code are vLLM's or ours.
OPTIONS_OF_OTHERS = {
    *("--build-arg", "--cap-drop", "--env", "--entrypoint", "--gpus", "--init", "--ipc", "--no-cache", "--privileged"),
    *("--publish", "--read-only", "--rm", "--security-opt", "--shm-size", "--tmpfs", "--ulimit", "--user", "--volume"),
    *("--editable", "--extra-index-url", "--find-links", "--force-reinstall", "--index-url", "--no-deps", "--upgrade"),
    *("--no-verify", "--signoff", "--depth", "--recurse-submodules", "--dry-run", "--from-file", "--from-literal"),
}

each_page = pytest.mark.parametrize("page", EXAMPLE_PAGES, ids=name_of)


def of(page: Path) -> list[Block]:
    return blocks_of(page.read_text(), name_of(page))


def is_shell(block: Block) -> bool:
    if block.is_fenced:
        return block.language in SHELLS
    first = COMMAND.match(block.code)
    return first is not None and (first[1] in FIRST_WORDS or (REPO / first[1]).is_file())


def language_problems(block: Block) -> Iterator[str]:
    if block.is_fenced and block.language not in LANGUAGES:
        named = block.language or "no language"
        yield f"{block.at(0)}: {named}: name one of {', '.join(sorted(LANGUAGES))}"


def shell_problems(block: Block, check: Callable[[Any], Iterator[str]] = command_checks.problems) -> Iterator[str]:
    if not is_shell(block) or (block.language == "console" and not re.search(r"^\$ ", block.code, re.MULTILINE)):
        return
    try:
        found = commands(block.code)
    except ValueError as error:
        yield f"{block.at(1)}: {error}"
        return
    for command in found:
        yield from (f"{block.at(command.line)}: {what}" for what in check(command.words))


def data_problems(block: Block) -> Iterator[str]:
    """YAML, JSON (a value, or one a line) and TOML are read."""
    try:
        if block.language == "yaml":
            list(yaml.safe_load_all(block.code))
        elif block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "json":
            try:
                json.loads(block.code)
            except ValueError:
                for line in block.code.splitlines():
                    json.loads(line)
    except (ValueError, yaml.YAMLError) as error:
        yield f"{block.at(1)}: {' '.join(str(error).split())}"


def name_problems(text: str, page: str) -> Iterator[str]:
    """Variables MMCACHE_* in all code, and verbs and options of mmcache in inline code."""
    for block in blocks_of(text, page):
        for number, line in enumerate(block.code.splitlines(), 1):
            yield from (f"{block.at(number)}: {what}" for what in command_checks.setting_problems(line))
    for where, code in inline_code(text, page):
        yield from (f"{where}: {what}" for what in command_checks.setting_problems(code))
        yield from (f"{where}: {what}" for what in command_checks.mention_problems(code))


def option_problems(text: str, page: str) -> Iterator[str]:
    """Options in inline code that neither vLLM nor anything of this repository has."""
    known = command_checks.written_options() | command_checks.vllm_options() | OPTIONS_OF_OTHERS
    for where, code in inline_code(text, page):
        unknown = command_checks.named_options(code) - known
        yield from (f"{where}: {option}: no such option" for option in sorted(unknown))


def python_problems(block: Block) -> Iterator[str]:
    for what in python_checks.problems(block.code):
        line = re.match(r"line (\d+): ", what)
        yield f"{block.at(int(line[1]) if line else 1)}: {what}"


def block(language: str, code: str) -> Block:
    return Block("page", 1, language, code)


# The pages


@each_page
def test_blocks_name_their_language(page: Path) -> None:
    assert [what for block in of(page) for what in language_problems(block)] == []


@each_page
def test_commands(page: Path) -> None:
    assert [what for block in of(page) for what in shell_problems(block)] == []


@pytest.mark.process
@each_page
def test_arguments_of_vllm(page: Path) -> None:
    """Marked `process`, as all tests here that import vLLM: its import starts the program `file`."""
    assert [what for block in of(page) for what in shell_problems(block, command_checks.vllm_problems)] == []


@each_page
def test_data(page: Path) -> None:
    assert [what for block in of(page) for what in data_problems(block)] == []


@each_page
def test_names(page: Path) -> None:
    assert list(name_problems(page.read_text(), name_of(page))) == []


@pytest.mark.process
@each_page
def test_options(page: Path) -> None:
    assert list(option_problems(page.read_text(), name_of(page))) == []


@each_page
def test_python(page: Path) -> None:
    blocks = [one for one in of(page) if one.language == "python" and not python_checks.uses_vllm(one.code)]
    assert [what for block in blocks for what in python_problems(block)] == []


@pytest.mark.process
@each_page
def test_python_with_vllm(page: Path) -> None:
    blocks = [one for one in of(page) if one.language == "python" and python_checks.uses_vllm(one.code)]
    assert [what for block in blocks for what in python_problems(block)] == []


def run_all(blocks: list[Block], folder: Path) -> tuple[list[str], list[str]]:
    """Run a page's Python examples that can be, one after the other; what failed, and the paths that were asked."""
    failed: list[str] = []
    namespace: dict[str, Any] = {}
    with example_server.running() as (url, asked):
        for block in blocks:
            if block.language == "python" and python_checks.can_be_run(block.code, namespace):
                try:
                    example_server.run(block.code, namespace, url, folder)
                except Exception as error:
                    failed.append(f"{block.at(1)}: {type(error).__name__}: {error}")
    return failed, asked


@pytest.mark.timeout(60)
@each_page
def test_clients_run(page: Path, tmp_path: Path) -> None:
    assert run_all(of(page), tmp_path)[0] == []


@pytest.mark.process
def test_bash_parses_the_examples() -> None:
    texts = [(block.at(1), typed(block.code)) for page in EXAMPLE_PAGES for block in of(page) if is_shell(block)]
    for where, text in texts:
        shown = PLACEHOLDER.sub("PLACEHOLDER", text)
        done = subprocess.run(["bash", "-n"], input=shown, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, ""), where


@pytest.mark.engine
def test_the_offline_example_runs(tmp_path: Path) -> None:
    """The README's examples with an engine, with a tiny model in the place of theirs."""
    from mmcache_tools.zoo import build_cached

    examples = [one.code for one in of(REPO / "README.md") if one.language == "python" and "LLM(" in one.code]
    assert examples
    model = build_cached("qwen3-vl", tmp_path)
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",  # another test of this process may have set it
    }
    small = {"max_model_len": "1024", "enforce_eager": "True"}
    for number, example in enumerate(examples):
        more = "".join(f", {name}={value}" for name, value in small.items() if name not in example)
        source, replaced = re.subn(r"\bLLM\(\s*(?:model=)?([\"'])[^\"']+\1", f'LLM("{model}"{more}', example)
        assert replaced, example
        script = tmp_path / f"example_{number}.py"
        script.write_text(example_server.at_home(source, "http://127.0.0.1:9", tmp_path))
        program = [sys.executable, str(script)]
        done = subprocess.run(
            program, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "in force" in done.stdout + done.stderr, done.stderr[-3000:]


# Negative controls


def test_examples_are_found() -> None:
    text = "1. a list\n\n   ```bash\n   make venv\n   ```\n\n```\nx\n```\n\nA `mmcache\nlint` | x\n\n    make test\n"
    fenced, unnamed, indented = blocks_of(text)
    assert (fenced.language, fenced.code, fenced.at(1)) == ("bash", "make venv\n", "page:4")
    assert list(language_problems(fenced)) == []
    assert next(language_problems(unnamed)).startswith("page:7: no language")
    assert list(language_problems(block("pyhton", ""))) != []
    assert (indented.is_fenced, is_shell(indented)) == (False, True)
    assert list(inline_code(text)) == [("page:11", "mmcache lint")]


def test_shells_are_read_as_bash_does() -> None:
    def words(text: str) -> list[str]:
        return [" ".join(command.words) for command in commands(text)]

    assert words("A=1 B='x y' make venv  # comment\n") == ["make venv"]
    assert words("mmcache serve M \\\n  --port 1  # why\nls") == ["mmcache serve M --port 1", "ls"]
    assert words("a | b && c; d > file 2>&1 &\n(e)") == ["a", "b", "c", "d", "e"]
    assert words("a --json '{\n \"x\": 1}' # end") == ['a --json {\n "x": 1}']
    assert words("pip install 'a @ git+URL#sub'") == ["pip install a @ git+URL#sub"]
    assert words("$ make venv\nvenv: done\n$ ls \\\n> -l\nfile") == ["make venv", "ls -l"]
    assert words("export K=$(openssl rand -hex 32)\nA=1") == ["openssl rand -hex 32"]
    assert words("cat <<EOF > file\nno-such-command\nEOF\nls") == ["cat", "ls"]
    assert words("export URL=<that URL>  # x\nmmcache store ls [--json]") == ["mmcache store ls --json"]
    assert words("for one in a; do make venv; done\nbash -c 'make demo'") == ["make venv", "make demo"]
    assert words("# nothing\n\n") == []
    for text in ("echo 'open", "ls \\", "cat <<EOF\nx"):
        with pytest.raises(ValueError, match=r"line 1: .* end"):
            commands(text)
    assert "end" in next(shell_problems(block("bash", "echo 'open")))


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("mmcache explain -f --url http://gpu-7:8000 --last N", "mmcache explain --lasst 3"),
        ("mmcache store ls --json", "mmcache store list"),
        ("mmcache store warm PICTURES --model M -- -tp 2", "mmcache store warm --model M"),
        ("mmcache serve MODEL --observe --port 8000", "mmcache serve --observed"),
        ("mmcache --help", "mmcache --hlep"),
        (".venv/bin/mmcache zoo build seeing DIR", "mmcache zoo build seeing"),
        ("mmcache lint a b --requests", "mmcache lint a b --request-lines"),
        ("make bench-load ARGS=--save", "make bench-laod"),
        ("make demo ARGS='--turns 3'", "make demo ARGS='--turn 3'"),
        ("make test ARGS='-k x'", "make test ARGUMENTS=x"),
        ("make gpu-check ARGS='--jobs 6'", "make gpu-check ARGS='--jobbs 6'"),
        ("python -m benchmarks.run --list", "python -m benchmarks.runs"),
        ("python -m http.server 80", "python -m tests.engine.exactness"),
        ("python -m benchmarks.run load --help", "python -m benchmarks.run load --lists"),
        ("python -m vllm_mmcache.cli explain", "python -m vllm_mmcache.cli explian"),
        ("python -c 'import x'", "python -c 'import'"),
        ("python scripts/first_minutes.py --write", "python scripts/last_minutes.py"),
        ("patches/apply --check ~/src/vllm", "patches/apply --chekc"),
        ("docker build -f docker/cpu.Dockerfile .", "docker build -f docker/tpu.Dockerfile ."),
        ("pip install '.[cuda]'", "pip install '.[cdua]'"),
        ("pip install 'vllm-mmcache[cuda,client] @ git+URL'", "pip install 'vllm-mmcache[cuda,no] @ git+URL'"),
        ("pip install dist/vllm_mmcache-0.1.0-py3-none-any.whl", "pip install vllm_mmcache_tool"),
        ("python -m pip install ./tools", "python -m pip install ./toolz"),
        ("uv pip install vllm-mmcache-tools==0.1.0", "pip install vllm-mmcache-tool"),
        ("curl -s http://localhost:8000/mmcache/records?limit=3", "curl http://localhost:8000/mmcache/record"),
        ("curl http://HOST:8000/v1/chat/completions -d '{}'", "curl http://HOST:8000/v1/chat/completion"),
        ("curl http://127.0.0.1:8000/metrics | grep mmcache", "curl 127.0.0.1:8000/metric"),
        ("curl $URL/v1/models -d '{\"a\": 1}'", "curl $URL/v1/models -d '{\"a\": 1,}'"),
        ("curl http://localhost:9090/api/v1/query", "curl ${SERVER_URL}/v1/modles"),
        ("curl -fsSL https://example.com/anything", "curl http://gpu-7:8000/v2/models"),
        ("kubectl exec deployment/mmcache -- mmcache doctor", "kubectl exec deployment/mmcache -- mmcache dcotor"),
        ("docker exec -it mmcache mmcache store ls", "docker compose exec mmcache mmcache store lss"),
        ("docker run --rm -p 8000:8000 vllm-mmcache:cpu MODEL", "docker run vllm-mmcache:cpu --model MODEL"),
        ("vllm run-batch -i x", "vllm srve MODEL"),
        ("git push origin v0.1.0", "mmcahce serve MODEL"),
    ],
)
def test_wrong_commands_are_refused(command: str, wrong: str) -> None:
    assert list(shell_problems(block("bash", command))) == []
    assert len(list(shell_problems(block("console", f"output\n$ {wrong}\n")))) == 1
    assert list(shell_problems(block("text", wrong))) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("vllm serve MODEL --enable-prefix-caching --port PORT", "vllm serve MODEL --enable-prefix-cashing"),
        ("mmcache serve MODEL --observe -tp 2", "mmcache serve MODEL --observer"),
        ("mmcache doctor MODEL --json --max-model-len 1024", "mmcache doctor MODEL --max-model-length 1024"),
        ("mmcache prove MODEL --own -- -tp 2", "mmcache prove MODEL --own -- --tpp 2"),
        ("docker run vllm-mmcache:cpu M --port 1", "docker run -e A=1 vllm-mmcache:cpu M --prot 1"),
        ('vllm serve M --kv-transfer-config \'{"kv_role": "kv_both"}\'', "vllm serve M --kv-transfer-config '{'"),
        (
            'mmcache serve M --additional-config \'{"mmcache": {"store": "/x"}}\'',
            'mmcache serve M --additional-config \'{"mmcache": {"stor": "/x"}}\'',
        ),
    ],
)
def test_wrong_arguments_of_vllm_are_refused(command: str, wrong: str) -> None:
    assert list(shell_problems(block("bash", command), command_checks.vllm_problems)) == []
    assert len(list(shell_problems(block("bash", wrong), command_checks.vllm_problems))) == 1


def test_wrong_data_is_refused() -> None:
    for language, right, wrong in (
        ("yaml", "kind: Pod\n---\na: [1]\n", "a: [1\n"),
        ("json", '{"a": 1}\n{"b": 2}\n', '{"a": 1,}'),
        ("toml", "a = 1\n", "a = \n"),
    ):
        assert list(data_problems(block(language, right))) == []
        assert len(list(data_problems(block(language, wrong)))) == 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`MMCACHE_STORE_*`, `MMCACHE_<NAME>`, `MMCACHE_STORE=/x`", "`MMCACHE_STOR=/x`"),
        (
            "```yaml\nkind: Pod\nenv: [{name: MMCACHE_STORE}]\n```",
            "```yaml\nkind: Pod\nenv: [{name: MMCACHE_STRE}]\n```",
        ),
        ("    MMCACHE_OBSERVE=1 mmcache serve M", "    MMCACHE_OBSRVE=1 mmcache serve M"),
        ("`MMCACHE_SERVICE_HOST` and `MMCACHE_STORE_TTL`", "`MMCACHE_SERVICES` and `MMCACHE_STORE_TTL`"),
        ("`mmcache explain`, `mmcache VERB`, `mmcache could not read the vision weights`", "`mmcache explian`"),
        ("`mmcache store`, `mmcache store ls --json`", "`mmcache store ls --jsno`"),
        ("`mmcache:tower_images_total`, `mmcache serve M --anything`", "`MMCACHE_STORE=1 mmcache srve`"),
    ],
)
def test_wrong_names_are_refused(right: str, wrong: str) -> None:
    assert list(name_problems(right, "page")) == []
    assert len(list(name_problems(wrong, "page"))) == 1


@pytest.mark.process
def test_wrong_options_are_refused() -> None:
    assert (
        list(option_problems("`--enforce-eager`, `--observe`, `--max_model_len`, `mmcache serve M --port 1`", "p"))
        == []
    )
    assert list(option_problems("text\n\n`--enforce-eagr` and `-tp`", "p")) == ["p:3: --enforce-eagr: no such option"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = (", "never closed"),
        ("return 1", "'return' outside function"),
        ("from vllm_mmcache.client import http_clients", "has no http_clients"),
        ("from vllm_mmcache.clients import http_client", "no such module"),
        ("from openai import OpenAy", "has no OpenAy"),
        ("import vllm_mmcache.client\nvllm_mmcache.client.http_clients()", "line 2: vllm_mmcache.client has no"),
        ("from vllm_mmcache.client import Sent\nSent(max_image=3)", "line 2: Sent: .*unexpected keyword"),
        ("from vllm_mmcache import client\nclient.OnceTransport(None, snt=1)", "OnceTransport: .*unexpected keyword"),
        ("from vllm_mmcache.client import Sent as S\nS(1, 2)", "too many positional"),
    ],
)
def test_wrong_python_is_refused(source: str, said: str) -> None:
    (problem,) = python_checks.problems(source)
    assert re.search(said, problem)
    assert list(python_checks.problems("from vllm_mmcache.client import Sent\nSent(max_images=3)\nother(x=1)")) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from vllm import LLM\nLLM('M', enable_prefix_cashing=True)", "LLM takes no enable_prefix_cashing"),
        ("import vllm\nvllm.SamplingParams(max_token=3)", "SamplingParams takes no max_token"),
        ("from vllm import LLMs", "vllm has no LLMs"),
    ],
)
def test_wrong_python_with_vllm_is_refused(source: str, said: str) -> None:
    (problem,) = python_checks.problems(source)
    assert said in problem
    right = (
        "from vllm import LLM, SamplingParams\nLLM('M', enable_prefix_caching=True, block_size=16)\nSamplingParams(n=1)"
    )
    assert list(python_checks.problems(right)) == []


def test_what_is_run_is_whole() -> None:
    whole = "import os\ndef f(x):\n    return [os, x, y]\ny = 1\nprint(f(2), __name__)"
    assert python_checks.free_names(whole) == set()
    assert python_checks.can_be_run(whole)
    assert python_checks.free_names("client.ask(a)\nfor a in []: pass") == {"client"}
    assert not python_checks.can_be_run("client.ask()")
    assert python_checks.can_be_run("client.ask()", {"client"})
    for source in ("from vllm import LLM", "x = (", "print(...)"):
        assert not python_checks.can_be_run(source)


CLIENT = """\
import base64
from pathlib import Path
from openai import OpenAI
from vllm_mmcache.client import http_client
client = OpenAI(base_url="http://localhost:8000/v1", api_key="-", http_client=http_client())
for name in ("page.png", "/data/scan.jpg"):
    pass
image = base64.b64encode(Path("page.png").read_bytes() + Path("/data/scan.jpg").read_bytes()).decode()
asked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]}]
model = client.models.list().data[0].id
reply = client.chat.completions.create(model=model, messages=asked)
assert reply.usage.prompt_tokens_details.cached_tokens > 0
usage = {"include_usage": True}
*parts, last = client.chat.completions.create(model=model, messages=asked, stream=True, stream_options=usage)
assert "".join(part.choices[0].delta.content or "" for part in parts) == reply.choices[0].message.content
assert last.usage.prompt_tokens_details.cached_tokens > 0
said = client.responses.create(model=model, input="x")
assert said.output_text and said.usage.input_tokens_details.cached_tokens
assert [one.type for one in client.responses.create(model=model, input="x", stream=True)][-1] == "response.completed"
assert client.embeddings.create(model=model, input="x", encoding_format="float").data[0].embedding
assert client.completions.create(model=model, prompt="x").choices[0].text
"""
OTHER = """\
import os
import httpx
key = {"Authorization": "Bearer KEY"}
assert httpx.get("http://gpu-7:8000/mmcache/records", headers=key).json()["records"][0]["id"]
assert "mmcache:" in httpx.get("http://127.0.0.1:8000/metrics").text
assert httpx.post("http://localhost:8000/reset_mm_cache").status_code == 200
assert httpx.get("https://your-server/v1/models", headers={"X": os.environ["A_KEY_OF_THE_USER"]}).json()["data"]
assert client.models.list()
"""


@pytest.mark.timeout(60)
def test_clients_are_answered(tmp_path: Path) -> None:
    failed, asked = run_all([block("python", CLIENT), block("python", OTHER)], tmp_path)
    assert failed == []
    assert {"/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/metrics", "/mmcache/records"} <= set(asked)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import httpx\nhttpx.get('http://localhost:8000/v1/modls').raise_for_status()", "404"),
        ("import httpx\nhttpx.get('http://localhost:8000/mmcache/totals').raise_for_status()", "401"),
        ("from openai import OpenAI\nOpenAI().chat.completions.create(model='m', messages=[])", "400"),
        ("from openai import OpenAI\nOpenAI().chat.completion", "completion"),
        ("import httpx\nhttpx.get('https://example.com/x')", "asks"),
        ("open('no-such-file.txt')", "no-such-file"),
    ],
)
def test_examples_that_fail_are_seen(source: str, said: str, tmp_path: Path) -> None:
    ((failed,), _) = run_all([block("python", source)], tmp_path)
    assert failed.startswith("page:1: ")
    assert said in failed
