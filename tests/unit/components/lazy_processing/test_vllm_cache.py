# SPDX-License-Identifier: Apache-2.0
"""What is ready for one request counts as cached for another: until vLLM has asked for it, whoever is through."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalKwargsItem

from vllm_mmcache.components.lazy_processing.vllm_cache import MOST_MODALITIES, PreparedItemCache
from vllm_mmcache.components.lazy_processing.vllm_processor import Processed

ITEM: Processed = (MultiModalKwargsItem({}), [])


def forget_by_release(cache: PreparedItemCache) -> None:
    cache.release_sender_touches()


def forget_by_questions(cache: PreparedItemCache) -> None:
    """As vLLM asks for later requests, where this one ended with an error before its items were merged."""
    for _ in range(MOST_MODALITIES):
        cache.is_cached(["others"])


@pytest.mark.parametrize("forget", [forget_by_release, forget_by_questions])
def test_what_vllm_was_told_to_be_cached_stays(forget: Callable[[PreparedItemCache], Any]) -> None:
    """Although the request that lent it ends while vLLM processes another item; and until this request is through."""
    cache = PreparedItemCache(None)
    cache.register([("image", ITEM)])
    assert cache.is_cached(["image", "unknown"]) == [True, False]
    assert cache.is_cached(["video"]) == [False]  # vLLM asks once for each modality
    cache.release([("image", ITEM)])
    assert cache.is_cached_item("image") is False
    assert cache.get_and_update_item(None, "image") is ITEM
    forget(cache)
    with pytest.raises(AssertionError, match="Expected a cached item"):
        cache.get_and_update_item(None, "image")


def test_it_stays_for_who_was_told_alone() -> None:
    """Control: another thread is another request."""
    cache = PreparedItemCache(None)
    cache.register([("image", ITEM)])
    with ThreadPoolExecutor(1) as other:
        assert other.submit(cache.is_cached, ["image"]).result() == [True]
        cache.release([("image", ITEM)])
        with pytest.raises(AssertionError, match="Expected a cached item"):
            cache.get_and_update_item(None, "image")
        assert other.submit(cache.get_and_update_item, None, "image").result() is ITEM
