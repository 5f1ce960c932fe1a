# SPDX-License-Identifier: Apache-2.0
"""Images in batch jobs with `LLM()`, `AsyncLLM` and Ray Data travel as files, and the engine's process opens them.

`EncodedImage` is such an image, and `question` makes a row of Ray Data from some of them. Both need vLLM, which is
imported when one of them is first asked for. `ray_worker` prepares Ray's workers, and needs neither vLLM nor Ray.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mmcache.batch.vllm_encoded_image import EncodedImage, question

__all__ = ["EncodedImage", "question"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from vllm_mmcache.batch import vllm_encoded_image

        return getattr(vllm_encoded_image, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
