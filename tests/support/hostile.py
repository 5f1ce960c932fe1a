# SPDX-License-Identifier: Apache-2.0
"""Hostile values for each kind of entry of a store. Each sits in a right frame, so only what it says is wrong."""

import json
import pickle
import struct
from pathlib import Path
from random import Random
from typing import Any

import cloudpickle
import msgspec
from blake3 import blake3

from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import FEATURES, LENGTH, Shape, pack

DEEP = 20_000


class Marker:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")

    def pickles(self) -> list[bytes]:
        """That file's writing, in each form that some decoder executes."""
        return [
            pickle.dumps(self),
            pickle.dumps(self, protocol=0),
            cloudpickle.dumps(lambda: self.path),
            cloudpickle.dumps(self),
        ]


def number(chance: Random) -> int:
    return chance.choice((0, -1, -7, 2**20, 2**31, 2**53, -(2**63), 2**63 - 1, 10**12))


def extension(chance: Random, marker: Marker) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(chance.choice((1, 2, 3, 0, 42, -1)), chance.choice(marker.pickles()))


def nested(chance: Random) -> bytes:
    """Deep in itself, as msgpack or as JSON."""
    depth = chance.choice((100, 900, DEEP))
    return chance.choice(
        (b"\x91" * depth, b"\x81\xa1a" * depth, b"[" * depth, b'{"a":' * depth, b"\x91" * depth + b"\x00")
    )


def counted(chance: Random) -> bytes:
    """The head of a list, map, text or bytes of billions, of which little follows."""
    head = chance.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + struct.pack(
        ">I", chance.choice((2**32 - 1, 2**28))
    )
    return (
        chance.choice((b"", b"\x92\x02", b"\x92\x02\x81\xaeimage_grid_thw"))
        + head
        + chance.randbytes(chance.randrange(64))
    )


def noise(chance: Random, good: bytes) -> bytes:
    """Cut, longer, or of another kind altogether."""
    ways = (
        lambda: good[: chance.randrange(len(good))],
        lambda: good + chance.randbytes(chance.randrange(1, 9)),
        lambda: chance.randbytes(chance.randrange(200)),
        lambda: chance.randbytes(60_000),
        lambda: b"",
        lambda: json.dumps([2, 1, 2]).encode(),
        lambda: msgspec.msgpack.encode([2, {}]) * 2,
    )
    return chance.choice(ways)()


def item_record(chance: Random, good: bytes, others: list[bytes], marker: Marker) -> bytes:
    """For a record of an image's item, of a model with a grid of patches; `others` are records of other models."""
    encode = msgspec.msgpack.encode

    def with_fields(fields: Any, number: Any = 2) -> bytes:
        return encode([number, fields])

    def grid(*sizes: int, shape: Any = None) -> bytes:
        data = struct.pack(f"<{len(sizes)}q", *sizes)
        return with_fields({"image_grid_thw": {"shape": [len(sizes)] if shape is None else shape, "data": data}})

    def former() -> bytes:  # of version 1: updates with runs, and what vLLM's own decoder took
        inner = {"image_grid_thw": {"data": extension(chance, marker), "field": ["batched", {"keep_on_cpu": True}]}}
        tokens = [(chance.randrange(-5, 10**6), chance.choice((80_000_000, 2**40, -1)))]
        return encode([[["image", "replace", [1], tokens, None]] * chance.choice((1, 500)), encode(inner)])

    fields = msgspec.msgpack.decode(good)[1]
    tensor = fields["image_grid_thw"]
    ways = (
        lambda: encode(extension(chance, marker)),
        lambda: with_fields(extension(chance, marker)),
        lambda: with_fields({"image_grid_thw": extension(chance, marker)}),
        lambda: with_fields({"image_grid_thw": {**tensor, "data": extension(chance, marker)}}),
        lambda: with_fields({"image_grid_thw": ["int64", [3], extension(chance, marker)]}),
        lambda: chance.choice(marker.pickles()),
        former,
        lambda: with_fields(fields, chance.choice((0, 1, 3, 99, -2, True, "2", 2.5, None, 2**63))),
        lambda: grid(number(chance), number(chance), number(chance)),
        lambda: grid(1, chance.choice((3, 7, 9)), chance.choice((2, 4, 5))),
        lambda: grid(chance.choice((1, 500)), chance.choice((100_000, 3000)), 3000),
        lambda: grid(1, 4),
        lambda: grid(1, 4, 4, 4),
        lambda: grid(
            1, 4, 4, shape=chance.choice(([3, 1], [1, 3], [], [-3], [2**40, 3], [0], [3.0], ["3"], [1] * 9, None, 3))
        ),
        lambda: with_fields({"image_grid_thw": {**tensor, "data": tensor["data"] * 2}}),
        lambda: with_fields({"image_grid_thw": {**tensor, "data": tensor["data"].hex()}}),
        lambda: with_fields({"image_grid_thw": {**tensor, "more": 1}}),
        lambda: with_fields(
            {"image_grid_thw": chance.choice((1, 1.5, [], [1, 2, 3], [tensor], None, True, float("nan")))}
        ),
        lambda: with_fields({"image_grid_thw": [1] * 30_000}),
        lambda: with_fields({chance.choice(("pixel_values", "mmcache_deferred", "", "a" * 5000, "../x")): tensor}),
        lambda: with_fields({**fields, chance.choice(("video_grid_thw", "image_embeds", "z" * 300)): tensor}),
        lambda: with_fields({str(one): tensor for one in range(400)}),
        lambda: with_fields({}),
        lambda: with_fields({7: tensor}),
        lambda: b"\x92\xcc\x02" + good[2:],  # the same, written otherwise
        lambda: chance.choice(others),
        lambda: nested(chance),
        lambda: b"\x92\x02" + nested(chance),
        lambda: b"\x92\x02\x81\xaeimage_grid_thw" + nested(chance),
        lambda: counted(chance),
        lambda: noise(chance, good),
    )
    return chance.choice(ways)()


