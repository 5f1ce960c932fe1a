# SPDX-License-Identifier: Apache-2.0
"""The commands of a shell example: continued lines, comments, quotes, pipes, prompts and assignments are understood.

Nothing is run. What a synopsis has is accepted: `<a placeholder>`, and `[--optional]` words.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PLACEHOLDER = re.compile(r"<[A-Za-z](?:[\w .-]*\w)?>")
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
OPTIONAL = re.compile(r"\[+(?=[-A-Za-z<.])([^\[\]\"]*)\]*$")
OPTIONAL_END = re.compile(r"^([^\[\]\"]+)\]+$")
KEYWORDS = {"!", "{", "}", "do", "done", "elif", "else", "env", "exec", "export", "fi", "if", "nohup", "sudo", "then",
            "time", "until", "while"}  # fmt: skip
TAKE_ONE = {"for": 3, "nice": 2, "timeout": 1}  # words that follow, before the command or its `do`


@dataclass(frozen=True)
class Command:
    """One simple command; `line` counts from 1 in its block."""

    words: tuple[str, ...]
    line: int


def commands(text: str) -> list[Command]:
    """The commands of a block. Raises: ValueError where a quote or a here-document has no end."""
    found = []
    for line, statement in statements(typed(text)):
        found += [Command(words, line) for words in simple_commands(statement)]
    return found


def typed(text: str) -> str:
    """What a user types: all, or, where there are prompts (`$ `), what follows them; other lines are left empty."""
    lines = text.splitlines()
    if not any(line.startswith("$ ") for line in lines):
        return text
    kept: list[str] = []
    for line in lines:
        is_continued = bool(kept) and kept[-1].endswith("\\")
        kept.append(line[2:] if line.startswith("$ ") else line.removeprefix("> ") if is_continued else "")
    return "\n".join(kept)


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Each statement without its comment, with the number of its first line."""
    lines, pending, start = enumerate(text.splitlines(), 1), "", 0
    for number, line in lines:
        start = start if pending else number
        statement = without_comment(pending + line)
        if statement is None:
            pending += line + "\n"
        elif statement.endswith("\\"):
            pending = statement[:-1] + " "
        else:
            pending = ""
            yield start, statement
            marker = HERE_DOCUMENT.search(statement)
            if marker and not any(one.strip() == marker[1] for _, one in lines):
                raise ValueError(f"line {start}: a here-document without its end, {marker[1]}")
    if pending.strip():
        raise ValueError(f"line {start}: a quote or a continued line without its end")


def without_comment(text: str) -> str | None:
    """The text up to its comment; None where a quote is open at its end."""
    quote, at = "", 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or text[at - 1].isspace()):
            return text[:at].rstrip()
        at += 1
    return None if quote else text


def simple_commands(statement: str) -> Iterator[tuple[str, ...]]:
    """The commands of one statement, each as its words, without assignments, redirections and wrappers."""
    for inner in SUBSTITUTION.findall(statement):
        yield from simple_commands(inner)
    statement = SUBSTITUTION.sub("SUBSTITUTED", PLACEHOLDER.sub("PLACEHOLDER", statement))
    lexer = shlex.shlex(re.sub(r"(?<=\s)\d(?=[<>])", "", statement), posix=True, punctuation_chars=";|&<>()")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    tokens = iter([*lexer, ";"])
    for token in tokens:
        if re.fullmatch(r"[;|&()]+|<\(", token):
            yield from unwrapped(words)
            words = []
        elif re.fullmatch(r"[&<>]+", token):
            next(tokens)
        else:
            words.append(OPTIONAL.sub(r"\1", token) if token[:1] == "[" else OPTIONAL_END.sub(r"\1", token))


def unwrapped(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The command behind keywords and assignments, if there is one; of `bash -c` what it is given."""
    left = list(words)
    while left and (left[0] in KEYWORDS or left[0] in TAKE_ONE or ASSIGNMENT.match(left[0])):
        first = left.pop(0)
        del left[: TAKE_ONE.get(first, 0)]
    if left and left[0] in ("bash", "sh") and "-c" in left[:-1]:
        for command in commands(left[left.index("-c") + 1]):
            yield command.words
    elif left:
        yield tuple(left)
