# SPDX-License-Identifier: Apache-2.0
"""Writes docs/families.md by a walk through vLLM's whole registry: `python scripts/families_page.py`. A test compares.

Takes half a minute: each class is imported, none is built. So the page says what can be known of a class; what only a
model can show (probe.py tries it with two images) is decided when it is loaded.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mmcache.zoo import FAMILIES, architecture_of

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

HEAD = """# Model families

<!-- written by scripts/families_page.py, which walks through vLLM's registry; don't edit -->

For whoever wants to know whether the feature store works with a model, and what is tested. Of the {num} architectures
of vLLM {version}: {covered} covered, {left_out} with images are left out, {others} take no images.

**Covered** means: the class takes images one by one and tells its vision tower from its language model, so the store
knows the weights and the outputs, and names no class. Whether it serves is tried when the model is loaded: two small
images go through the tower, alone and together; if their features depend on each other, or the tower runs parts of the
language model, the log says so and there is no store. The other rooms (block keys, identity, lazy images) don't depend
on the class. **Tested** are the families of the zoo, on real engines, cold against warm and against Transformers
([exactness](exactness.md)). Models whose images attend both ways are another matter: on the CPU those of
[this table](image_attention.md) are served and the others refused, PaliGemma among them.

"""


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


def section_of(architecture: str) -> str:
    """Under which heading the written page has an architecture; empty where it has not."""
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].lower()
        elif architecture in re.findall(r"\w+", line) and section:
            return section
    return ""


def finding(registered: Any) -> str:
    """What can be said of one class without building it: covered, no images, left out or not looked at, and why."""
    from vllm.model_executor.models import interfaces

    try:
        model_class = registered.load_model_cls()
    except Exception as error:
        first = str(error).splitlines()[0]
        return f"not looked at: vLLM can't import it on this machine ({type(error).__name__}: {first[:60]})"
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
    """Architecture -> the zoo's family of it."""
    return {architecture_of(name): name for name in FAMILIES}


def page() -> str:
    """The whole page."""
    from vllm_mmcache.upstream import vllm_version

    rows = list(walk())
    families = tested()
    covered = [row.architecture for row in rows if row.finding == "covered"]
    left_out = [row for row in rows if row.finding.startswith(("left out", "not looked at"))]
    others = [row.architecture for row in rows if row.finding == "no images"]
    text = HEAD.format(
        num=len(rows), version=vllm_version(), covered=len(covered), left_out=len(left_out), others=len(others)
    )
    text += "## Covered\n\n| architecture | tested as |\n|---|---|\n"
    text += "".join(f"| `{name}` | {families.get(name, '')} |\n" for name in covered)
    text += "\n## Left out\n\n| architecture | why |\n|---|---|\n"
    text += "".join(f"| `{row.architecture}` | {row.finding.partition(': ')[2]} |\n" for row in left_out)
    text += "\n## No images\n\n" + textwrap.fill(", ".join(others), 120, break_on_hyphens=False) + "\n"
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--json"]:  # for the test: what the walk imports has no place in the process of other tests
        print(json.dumps(dict(walk())))
    else:
        PAGE.write_text(page())
