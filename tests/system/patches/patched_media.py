# SPDX-License-Identifier: Apache-2.0
"""What the patches to vLLM's multimodal part promise.

Not collected by itself: test_patches.py runs it on a patched tree, without the plugin.
"""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.lazy import LazyImage
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from vllm_mmcache.exactness.pictures import ellipses


def encoded(name: str, form: str, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    ellipses(name, (120, 80)).convert(mode).save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize(("form", "mode"), [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "RGB")])
def test_known_bytes_stay_undecoded(form: str, mode: str) -> None:
    content = encoded(f"known {form} {mode}", form, mode)
    first, second = ImageMediaIO().load_bytes(content), ImageMediaIO().load_bytes(content)
    assert not isinstance(first.media, LazyImage)
    assert isinstance(second.media, LazyImage)
    hashes = [MultiModalHasher.hash_kwargs("blake3", model_id="m", image=loaded) for loaded in (first, second)]
    assert hashes[0] == hashes[1]
    assert (second.media.size, second.media.mode, second.io_config) == (
        first.media.size,
        first.media.mode,
        first.io_config,
    )
    assert not second.media.is_decoded
    assert np.array_equal(np.asarray(second.media), np.asarray(first.media))
    assert second.media.is_decoded


def test_other_settings_or_bytes_decode_at_once() -> None:
    content = encoded("other", "PNG")
    ImageMediaIO().load_bytes(content)
    assert not isinstance(ImageMediaIO(image_mode="L").load_bytes(content).media, LazyImage)
    assert not isinstance(ImageMediaIO().load_bytes(encoded("third", "PNG")).media, LazyImage)
    for _ in range(2):
        with pytest.raises(ValueError, match="Failed to load image"):
            ImageMediaIO().load_bytes(content[:-40])


def mm_hash(image: Image.Image | None, uuid: str | None, **more: Any) -> str:
    items = MultiModalDataParser().parse_mm_data({"image": [image]})
    inputs = ProcessorInputs([1], items, {"image": [uuid]}, **more)
    return str(inputs.get_mm_hashes("model", "blake3")["image"][0])


def test_uuids_are_bound_to_content() -> None:
    one, two = ellipses("one"), ellipses("two")
    assert mm_hash(one, "name") == mm_hash(one, None)
    assert mm_hash(None, "name") == mm_hash(one, None)
    assert mm_hash(two, "name") == mm_hash(two, None) != mm_hash(one, None)
    assert mm_hash(None, "name") == mm_hash(two, None)
    assert mm_hash(None, mm_hash(one, None)) not in (mm_hash(one, None), mm_hash(two, None)), "a hash is no name"
    assert mm_hash(None, "name", hf_processor_mm_kwargs={"max_pixels": 64}) != mm_hash(None, "name")


def test_uuids_are_taken_as_they_are_where_nothing_is_cached() -> None:
    assert mm_hash(ellipses("one"), "name", bind_mm_uuids=False) == "name"
