# SPDX-License-Identifier: Apache-2.0
"""The code in a page of Markdown: fenced blocks with their language, indented blocks, and inline code."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt  # comes with rich

from tests.system.docs.test_docs import PAGES, REPO

EXAMPLE_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """One block of code. `line` is that of its first line of code; `language` is empty where the fence names none."""

    page: str
    line: int
    language: str
    code: str
    is_fenced: bool = True

    def at(self, line: int) -> str:
        """Where in the page a line of the code is; the first is 1."""
        return f"{self.page}:{self.line + line - 1}"


def blocks_of(text: str, page: str = "page") -> list[Block]:
    found = []
    for token in MARKDOWN.parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            is_fenced = token.type == "fence"
            language = token.info.strip().partition(" ")[0]
            content = textwrap.dedent(token.content)  # a line of a function may be shown with its indentation
            found.append(Block(page, token.map[0] + 1 + is_fenced, language, content, is_fenced))
    return found


def inline_code(text: str, page: str = "page") -> Iterator[tuple[str, str]]:
    """Where each piece of inline code is (its paragraph's first line), and the code, with a space for a new line."""
    for token in MARKDOWN.parse(text):
        for child in token.children or ():
            if child.type == "code_inline":
                assert token.map is not None
                yield f"{page}:{token.map[0] + 1}", child.content


def name_of(page: Path) -> str:
    return str(page.relative_to(REPO))
