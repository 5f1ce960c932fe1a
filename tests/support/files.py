# SPDX-License-Identifier: Apache-2.0
"""Image files of every kind that the image loader treats in its own way, good and bad."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin

from vllm_mmcache.exactness.pictures import ellipses

SIZE = (96, 64)  # (width, height)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_alpha(name: str) -> Image.Image:
    image = ellipses(name, SIZE).convert("RGBA")
    image.putalpha(ellipses(name + " alpha", SIZE).convert("L"))
    return image


def exif(**tags: Any) -> bytes:
    found = Image.Exif()
    for name, value in tags.items():
        found[getattr(ExifTags.Base, name)] = value
    return found.tobytes()


def wide_png(width: int, height: int) -> bytes:
    """A PNG that says it is this large and holds almost nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def good() -> dict[str, bytes]:
    """Name -> bytes of images that open."""
    image = ellipses("picture", SIZE)
    frames = [ellipses(f"frame {number}", SIZE) for number in range(3)]
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "a" * 100)
    ramp = np.arange(SIZE[0] * SIZE[1], dtype=np.uint16).reshape(SIZE[1], SIZE[0]) * 10
    return {
        "png": saved(image, "PNG", pnginfo=text),
        "jpeg": saved(image, "JPEG", quality=90),
        "jpeg progressive": saved(image, "JPEG", progressive=True),
        "jpeg grey": saved(image.convert("L"), "JPEG"),
        "jpeg cmyk": saved(image.convert("CMYK"), "JPEG"),
        "jpeg rotated": saved(image, "JPEG", exif=exif(Orientation=6)),
        "jpeg image id": saved(image, "JPEG", exif=exif(ImageID="0123456789abcdef0123456789abcdef")),
        "jpeg broken exif": saved(image, "JPEG", exif=b"Exif\0\0not a header"),
        "png rgba": saved(with_alpha("alpha"), "PNG"),
        "png grey alpha": saved(with_alpha("alpha").convert("LA"), "PNG"),
        "png palette": saved(image.convert("P"), "PNG"),
        "png palette transparent": saved(image.convert("P"), "PNG", transparency=3),
        "png rgb transparent": saved(image, "PNG", transparency=(1, 2, 3)),
        "png one bit": saved(image.convert("1"), "PNG"),
        "png 16 bit": saved(Image.fromarray(ramp), "PNG"),
        "png animated": saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "gif": saved(image, "GIF"),
        "gif animated": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "webp": saved(image, "WEBP"),
        "webp rgba": saved(with_alpha("alpha"), "WEBP", lossless=True),
        "webp animated": saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "tiff": saved(image, "TIFF"),
        "tiff float": saved(Image.fromarray(ramp.astype(np.float32)), "TIFF"),
        "bmp": saved(image, "BMP"),
        "ico": saved(image, "ICO"),
    }


def bad() -> dict[str, bytes]:
    """Name -> bytes that stock refuses."""
    image = ellipses("picture", (400, 300))
    png, jpeg = saved(image, "PNG"), saved(image, "JPEG")
    return {
        "nothing": b"",
        "no image": b"These bytes are no image. " * 60,
        "png cut": png[: len(png) // 2],
        "jpeg cut": jpeg[: len(jpeg) // 2],
        "png header only": png[:40],
        "png wrong checksum": png[:20] + bytes([png[20] ^ 1]) + png[21:],
        "too many pixels": wide_png(20_000, 20_000),
        "a bomb": wide_png(60_000, 60_000),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n" + b"x" * 1000,
    }
