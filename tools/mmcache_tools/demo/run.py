# SPDX-License-Identifier: Apache-2.0
"""Holds the conversation with stock vLLM and with the plugin, one server after the other, and compares the answers.

Runs in the process of the command line. Stock's answers are the assistant's text in the later prompts, for
both, so that all prompts are the same. When stock's conversation is over, each prompt is sent cold to the
same server (not in between: cold images would push the conversation's out of stock's encoder cache), and both
answers are held against that. A differing answer is never smoothed over: it is shown, and the exit status is
1. So it is with a wrong word, where the model was trained to find the right ones.
"""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcache_tools.demo.conversation import Answer, Client, Message, Turn, user_message
from vllm_mmcache.base.errors import EnvironmentProblem

MAX_LOGPROB_DELTA = 1e-3


@dataclass
class Row:
    """One turn, filled in as the answers come."""

    turn: Turn
    messages: list[Message]
    stock: Answer
    cold: Answer | None = None
    plugin: Answer | None = None

    def differences(self) -> list[str]:
        """What is not as in the cold run; empty when all is equal."""
        found = []
        for name, answer in (("stock", self.stock), ("plugin", self.plugin)):
            if self.cold and answer and (difference := compare(self.cold, answer)):
                found.append(f"{name}: {difference}")
        return found

    def wrong_words(self) -> list[str]:
        """Who did not say what is in the pictures; empty where no answer is right or wrong."""
        answers = (("stock", self.stock), ("mmcache", self.plugin))
        return [name for name, given in answers if self.turn.right and given and given.text != self.turn.right]


def compare(cold: Answer, other: Answer) -> str | None:
    """Why `other` is not the cold run's answer, or None when it is (tokens equal, log-probabilities within 1e-3)."""
    if other.num_prompt_tokens != cold.num_prompt_tokens:
        return f"prompt has {other.num_prompt_tokens} tokens, cold {cold.num_prompt_tokens}"
    if not cold.tokens or len(cold.logprobs) != len(cold.tokens):
        return "the cold run has no tokens with log-probabilities to compare with"
    if other.tokens != cold.tokens:
        pairs = enumerate(zip(cold.tokens, other.tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(cold.tokens), len(other.tokens)))
        return f"token {at} differs"
    if len(other.logprobs) != len(cold.logprobs):
        return f"{len(other.logprobs)} log-probabilities, cold {len(cold.logprobs)}"
    deltas = [abs(a - b) for a, b in zip(cold.logprobs, other.logprobs, strict=True)]
    if not all(delta <= MAX_LOGPROB_DELTA for delta in deltas):  # max() would lose a NaN
        return f"log-probabilities off by {max(deltas, key=lambda delta: (delta != delta, delta)):.2g}"
    return None


def exit_status(rows: list[Row]) -> int:
    """0 when every answer was given, equals the cold run and has the right words, else 1."""
    complete = bool(rows) and all(row.cold and row.plugin for row in rows)
    return 0 if complete and not any(row.differences() or row.wrong_words() for row in rows) else 1


def hold_stock(client: Client, turns: list[Turn], shown: Callable[[list[Row]], None]) -> list[Row]:
    """The conversation on the stock server, then the cold run of each of its prompts."""
    rows: list[Row] = []
    history: list[Message] = []
    for turn in turns:
        messages = [*history, user_message(turn)]
        stock = client.ask(messages)
        rows.append(Row(turn, messages, stock))
        history = [*messages, {"role": "assistant", "content": stock.text}]
        shown(rows)
    for row in rows:
        row.cold = client.ask_cold(row.messages)
        shown(rows)
    return rows


def hold_plugin(client: Client, rows: list[Row], shown: Callable[[list[Row]], None]) -> None:
    """The same prompts on the server with the plugin."""
    for row in rows:
        row.plugin = client.ask(row.messages)
        shown(rows)


