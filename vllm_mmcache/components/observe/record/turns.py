# SPDX-License-Identifier: Apache-2.0
"""Where the turns of a conversation begin in its tokens: at a special token, found by rendering probes. API server.

Once per chat template. No template is parsed and no family is named: the mark is a special token that every rendered
message adds exactly once, and the opening of the answer once more. Without such a token a prompt is one text.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

ROLE_TOKENS = 2  # tokens behind a mark by which roles are told apart

Render = Callable[[Sequence[dict[str, str]], bool], list[int]]
"""Messages, and whether the answer is opened -> token ids. May raise whatever a template raises."""


@dataclass(frozen=True)
class Marks:
    """The token with which a turn begins, and who speaks, by the tokens behind it."""

    token: int
    roles: dict[tuple[int, ...], str] = field(default_factory=dict)

    def find(self, prompt: Sequence[int], skip: Iterable[tuple[int, int, str]]) -> list[int]:
        """Positions at which turns begin. skip: (offset, length, name) of the images, in order, which are passed."""
        found: list[int] = []
        start, token, index = 0, self.token, prompt.index
        for offset, length, _ in [*skip, (len(prompt), 0, "")]:
            while start < offset:
                try:
                    start = index(token, start, offset)
                except ValueError:
                    break
                found.append(start)
                start += 1
            start = offset + length
        return found

    def roles_of(self, prompt: Sequence[int], turns: Iterable[int]) -> list[str]:
        """Who speaks in the turns that begin at these positions; empty where that is not known."""
        roles = self.roles
        return [roles.get(tuple(prompt[turn + 1 : turn + 1 + ROLE_TOKENS]), "") for turn in turns]


def find_marks(render: Render, specials: Collection[int]) -> Marks | None:
    """The marks of a template; None where it has none."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    one, closed = render([user], True), render([user], False)
    three = render([user, answer, user], True)
    for token in dict.fromkeys(one):
        rises = one.count(token) - closed.count(token), three.count(token) - one.count(token)
        if token in specials and rises == (1, 2):
            break
    else:
        return None
    system, tool = {"role": "system", "content": "d"}, {"role": "tool", "content": "c"}
    roles: dict[tuple[int, ...], str] = {}
    for messages in ([user, answer, user], [system, user], [user, answer, tool]):
        try:
            tokens = render(messages, True)
        except Exception:  # templates refuse roles that they don't know, with exceptions of any kind
            continue
        turns = Marks(token).find(tokens, ())
        if len(turns) > len(messages):  # none was merged into another
            for turn, message in zip(reversed(turns), [answer, *reversed(messages)], strict=False):
                roles.setdefault(tuple(tokens[turn + 1 : turn + 1 + ROLE_TOKENS]), message["role"])
    return Marks(token, roles)
