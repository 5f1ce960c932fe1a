# SPDX-License-Identifier: Apache-2.0
"""An image that travels as its file. Made in the process of a job's author, opened in the process with the renderer."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from vllm_mmcache.base.tenant import SALT
from vllm_mmcache.batch.source import Source, check, describe, describe_error, is_url, read, version

_RECENT: deque[MediaWithBytes[Any]] = deque(maxlen=32)
"""What vLLM without the plugin has asked for last, since it asks several times for each image of a request."""


class EncodedImage(MediaWithBytes):
    """One image of a prompt or a row, which pickles as the file's bytes, or as the reference to it.

    vLLM takes it wherever it takes a PIL image: in `multi_modal_data`, and as `image_pil` of a chat's content. With the
    plugin it is opened as an image of an HTTP request is: a known one stays undecoded. Without the plugin vLLM decodes
    it where it needs the pixels. The answer is that of a data URL of the same file.

    tenant: whose image it is; its requests share nothing with those of another. Needs the component identity.
    image_mode, rgba_background_color: as in vLLM's --media-io-kwargs, which hold for URLs alone.
    """

    def __init__(
        self,
        source: Source,
        *,
        tenant: str | None = None,
        image_mode: str | None = "RGB",
        rgba_background_color: Sequence[int] = (255, 255, 255),
    ) -> None:
        """Nothing is read here. Raises: TypeError for a source that is none, ValueError for a color that is none."""
        check(source)
        self._source = source
        self._options = {"image_mode": image_mode, "rgba_background_color": tuple(rgba_background_color)}
        self._opened: ref[MediaWithBytes[Any]] | None = None
        self._version: tuple[int, int] | None = None
        self._is_named = False
        self.tenant = tenant
        ImageMediaIO(**self._options)

    def open(self) -> MediaWithBytes[Any]:
        """Read the file, and have vLLM's loader open it; with the plugin, for the tenant that is being worked for.

        Raises: VLLMValidationError, which names the file, where it can't be read or is no image, and where nothing
        would keep the tenant apart. AsyncLLM hands its text on, and replaces errors of other kinds by an empty one.
        """
        if self.tenant is not None and SALT.get() is None:
            raise VLLMValidationError(
                f"{self!r} has a tenant, and nothing keeps tenants apart here: vllm-mmcache is off, or its component "
                "identity is. Switch it on, or give no tenant."
            )
        try:
            return ImageMediaIO(**self._options).load_bytes(read(self._source))
        except Exception as error:  # a file system's own, and whatever somebody's function raises
            said = describe_error(self._source, error)
            cause = None if is_url(self._source) else error
            raise VLLMValidationError(f"{self!r} can't be opened: {said}") from cause

    @property
    def opened(self) -> MediaWithBytes[Any] | None:
        """What it was opened as, if that is at hand; looking at it opens nothing."""
        return None if self._opened is None else self._opened()

    @property
    def media(self) -> Any:
        """The image that vLLM's loader has made."""
        return self._kept().media

    @property
    def original_bytes(self) -> bytes:
        """The file. vLLM names the image by it, and asks for the pixels that have the name afterwards."""
        opened = self._kept(may_be_named=False)
        self._is_named = True
        return bytes(opened.original_bytes)

    @property
    def io_config(self) -> dict[str, Any] | None:
        """How the image was changed when it was opened, as vLLM hashes it."""
        options: dict[str, Any] | None = self._kept(may_be_named=False).io_config
        return options

    def _kept(self, may_be_named: bool = True) -> MediaWithBytes[Any]:
        """The image, of the file as it is; of the one that vLLM has named, as long as it may be that one."""
        opened = self.opened
        if opened is not None and may_be_named and self._is_named:
            return opened
        version_now = version(self._source)
        if opened is None or version_now != self._version:
            opened = self.open()
            _RECENT.append(opened)
            self._opened, self._version, self._is_named = ref(opened), version_now, False
        return opened

    def __getattr__(self, name: str) -> Any:
        # What Arrow, NumPy and pickle look for must not open the image.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.media, name)

    def __reduce__(self) -> Any:
        return _restored, (self._source, self.tenant, self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self._source)})"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def question(images: Sequence[EncodedImage | Source], text: str, *, tenant: str | None = None) -> dict[str, Any]:
    """The columns `messages` and `multimodal_data` of a row of ray.data.llm that asks about images.

    The images come first, so that the next question about them finds their KV. tenant: of images that are given as
    sources. Give the stage that prepares images `enabled=False`.
    """
    encoded = [one if isinstance(one, EncodedImage) else EncodedImage(one, tenant=tenant) for one in images]
    content = [*({"type": "image"} for _ in encoded), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "multimodal_data": {"image": encoded}}


def encoded_in(mm_data: Mapping[str, Any]) -> list[EncodedImage]:
    """The images of a prompt that are still to be opened, in their order. mm_data: as vLLM's prompts have it."""
    return [one for one in images_of(mm_data) if isinstance(one, EncodedImage)]


def with_opened(mm_data: Mapping[str, Any], opened: Sequence[MediaWithBytes[Any]]) -> dict[str, Any]:
    """The same data with what was opened in the places of `encoded_in`. opened: in the same order."""
    left = iter(opened)
    images = [next(left) if isinstance(one, EncodedImage) else one for one in images_of(mm_data)]
    return {**mm_data, "image": images}


def tenant_of(mm_data: Mapping[str, Any]) -> str | None:
    """Whose the images of a prompt are; None where none names a tenant. Raises: ValueError for two tenants."""
    tenants = {one.tenant for one in encoded_in(mm_data) if one.tenant is not None}
    if len(tenants) > 1:
        raise ValueError("the images of a prompt have different tenants: ask about each tenant's images alone")
    return next(iter(tenants), None)


def images_of(mm_data: Mapping[str, Any]) -> Sequence[Any]:
    """The images of a prompt, whatever they come as."""
    images = mm_data.get("image")
    return images if isinstance(images, list | tuple) else [images]


def _restored(source: Source, tenant: str | None, options: dict[str, Any]) -> EncodedImage:
    return EncodedImage(source, tenant=tenant, **options)
