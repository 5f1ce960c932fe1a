# SPDX-License-Identifier: Apache-2.0
"""Writes docs/families.md by a walk through vLLM's whole registry: `python scripts/families_page.py`. A test compares.

Takes half a minute: each class is imported, none is built. So the page says what can be known of a class; what only a
model can show (probe.py tries it with two images) is decided when it is loaded.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mmcache_tools.zoo import FAMILIES, architecture_of

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

HEAD = """# Model families

<!-- written by scripts/families_page.py, which walks through vLLM's registry; don't edit -->

Which models the plugin was tested with, and whether its feature store works with yours. The feature store keeps what
the vision tower makes of an image ([how](features.md)). Of the {num} architectures of vLLM {version}, the store covers
{covered}, leaves out {left_out}, and has nothing to do with {others} that take no images.

How to find your model: the architecture is the name under `architectures` in its `config.json`. `mmcache doctor MODEL`
says what will be on for it, and a server's log says what is.

- **Covered** means that the class takes images one by one and tells its vision tower from its language model. When a
  model is loaded, the plugin tries the tower with two small images. If their features depend on each other, or the
  tower runs parts of the language model, nothing is stored, and the log says so.
- **Tested** means run on real engines: each cached answer was compared with that of a cold run and with Transformers
  ([how](exactness.md)).
- The other components do not depend on the class: whether they are on depends on [the
  engine](limits.md#where-a-component-is-on). There are two exceptions. In some models the tokens of an image attend
  both ways, which means that they see each other in both directions. On a CPU, [some of these
  models](image_attention.md) are served, and all others are refused at start, PaliGemma among them. And of a few
  classes, such as DeepSeek-VL2 and Kimi-K3, images [are left to vLLM's
  processor](processor.md#when-images-keep-their-pixels).

"""
LEFT_OUT = """\
The feature store is off for these. Where vLLM could not import a class when this page was made, nothing is known of it:
with the missing package it may be covered, or take no images."""
OTHERS = "Every other architecture of the registry."


class Row(NamedTuple):
    """What the walk found of one architecture."""

    architecture: str
    finding: str  # covered, no images, or why it is left out


def walk() -> Iterator[Row]:
    """Every architecture of the registry, by name."""
    from vllm.model_executor.models.registry import _VLLM_MODELS, ModelRegistry

    logging.disable(logging.CRITICAL)  # imports warn of kernels that this machine has not
    try:
        for architecture in sorted(_VLLM_MODELS):
            yield Row(architecture, finding(ModelRegistry.models[architecture]))
    finally:
        logging.disable(logging.NOTSET)


def finding(registered: Any) -> str:
    """What can be said of one class without building it: covered, no images, left out or not looked at, and why."""
    from vllm.model_executor.models import interfaces

    try:
        model_class = registered.load_model_cls()
    except Exception as error:
        first = textwrap.shorten(str(error).splitlines()[0], 60, placeholder=" ...")
        return f"not looked at: vLLM could not import it ({type(error).__name__}: {first})"
    if not interfaces.supports_multimodal(model_class) or not hasattr(model_class, "_processor_factory"):
        return "no images"
    modalities = modalities_of(model_class)
    if "image" not in modalities:
        named = sorted(modalities & {"vision_chunk"})
        return f"left out: its images come as `{named[0]}`" if named else "no images"
    if interfaces.supports_multimodal_raw_input_only(model_class):
        return "left out: its tower is part of the forward pass"
    source = "".join(
        inspect.getsource(base)
        for base in model_class.__mro__
        if base.__module__.startswith("vllm.") and base.__module__ != interfaces.__name__
    )
    if not any(
        mark in source for mark in ("_mark_language_model(", "_mark_composite_model(", "def get_language_model(")
    ):
        return "left out: it does not tell its vision tower from its language model"
    return "covered"


def modalities_of(model_class: Any) -> set[str]:
    """The modalities that the class's processor takes, as far as the class alone says."""
    info = model_class._processor_factory.info
    try:
        return set(object.__new__(info).get_supported_mm_limits())
    except Exception:  # it asks its configuration, which there is none of
        pass
    try:
        found = model_class.get_placeholder_str("image", 1)
    except ValueError:
        return set()
    return {"image"} if found or '"image"' in inspect.getsource(info) else set()


def tested() -> dict[str, str]:
    """Architecture -> the zoo's families of it, with commas between."""
    families: dict[str, list[str]] = {}
    for name in FAMILIES:
        families.setdefault(architecture_of(name), []).append(f"`{name}`")
    return {architecture: ", ".join(names) for architecture, names in families.items()}


def reason(row: Row) -> str:
    """Why it is left out."""
    return row.finding.partition(": ")[2]


def listed(names: Iterable[str], indent: str = "") -> str:
    """Names in lines of 120 characters."""
    text = ", ".join(f"`{name}`" for name in names)
    lines = textwrap.wrap(text, 120, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    from vllm_mmcache.base.versions import vllm_version

    rows = list(walk())
    families = tested()
    covered = [row.architecture for row in rows if row.finding == "covered"]
    left_out = [row for row in rows if row.finding.startswith(("left out", "not looked at"))]
    others = [row.architecture for row in rows if row.finding == "no images"]
    text = HEAD.format(
        num=len(rows), version=vllm_version(), covered=len(covered), left_out=len(left_out), others=len(others)
    )
    text += "## Covered\n\nTested, each as a tiny model of the [zoo](zoo.md) with the name in the second column:\n\n"
    text += "| architecture | model of the zoo |\n|---|---|\n"
    text += "".join(f"| `{name}` | {families[name]} |\n" for name in covered if name in families)
    text += "\nCovered, and not tested:\n\n" + listed(name for name in covered if name not in families)
    text += f"\n## Left out\n\n{LEFT_OUT}\n\n"
    for why in dict.fromkeys(reason(row) for row in left_out):
        text += f"- {why}:\n" + listed((row.architecture for row in left_out if reason(row) == why), "  ")
    text += f"\n## No images\n\n{OTHERS}\n"
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--json"]:  # for the test: what the walk imports has no place in the process of other tests
        print(json.dumps(dict(walk())))
    else:
        PAGE.write_text(page())
