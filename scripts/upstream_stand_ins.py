# SPDX-License-Identifier: Apache-2.0
"""What stands in for the models, pictures and the video that vLLM's own tests ask for by name; see upstream_tests.py.

Configurations are like the real ones where a test depends on it: LLaVA's 576 tokens an image, and OPT's dtype (where a
configuration names none, vLLM asks the network for it, again and again). No weights are needed but the zoo's.
"""

from pathlib import Path
from typing import Any

# Repositories that the tests ask for -> what stands in: a family of the zoo, or a configuration without weights.
MODELS = {
    "facebook/opt-125m": "opt",
    "openai-community/gpt2": "gpt2",
    "llava-hf/llava-1.5-7b-hf": "llava",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": "qwen2-vl",
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2-vl",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2.5-vl",
}
PICTURES = {  # with their modes
    "stop_sign.jpg": "RGB",
    "cherry_blossom.jpg": "RGB",
    "2560px-Gfp-wisconsin-madison-the-nature-boardwalk.jpg": "RGB",
    "Grayscale_8bits_palette_sample_image.png": "P",
    "1280px-Venn_diagram_rgb.svg.png": "RGBA",
    "RGBA_comp.png": "RGBA",
}
VIDEO = "sample_demo_1.mp4"
VIDEO_FRAMES, VIDEO_SIZE = 48, (336, 280)  # multiples of 28: Qwen2-VL, in the place of LLaVA, can leave it as it is


def make_models(folder: Path) -> None:
    """Fill a Hugging Face cache with configurations and tiny models."""
    from mmcache_tools.zoo import build_cached

    for name, kind in MODELS.items():
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("stand-in")
        snapshot = repository / "snapshots" / "stand-in"
        if kind in ("opt", "gpt2", "llava"):
            snapshot.mkdir(parents=True)
            write_configuration(kind, snapshot, build_cached("qwen2-vl", folder / "zoo"))
        else:
            snapshot.parent.mkdir()
            snapshot.symlink_to(build_cached(kind, folder / "zoo"))


def write_configuration(kind: str, folder: Path, zoo_model: Path) -> None:
    """Configuration, and processor or tokenizer where the tests use one; their vocabulary is the zoo's."""
    import transformers

    if kind == "opt":
        transformers.OPTConfig(architectures=["OPTForCausalLM"], dtype="float16").save_pretrained(folder)
        return
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(zoo_model)
    if kind == "gpt2":
        tokenizer.save_pretrained(folder)
        transformers.GPT2Config(architectures=["GPT2LMHeadModel"], dtype="float32").save_pretrained(folder)
        return
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        dtype="float16",
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        text_config=transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **vision),
        vision_config=transformers.CLIPVisionConfig(image_size=336, patch_size=14, **vision),
    ).save_pretrained(folder)
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def make_assets(folder: Path) -> None:
    """Fill vLLM's cache of public assets with pictures and a video."""
    import cv2
    import numpy as np

    from vllm_mmcache.exactness.pictures import ellipses

    pictures = folder / "vllm_public_assets"
    videos = folder / "video-example-data"
    for one in (pictures, videos):
        one.mkdir(parents=True)
    for name, mode in PICTURES.items():
        ellipses(name, (320, 240)).convert(mode).save(pictures / name)
    writer = cv2.VideoWriter(str(videos / VIDEO), cv2.VideoWriter.fourcc(*"mp4v"), 24, VIDEO_SIZE)
    for number in range(VIDEO_FRAMES):
        writer.write(np.asarray(ellipses(f"frame {number}", VIDEO_SIZE))[:, :, ::-1])
    writer.release()
