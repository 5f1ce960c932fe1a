# SPDX-License-Identifier: Apache-2.0
"""An image that knows its size and mode, and decodes when somebody asks for more. API server process, any thread.

Everything in Pillow that needs pixels goes through `load` or reads one of five attributes; all of them are filled
from the decoded image at once. It must never differ from the decoded image in anything but time.
"""

import threading
from collections.abc import Callable
from typing import Any

from PIL import Image

_DEFERRED = frozenset({"_im", "_readonly", "_exif", "palette", "info"})


class LazyImage(Image.Image):
    """An undecoded image. Copies, pickles and slices of it are plain images.

    decode gives the decoded image, a plain one of that size and mode; it is called at most once successfully. What
    it raises passes to whoever asked for pixels. Units: size is (width, height) in pixels.
    """

    def __init__(self, size: tuple[int, int], mode: str, decode: Callable[[], Image.Image]) -> None:
        # Not Image.__init__: the attributes that it would set are those that are not known yet.
        self._size = size
        self._mode = mode
        self._decode: Callable[[], Image.Image] | None = decode
        self._decoding = threading.Lock()

    @property
    def is_decoded(self) -> bool:
        """Whether the pixels are here, and the encoded bytes let go of."""
        return self._decode is None

    def load(self) -> Any:
        """Decode, if that has not happened; then as Pillow's own."""
        self._fill()
        return super().load()

    def __getattr__(self, name: str) -> Any:
        if name not in _DEFERRED or self.is_decoded:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._fill()
        return self.__dict__[name]

    def __reduce__(self) -> Any:
        return _restore, (self.__getstate__(),)

    def _fill(self) -> None:
        with self._decoding:
            if self._decode is not None:
                for name, value in self._decode().__dict__.items():
                    self.__dict__.setdefault(name, value)  # what was set on the undecoded image stays
                self._decode = None  # lets go of the bytes


def _restore(state: list[Any]) -> Image.Image:
    image = Image.Image()
    image.__setstate__(state)
    return image
