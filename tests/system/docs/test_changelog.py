# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md has the form of Keep a Changelog, and a section for what the code says it is."""

import re
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_mmcache import __version__

TEXT = (Path(__file__).parents[3] / "CHANGELOG.md").read_text()
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
HEADING = re.compile(r"\[Unreleased\]|\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}")


def parts(text: str, level: int) -> list[tuple[str, str]]:
    """The headings of a level in order, each with the text below it."""
    pieces = re.split(rf"^{'#' * level} (.+)\n", text, flags=re.MULTILINE)
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


def releases(text: str) -> list[Version]:
    """The released versions in the order in which they stand there."""
    return [Version(found[1]) for name, _ in parts(text, 2) if (found := HEADING.fullmatch(name)) and found[1]]


def faults(text: str) -> list[str]:
    """What is against the form."""
    found = [f"line {number} is too long" for number, line in enumerate(text.splitlines(), 1) if len(line) > 120]
    versions = parts(text, 2)
    found += [f"{name} is no heading of a version" for name, _ in versions if not HEADING.fullmatch(name)]
    if "[Unreleased]" not in [name for name, _ in versions[:1]]:
        found.append("the first section is not [Unreleased]")
    if releases(text) != sorted(set(releases(text)), reverse=True):
        found.append("the newest version is not the first one")
    for version, of_version in versions:
        name = version.partition("]")[0].removeprefix("[")
        if not re.search(rf"^\[{re.escape(name)}\]: https://\S+$", text, re.MULTILINE):
            found.append(f"{version} has no link at the page's end")
        kinds = [kind for kind, _ in parts(of_version, 3)]
        if kinds != [kind for kind in KINDS if kind in kinds]:
            found.append(f"{version}: {kinds} are not {KINDS}, in this order and each once")
        for kind, of_kind in parts(of_version, 3):
            entries = re.sub(r"^(#### .+|\[.+\]: .+)$", "", of_kind, flags=re.MULTILINE)
            lines = [line for line in entries.splitlines() if line]
            if not lines or not lines[0].startswith("- ") or not all(line.startswith(("- ", "  ")) for line in lines):
                found.append(f"{version}, {kind}: not a list of entries")
            ends = [entry for entry in re.split(r"^- ", entries, flags=re.MULTILINE)[1:] if entry.rstrip()[-1:] != "."]
            found += [f"{version}, {kind}: not a whole sentence: {entry.strip()[:60]}" for entry in ends]
    return found


def is_told_of(version: str, text: str) -> bool:
    """Whether a version has a section, or is a later one than all that have: then [Unreleased] is about it."""
    return Version(version) in releases(text) or all(Version(version) > released for released in releases(text))


def test_the_changelog_has_the_form() -> None:
    assert faults(TEXT) == []


GOOD = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-03-01

### Added

#### A theme

- One thing, in
  two lines.

### Fixed

- Another.

## [0.1.0] - 2026-02-01

### Security

- A third.

[Unreleased]: https://example.org/compare/v0.2.0...main
[0.2.0]: https://example.org/compare/v0.1.0...v0.2.0
[0.1.0]: https://example.org/tree/v0.1.0
"""


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("# Changelog", "# Changelog", ""),
        ("## [Unreleased]\n", "", "not [Unreleased]"),
        ("[0.2.0] - 2026-03-01", "0.2.0 (March)", "no heading"),
        ("[0.2.0] - 2026", "[0.0.2] - 2026", "newest"),
        ("### Fixed", "### Mended", "in this order"),
        ("### Added", "### Security", "in this order"),
        ("- Another.", "Another.", "not a list"),
        ("- Another.", "", "not a list"),
        ("- Another.", "- Another", "whole sentence"),
        ("- Another.", f"- {'Another ' * 20}.", "too long"),
        ("[0.1.0]: https://example.org/tree/v0.1.0\n", "", "no link"),
    ],
)
def test_another_form_is_found(before: str, after: str, fault: str) -> None:
    """Negative control; the first is the good form itself."""
    assert before in GOOD
    found = faults(GOOD.replace(before, after))
    assert any(fault in one for one in found) if fault else found == []


def test_the_code_s_version_is_told_of() -> None:
    assert is_told_of(__version__, TEXT), f"CHANGELOG.md has no section for {__version__}, and later ones"
    assert [is_told_of(version, GOOD) for version in ("0.2.0", "0.1.0", "0.3.0", "0.1.1")] == [True, True, True, False]