def image_record(chance: Random, good: bytes, marker: Marker, place: str = "") -> bytes:
    """For a record of an image, JSON: [format, width, height, mode, settings, [[question, mm_hash], ...]]."""
    values = json.loads(good)

    def put(index: int, value: Any) -> bytes:
        return json.dumps([*values[:index], value, *values[index + 1 :]]).encode()

    digest = "a" * 64
    odd: tuple[Any, ...] = (0, -1, -640, True, False, None, "7", 1.5, [1], {}, 2**31, 2**63, 10**18, 10**400)
    hashes = ("", "A" * 64, "a" * 31, "a" * 129, "a" * 50_000, "../" * 20, digest + "\n", "ü" * 64, 7, None, [digest])
    ways = (
        lambda: put(0, chance.choice((0, 1, 3, -2, True, "2", None, 2.5, 10**30))),
        lambda: json.dumps(values[1:]).encode(),  # of version 1
        lambda: put(1, chance.choice(odd)),
        lambda: put(2, chance.choice(odd)),
        lambda: json.dumps([values[0], 2**17, 2**17, *values[3:]]).encode(),
        lambda: put(3, chance.choice(("", "rgb", "RGBX;999", "os.system", "R" * 9999, 3, None, ["RGB"], {}))),
        lambda: put(4, chance.choice(([], 3, "x", {"a": {"b": 1}}, {"a" * 99: 1}, {str(one): 1 for one in range(99)}))),
        lambda: put(4, {"a": 10 ** chance.randrange(20, 400)}),
        lambda: put(4, {"a": [[[1]]]}),
        lambda: put(4, {"a": [0] * 9000}),
        lambda: put(5, [[["blake3"], chance.choice(hashes)]]),
        lambda: put(5, [[["q" * 9000], digest]]),
        lambda: put(5, [[["q"] * 50, digest]]),
        lambda: put(5, [[[chance.choice((1, None, ["a"], True))], digest]]),
        lambda: put(5, [[["blake3", str(one)], digest] for one in range(500)]),
        lambda: put(5, chance.choice((None, {}, 3, "x", [[]], [["blake3"]], [[[], digest, digest]]))),
        lambda: json.dumps([*values, 1]).encode(),
        lambda: json.dumps(values[:-1]).encode(),
        lambda: good.replace(b"[", chance.choice((b"[NaN,", b"[Infinity,", b"[1e999,")), 1),
        lambda: good[:1] + b"9" * 50_000 + good[1:],
        lambda: good[:-1] + b"," + b"[" * DEEP,
        lambda: json.dumps(values).encode("utf-16"),
        lambda: msgspec.msgpack.encode(values),
        lambda: msgspec.msgpack.encode([2, extension(chance, marker)]),
        lambda: chance.choice(marker.pickles()),
        lambda: nested(chance),
        lambda: b"[2," + nested(chance),
        lambda: noise(chance, good),
    )
    return chance.choice(ways)()


def video_record(chance: Random, good: bytes, marker: Marker) -> bytes:
    """For a record of a video, whose settings are {"shape": ..., "metadata": text}."""
    values = json.loads(good)
    about = values[4]
    metadata = json.loads(about["metadata"])

    def kept(**changed: Any) -> bytes:
        return json.dumps([*values[:4], {**about, **changed}, values[5]]).encode()

    def told(**changed: Any) -> bytes:
        return kept(metadata=json.dumps({**metadata, **changed}))

    frames, height, width, channels = about["shape"]
    shapes: tuple[Any, ...] = (
        [], [1], [frames, height], [0, height, width, channels], [-1, height, width, channels],
        [frames, height, width, 0],
        [2**40, height, width, channels], [2**29, height, width, channels], [frames, width, height + 1, channels],
        [frames, height, width, channels, 1], [True, height, width, channels], "x", None, [[1]],
        [1.5, height, width, 3],
    )  # fmt: skip
    bad = (float("nan"), float("inf"), 1e300, 10**40, -(10**20), {"a": 1}, [[1]], "x" * 999, [0] * 9000)
    texts = (
        "",
        "x",
        "[]",
        "7",
        "null",
        "[" * 9000,
        '{"a":' * 3000,
        '{"fps": NaN}',
        '{"fps": 1e999}',
        "{" + "x" * 16000,
    )
    ways = (
        lambda: kept(shape=chance.choice(shapes)),
        lambda: kept(metadata=chance.choice(texts)),
        lambda: kept(metadata=chance.choice((None, 3, [], {}, "y" * 20_000))),
        lambda: told(**{chance.choice(("fps", "duration", "total_num_frames", "frames_indices")): chance.choice(bad)}),
        lambda: told(**{"k" * 99: 1}),
        lambda: told(**{str(one): one for one in range(200)}),
        lambda: kept(another=1),
        lambda: json.dumps([*values[:3], "RGB", *values[4:]]).encode(),
        lambda: json.dumps([*values[:4], None, values[5]]).encode(),
        lambda: json.dumps([*values[:4], {"shape": about["shape"]}, values[5]]).encode(),
        lambda: image_record(chance, good, marker),
    )
    return chance.choice(ways)()