def table(rows: list[Row]) -> Any:
    """The comparison so far, as a rich table."""
    from rich.table import Table

    # 78 columns wide: on a narrow terminal rich would drop the last column, which is the verdict.
    made = Table(
        title="the same conversation, stock and with mmcache", title_style="bold", show_edge=False, pad_edge=False
    )
    numbers = ("turn", "images", "prompt\ntokens", "cached\nstock", "cached\nmmcache")
    for column in (*numbers, "1st tok\nstock", "1st tok\nmmcache", "ratio"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("equals\ncold", no_wrap=True)
    images = 0
    for number, row in enumerate(rows, 1):
        images += len(row.turn.pictures)
        joined = f" (+{len(row.turn.pictures)})" if row.turn.pictures else ""
        cells = [str(number), f"{images}{joined}", str(row.stock.num_prompt_tokens), str(row.stock.num_cached_tokens)]
        plugin = row.plugin
        cells.append("" if plugin is None else str(plugin.num_cached_tokens))
        cells.append(f"{row.stock.first_token_s * 1000:.0f} ms")
        cells.append("" if plugin is None else f"{plugin.first_token_s * 1000:.0f} ms")
        cells.append("" if plugin is None else f"{row.stock.first_token_s / plugin.first_token_s:.2f}x")
        equal = "[green]yes[/]" if row.cold else ""
        cells.append("[bold red]NO[/]" if row.differences() else equal)
        made.add_row(*cells)
    return made


def dialogue(rows: list[Row]) -> Any:
    """What was said with the plugin, as a rich table."""
    from rich.table import Table

    made = Table(title="what was said", title_style="bold", show_edge=False, pad_edge=False)
    made.add_column("turn", justify="right", no_wrap=True)
    made.add_column("question")
    made.add_column("answer, with mmcache")
    made.add_column("right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        answer = row.plugin.text if row.plugin else ""
        made.add_row(
            str(number), row.turn.question, answer, "[bold red]NO[/]" if row.wrong_words() else "[green]yes[/]"
        )
    return made


def run(directory: Path, family: str, num_turns: int) -> int:
    """The whole demo; returns the exit status.  Raises: MMCacheError when a server can't be started."""
    check_tools()
    # A killed demo must take its server along: SystemExit unwinds through `serve`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import openai
    from rich.console import Console
    from rich.live import Live

    from mmcache_tools.demo.conversation import script
    from mmcache_tools.harness.server import failure, serve
    from mmcache_tools.zoo import build_cached

    console = Console(highlight=False)
    start = time.monotonic()
    with console.status(f"making the tiny model {family}"):
        model = build_cached(family, directory / "zoo")
        turns = script(family)[:num_turns]
    console.print(f"model {model}; server logs in {directory / 'demo'}")

    rows: list[Row] = []
    for name, switch in (("stock", {"MMCACHE_DISABLE": "1"}), ("mmcache", {"MMCACHE_DISABLE": "0"})):
        started = time.monotonic()
        log_path = directory / "demo" / f"{name}.log"
        with (
            console.status(f"starting the {name} server (15 to 40 s on two cores)") as status,
            serve(model, log_path=log_path, env=switch) as server,
        ):
            try:
                client = Client(server.url, to_the_end=family == "seeing")
                client.warm_up()
                status.stop()
                console.print(f"{name} server ready after {time.monotonic() - started:.0f} s")
                with Live(table(rows), console=console, transient=True) as live:
                    shown = teller(console, name, live)
                    if name == "stock":
                        rows = hold_stock(client, turns, shown)
                    else:
                        hold_plugin(client, rows, shown)
            except openai.OpenAIError as error:
                raise failure(server, f"the {name} server failed a request: {error}") from error
    console.print(table(rows))
    if any(row.turn.right for row in rows):
        console.print(dialogue(rows))
    summary(console, rows, time.monotonic() - start)
    return exit_status(rows)


def teller(console: Any, name: str, live: Any) -> Callable[[list[Row]], None]:
    """Shows progress: the live table needs a terminal; elsewhere each answer is one plain line."""
    asked = 0

    def tell(rows: list[Row]) -> None:
        nonlocal asked
        asked += 1
        if console.is_terminal:
            live.update(table(rows))
            return
        cold = name == "stock" and rows[0].cold is not None
        row = rows[sum(bool(row.cold) for row in rows) - 1] if cold else rows[asked - 1]
        answer = row.cold if cold else row.stock if name == "stock" else row.plugin
        assert answer is not None
        what = f"{name}, cold run" if cold else name
        console.print(f"{what}: turn {rows.index(row) + 1}, first token after {answer.first_token_s * 1000:.0f} ms")

    return tell


def summary(console: Any, rows: list[Row], seconds: float) -> None:
    """The two sentences at the end."""
    stock_s = sum(row.stock.first_token_s for row in rows)
    plugin_s = sum(row.plugin.first_token_s for row in rows if row.plugin)
    console.print(
        f"waiting for first tokens in all: stock {stock_s * 1000:.0f} ms, mmcache {plugin_s * 1000:.0f} ms "
        f"({stock_s / plugin_s:.2f}x); the demo took {seconds:.0f} s"
    )
    console.print("each time is a single request, so a ratio near 1 says nothing")
    bad = [number for number, row in enumerate(rows, 1) if row.differences()]
    if bad:
        for number in bad:
            console.print(f"turn {number}: {'; '.join(rows[number - 1].differences())}")
        console.print(f"[bold red]answers differ from the cold run in turns {', '.join(map(str, bad))}[/]")
    else:
        console.print(f"[green]all {2 * len(rows)} answers equal the cold run, token by token[/]")
    for number, row in enumerate(rows, 1):
        if wrong := row.wrong_words():
            console.print(f"[bold red]turn {number}: wrong words from {', '.join(wrong)}; right: {row.turn.right}[/]")


def check_tools() -> None:
    """Raises: EnvironmentProblem when something is missing that the demo needs beyond the server."""
    import importlib.util

    from vllm_mmcache.base import distributions
    from vllm_mmcache.base.settings import load_settings
    from vllm_mmcache.environment import check

    load_settings()
    needed = {"vllm": "cpu", "openai": "dev", "skimage": "dev"}
    missing = {name: extra for name, extra in needed.items() if importlib.util.find_spec(name) is None}
    if missing:
        install = distributions.install_command(*sorted(set(missing.values())))
        raise EnvironmentProblem(
            f"the demo needs {', '.join(missing)}: {install}, or run `make demo`, which does that, too"
        )
    check()
