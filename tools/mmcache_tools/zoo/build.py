# SPDX-License-Identifier: Apache-2.0
"""Write a complete model directory, or find the one that was written before.

The same family, seed and options give the same bytes. `zoo.json` is written last and is the mark of a complete
directory; `build_cached` also works in a temporary directory and renames it, so that two processes building the
same model at once never see half of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmcache_tools.zoo.catalogue import BY_NAME, FAMILIES
from mmcache_tools.zoo.configs import ZooOptions
from mmcache_tools.zoo.family import Family
from vllm_mmcache.base.errors import ZooError

FORMAT_VERSION = 1  # goes up with every change of a written byte, so that cached models are built anew
_MARK = "zoo.json"


def _family(name: str) -> Family:
    if name not in BY_NAME:
        raise ZooError(f"unknown model family {name!r}; the zoo has {', '.join(BY_NAME)}: choose one of these")
    return BY_NAME[name]


def _trained_files(spec: Family) -> Path:
    assert spec.trained is not None
    return Path(__file__).parent / spec.trained


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def build(family: str, directory: Path, seed: int = 0, options: ZooOptions | None = None) -> Path:
    """Write the model of `family` into `directory` (made if missing) and return that directory.

    Loadable offline by Transformers and by vLLM. Takes about a second, after torch is imported.
    Raises: ZooError for an unknown family or a directory that can't be written.
    """
    spec = _family(family)
    options = options or ZooOptions()
    if spec.trained and (seed, options) != (0, ZooOptions()):
        raise ZooError(
            f"{family} has trained weights: seed {seed} and {options} don't apply to them; leave both out, "
            f"or take one of {', '.join(FAMILIES)}"
        )
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _MARK).unlink(missing_ok=True)  # not complete while it is being written
        _write_model(spec, directory, seed, options)
    except OSError as error:
        raise ZooError(
            f"can't write the {family} model into {directory}: {error}; "
            "name a directory that can be made and written, with 20 MB free"
        ) from error
    return directory


def _write_model(spec: Family, directory: Path, seed: int, options: ZooOptions) -> None:
    if spec.trained:
        from mmcache_tools.zoo.weights import copy_weights

        source = _trained_files(spec)
        text = (source / "tokenizer.json").read_text(encoding="utf-8")
        write_all_but_weights(spec, directory, options, text, token_ids(text))
        num_parameters = copy_weights(source / "model.safetensors", directory)
    else:
        from mmcache_tools.zoo.tokenizer import tokenizer_json
        from mmcache_tools.zoo.weights import write_weights

        text, ids, mute = tokenizer_json(spec)
        write_all_but_weights(spec, directory, options, text, ids)
        num_parameters = write_weights(spec, directory, seed, mute)
    mark = {"format": FORMAT_VERSION, "family": spec.name, "seed": seed, "num_parameters": num_parameters}
    _write_json(directory / _MARK, mark | {"options": asdict(options)})


def token_ids(tokenizer_json: str) -> dict[str, int]:
    """The ids of all tokens of a tokenizer.json."""
    content = json.loads(tokenizer_json)
    return dict(content["model"]["vocab"]) | {token["content"]: token["id"] for token in content["added_tokens"]}


def write_all_but_weights(
    spec: Family, directory: Path, options: ZooOptions, tokenizer_json: str, ids: dict[str, int]
) -> None:
    """Write tokenizer, chat template, configurations and processor files."""
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", spec.tokenizer | {"model_max_length": 16384})
    template = Path(__file__).parent / "templates" / spec.template
    (directory / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    # The vocabulary has as many rows as the tokenizer has tokens: every id that is drawn can be decoded.
    config = spec.config(ids, len(ids), options) | {"dtype": spec.dtype}
    _write_json(directory / "config.json", config)
    eos = [ids[spec.eos], ids[str(spec.tokenizer["eos_token" if spec.bos else "pad_token"])]]
    generation: dict[str, Any] = {
        "do_sample": False,
        "eos_token_id": eos,
        "pad_token_id": ids[spec.tokenizer["pad_token"]],
    }
    if spec.bos:
        generation["bos_token_id"] = ids[spec.bos]
    _write_json(directory / "generation_config.json", generation)
    for name, content in spec.processor_files(options).items():
        _write_json(directory / name, content)


def build_cached(family: str, root: Path, seed: int = 0, options: ZooOptions | None = None) -> Path:
    """The directory of this model below `root`: the complete one of this format if there, else a new one.

    Safe with several processes: whoever finishes first is kept.
    Raises: ZooError for an unknown family or a root that can't be written.
    """
    spec = _family(family)
    options = options or ZooOptions()
    name = f"{family}-seed{seed}-format{FORMAT_VERSION}"
    if spec.trained:  # trained anew, it is another model
        name += "-" + hashlib.sha256((_trained_files(spec) / "model.safetensors").read_bytes()).hexdigest()[:8]
    if options != ZooOptions():
        name += "-" + hashlib.sha256(json.dumps(asdict(options), sort_keys=True).encode()).hexdigest()[:8]
    final = Path(root) / name
    if (final / _MARK).is_file():
        return final
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    except OSError as error:
        raise ZooError(f"can't write below {root}: {error}; name a directory that can be made and written") from error
    try:
        build(family, scratch, seed, options)
        scratch.chmod(0o755)  # mkdtemp makes it private; a server may run as somebody else
        os.rename(scratch, final)
    except OSError as error:
        if not (final / _MARK).is_file():  # else another process was first, with the same bytes
            raise ZooError(f"{final} is in the way and not a complete zoo model ({error}); remove it") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final