def package(chance: Random, identity: Identity, shape: Shape, features: bytes, marker: Marker) -> bytes:
    """For a package of features: most have a right checksum."""

    def written(header: Any, rest: bytes) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH.size)
        return LENGTH.pack(len(text)) + text + rest

    def changed(**fields: Any) -> bytes:
        """Another record, with the checksum over it."""
        packed = pack(identity, shape, features)
        header = json.loads(packed[LENGTH.size : len(packed) - len(features)])
        record = json.loads(header["__metadata__"]["record"])
        text = json.dumps({**record, **fields}, separators=(",", ":"))
        header["__metadata__"] |= {"record": text, "blake3": blake3(text.encode() + features).hexdigest()}
        if isinstance(fields.get("shape"), list):
            header[FEATURES]["shape"] = fields["shape"]
        return written(header, features)

    def headed(**fields: Any) -> bytes:
        packed = pack(identity, shape, features)
        header = json.loads(packed[LENGTH.size : len(packed) - len(features)])
        return written({**header, **fields}, features)

    def of_format(text: Any) -> bytes:
        packed = pack(identity, shape, features)
        header = json.loads(packed[LENGTH.size : len(packed) - len(features)])
        header["__metadata__"]["format"] = text
        return written(header, features)

    other = Shape(max(1, shape.num_tokens - 1), shape.width, shape.dtype)
    half = Shape(shape.num_tokens, shape.width, "float16")
    who = identity.as_json()
    name = chance.choice(tuple(who))
    sizes: tuple[Any, ...] = (
        [2**60, 2**60], [10**4000, 1], [-1, shape.width], [0, 0], [True, shape.width], [shape.num_tokens], [], "x",
        None,
        [1, shape.num_tokens, shape.width], [shape.width, shape.num_tokens], [1.5, 2], [shape.num_tokens, 2**62],
    )  # fmt: skip
    whole = pack(identity, shape, features)
    ways = (
        lambda: pack(
            Identity.from_json({**who, name: who[name] + "x"}), shape, features
        ),  # another tenant's, another model's
        lambda: pack(identity, other, features[: other.num_bytes]),
        lambda: pack(identity, half, features[: half.num_bytes]),
        lambda: changed(shape=chance.choice(sizes)),
        lambda: changed(dtype=chance.choice(("float8", "object", "", 3, None, ["float32"], "x" * 9999))),
        lambda: changed(
            identity=chance.choice(({}, None, [], "x", {**who, "more": "x"}, {**who, name: 3}, {**who, name: {}}))
        ),
        lambda: changed(more=chance.choice(([[]], 1, "x" * 100_000))),
        lambda: of_format(chance.choice(("vllm-mmcache features 1", "vllm-mmcache features 3", "", None, 2, ["x"]))),
        lambda: headed(another={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
        lambda: headed(**{FEATURES: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**50]}}),
        lambda: headed(**{FEATURES: None}),
        lambda: LENGTH.pack(chance.choice((2**63, 2**40, 1024**2 + 1, 0, 7))) + whole[LENGTH.size :],
        lambda: written(b"[" * DEEP, features),
        lambda: written(b'{"__metadata__":' * 5000, features),
        lambda: written(b'{"__metadata__": {"format": ' + b"9" * 9000 + b"}}", features),
        lambda: written(
            {"__metadata__": {"format": "vllm-mmcache features 2", "record": "[" * DEEP, "blake3": ""}}, features
        ),
        lambda: written(b"[" + b"0," * 500_000 + b"0]", b""),
        lambda: whole[: chance.randrange(1, len(whole))],
        lambda: whole + chance.randbytes(chance.randrange(1, 99)),
        lambda: whole[:-4] + chance.randbytes(3) + bytes([whole[-1] ^ 1]),
        lambda: chance.choice(marker.pickles()) + features,
        lambda: chance.randbytes(chance.randrange(1, 5000)),
    )
    return chance.choice(ways)()
