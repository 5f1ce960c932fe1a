# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processor depends on, by content: an item that it made is good only where all of it is the same."""

from typing import Any

import torch
import vllm.envs as envs

from vllm_mmcache.base.versions import installed
from vllm_mmcache.components.lazy_media.video import DECODERS
from vllm_mmcache.content.digests import canonical_text, inputs_digest
from vllm_mmcache.content.model_files import code_digest, files_digest

_USUAL_LOADER = "opencv"  # vLLM's default


def processor_facts(model_config: Any, processor: Any) -> dict[str, str]:
    """All that vLLM's processor depends on beside an item and its request's arguments. API server process."""
    from vllm.version import __version__

    hf_config = model_config.hf_config
    of_model = model_config.model, model_config.revision
    of_tokenizer = model_config.tokenizer, model_config.tokenizer_revision
    files = files_digest(*of_model)
    return {
        **processing_facts(model_config),
        "videos": _of_videos(processor),
        "config": canonical_text(hf_config.to_dict()),
        "processor": f"{type(processor).__module__}.{type(processor).__qualname__}",
        "files": files,
        "tokenizer": files if of_tokenizer == of_model else files_digest(*of_tokenizer),
        "tokenizer mode": canonical_text([str(model_config.tokenizer_mode), installed("tokenizers")]),
        "dtype": str(model_config.dtype),
        "torch": torch.__version__,
        "vllm": __version__,
    }


def processing_facts(model_config: Any) -> dict[str, str]:
    """What features depend on of it: a name stands for an image's bytes, and what becomes of them for who does it."""
    mm_config = model_config.multimodal_config
    made_by = {name: installed(name) for name in ("pillow", "numpy", "torchvision", "transformers")}
    of_model = model_config.model, model_config.revision
    code = code_digest(*of_model) if model_config.trust_remote_code else ""
    settings = model_config.hf_image_processor_config or files_digest(*of_model)  # with ModelScope vLLM reads none
    return {
        "settings": canonical_text(settings),
        "given": canonical_text(mm_config.mm_processor_kwargs),
        "loading": canonical_text(mm_config.media_io_kwargs),
        "normalized on the device": canonical_text(mm_config.mm_device_do_normalize),
        "names": canonical_text(mm_config.mm_hasher_algorithm),
        "code": canonical_text([model_config.revision, model_config.code_revision]),
        "made by": canonical_text(made_by),
        **({"own code": code} if code else {}),  # so that features of models without any keep their keys
    }


def video_facts(model_config: Any) -> str:
    """What features of a video depend on beside those of an image: digest of the processor's settings and decoders."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    return _of_videos(MULTIMODAL_REGISTRY.create_processor(model_config))


def _of_videos(processor: Any) -> str:
    of_videos = getattr(processor.info.get_hf_processor(), "video_processor", None)
    made_by = {name: installed(name) for name in DECODERS}
    settings = of_videos.to_dict() if of_videos is not None else None
    loader = envs.VLLM_VIDEO_LOADER_BACKEND  # samples frames, unless media_io_kwargs or a processor names another
    facts = {"settings": canonical_text(settings), "made by": canonical_text(made_by)}
    return inputs_digest({**facts, **({"loader": loader} if loader != _USUAL_LOADER else {})})  # as for "own code"
