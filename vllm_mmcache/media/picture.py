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


class LazyPicture(Image.Image):
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
        return "_im" in self.__dict__

    def load(self) -> Any:
        """Decode, if that has not happened; then as Pillow's own."""
        self._fill()
        return super().load()

    def __getattr__(self, name: str) -> Any:
        if name not in _DEFERRED or self.is_decoded:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._fill()
        return self.__dict__[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._fill()
        plain = Image.Image()
        plain.__dict__.update({name: self.__dict__[name] for name in plain.__dict__})
        return plain.__reduce_ex__(protocol)

    def _fill(self) -> None:
        if self.is_decoded:
            return
        with self._decoding:
            if self._decode is None:  # another thread was faster
                return
            state = dict(self._decode().__dict__)
            pixels = state.pop("_im")
            self.__dict__.update(state)
            self.__dict__["_im"] = pixels  # last: it says to other threads that the rest is there
            self._decode = None  # lets go of the bytes
