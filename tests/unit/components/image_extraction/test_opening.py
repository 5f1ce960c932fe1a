# SPDX-License-Identifier: Apache-2.0
"""vLLM's media connector with both components installed: a known image is opened without a thread, others in one."""

import asyncio
import base64
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import files
from vllm_mmcache.base import status, tenant
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.lazy_media.hooks import _key, is_at_hand
from vllm_mmcache.components.lazy_media.media_info import RECORDS, MediaInfo
from vllm_mmcache.content import placeholders
from vllm_mmcache.content.base64_image import CONTENT_IDS, Base64Image
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import COMPONENTS
from vllm_mmcache.storage import record_store

CONTENT = files.good()["png rgba"]
TEXT = base64.b64encode(CONTENT)
NAME = f"{placeholders.PREFIX}{'0' * 32}-0"
URL = f"data:image/png;base64,{NAME}"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    CONTENT_IDS.clear()
    RECORDS.clear()
    record_store.close()
    for name in ("lazy_media", "image_extraction"):
        outcome = installer.install(name, COMPONENTS[name].all_hooks(), vllm_version())
        assert outcome.state == "on", outcome.reason
    yield
    for name in ("image_extraction", "lazy_media"):
        installer.undo(name)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each image that is opened, whether that is in the event loop's thread."""
    from vllm.multimodal.media.connector import MediaConnector

    seen: list[bool] = []
    stock = MediaConnector._load_data_url

    def load(connector: Any, url: str, loader: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return stock(connector, url, loader)

    monkeypatch.setattr(MediaConnector, "_load_data_url", load)
    return seen


def fetch(url: str, key: bytes | None = None) -> Any:
    """The image behind a data URL, as a request opens it whose body had TEXT."""
    from vllm.multimodal.media.connector import MediaConnector

    async def asked() -> Any:
        with placeholders.register({NAME: Base64Image(TEXT, key)}):
            return await MediaConnector().fetch_image_async(url)

    return asyncio.run(asked())


def loader() -> Any:
    from vllm.multimodal.media.image import ImageMediaIO

    return ImageMediaIO()


def test_a_known_image_is_opened_without_a_thread(threads: list[bool]) -> None:
    first, again = fetch(URL), fetch(URL)
    assert threads == [False, True], "unknown, then known"
    assert not again.media.is_decoded
    assert again.original_bytes == first.original_bytes == CONTENT
    assert again.is_extracted


def test_an_image_that_was_left_in_its_body_is_opened_in_a_thread(threads: list[bool]) -> None:
    url = f"data:image/png;base64,{TEXT.decode()}"
    assert [fetch(url).original_bytes for _ in range(2)] == [CONTENT] * 2
    assert threads == [False, False]


def test_another_tenants_image_is_unknown(threads: list[bool]) -> None:
    fetch(URL)
    token = tenant.SALT.set("another")
    try:
        fetch(URL, tenant.key_of("another"))
        fetch(URL, tenant.key_of("another"))
    finally:
        tenant.SALT.reset(token)
    assert threads == [False, False, True]


@pytest.mark.parametrize("mode", ["video", "RGB"])
def test_what_would_be_decoded_is_not_at_hand(mode: str) -> None:
    """A record of a video, and one of an image that is larger than vLLM opens."""
    fetch(URL)
    key = _key(tenant.digest(CONTENT, None), loader())
    with placeholders.register({NAME: Base64Image(TEXT)}):
        assert is_at_hand(URL, loader())
        RECORDS.replace(key, MediaInfo((1 << 20, 1 << 20) if mode == "RGB" else (8, 8), mode, None))
        assert not is_at_hand(URL, loader())


def test_what_is_no_image_of_a_body_is_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(URL)

    class Other(type(loader())):  # type: ignore[misc]
        """Somebody's, which may do more than vLLM's."""

    with placeholders.register({NAME: Base64Image(TEXT)}):
        assert not is_at_hand("https://example.org/image.png", loader())
        assert not is_at_hand(URL, Other())
        assert not is_at_hand(URL[:-1], loader())
        monkeypatch.setattr(status, "is_on", lambda name: name != "lazy_media")
        assert not is_at_hand(URL, loader())
    assert not is_at_hand(URL, loader()), "its request was answered"
