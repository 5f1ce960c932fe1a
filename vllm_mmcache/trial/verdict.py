# SPDX-License-Identifier: Apache-2.0
"""What a trial found of each component, in the words of the report. Pure."""

from dataclasses import dataclass, field

NOT_PASSED = "its trial on this engine"
"""How the reason of a component begins that its trial has switched off; docker/alerts.yaml looks for it."""


@dataclass
class Verdict:
    """What a trial found. Each component that was to be tried is in one of the three."""

    passed: list[str] = field(default_factory=list)
    """Components that gave the answers of cold runs, and were seen at work."""
    differed: dict[str, str] = field(default_factory=dict)
    """Components that did not, and what differed."""
    untried: dict[str, str] = field(default_factory=dict)
    """Components that could not be tried, and why."""
    num_requests: int = 0
    seconds: float = 0.0
    noise: float = 0.0
    """The largest distance between two cold runs: a share of the probability."""

    attention: str = ""
    """How many rows of attention were computed anew in its naive form, in words; empty where none could be."""
    attention_wrong: str = ""
    """What was not as the naive form has it; empty where nothing was."""

    def reason_of(self, component: str) -> str:
        """Why a component is off after this trial; empty where it passed or was not in it."""
        if component in self.differed:
            return f"{NOT_PASSED} was not exact: {self.differed[component]}"
        if component in self.untried:
            return f"{NOT_PASSED} could not be made: {self.untried[component]}"
        return ""

    def __str__(self) -> str:
        """One line for the log."""
        found = [f"exact: {', '.join(self.passed) or 'nothing'}"]
        found += [f"not exact: {component} ({why})" for component, why in self.differed.items()]
        found += [f"not tried: {component} ({why})" for component, why in self.untried.items()]
        found += [self.attention] if self.attention else []
        return f"{self.num_requests} requests, {self.seconds:.1f} s; " + "; ".join(found)
