# SPDX-License-Identifier: Apache-2.0
"""What a rank does with pixels that come with a step, after their request."""

from types import SimpleNamespace
from typing import Any

from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.features.worker.vllm_connector import put_pixels


def test_pixels_go_to_the_images_that_are_encoded_in_this_step() -> None:
    """Those of other requests and steps stay as they are, and without a message all do."""
    requests: dict[str, list[Any]] = {
        name: [SimpleNamespace(identifier=f"image-{number}", data="no pixels") for number in (0, 1, 2)] for name in "ab"
    }
    step = SimpleNamespace(scheduled_encoder_inputs={"a": [1, 2]})
    for message in (None, Message(1)):
        put_pixels(message, step, requests.__getitem__)
    assert all(feature.data == "no pixels" for features in requests.values() for feature in features)
    put_pixels(Message(1, pixels={"image-1": "pixels", "image-0": "others"}), step, requests.__getitem__)
    assert [feature.data for feature in requests["a"]] == ["no pixels", "pixels", "no pixels"]
    assert [feature.data for feature in requests["b"]] == ["no pixels"] * 3
