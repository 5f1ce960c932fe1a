# SPDX-License-Identifier: Apache-2.0
"""vLLM's own inputs of its processor with the group installed: which mm_hash an item gets, what collides on stock."""

import struct
import uuid
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from vllm_mmcache.base import settings, status, tenant
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.identity.aliases import ALIASES
from vllm_mmcache.content.content_name import name_of
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import COMPONENTS

pytestmark = pytest.mark.answers


@pytest.fixture(params=["stock", "identity"])
def side(request: pytest.FixtureRequest) -> Iterator[str]:
    """For what must hold, or fail, on stock too."""
    if request.param == "identity":
        outcome = installer.install("identity", COMPONENTS["identity"].all_hooks(), vllm_version())
        assert outcome.state == "on", outcome.reason
    yield request.param
    installer.undo("identity")


@pytest.fixture
def installed() -> Iterator[None]:
    ALIASES.clear()
    outcome = installer.install("identity", COMPONENTS["identity"].all_hooks(), vllm_version())
    assert outcome.state == "on", outcome.reason
    yield
    installer.undo("identity")


def hashes(
    modality: str,
    items: Any,
    names: Any = None,
    salt: str | None = None,
    arguments: Mapping[str, object] | None = None,
    loader: Mapping[str, Mapping[str, object]] | None = None,
) -> list[str]:
    """The mm_hashes of items of one modality, as vLLM's processor gets them."""
    from vllm.multimodal.parse import MultiModalDataParser
    from vllm.multimodal.processing.inputs import ProcessorInputs

    parsed = MultiModalDataParser().parse_mm_data({modality: items})
    inputs = ProcessorInputs(
        [], parsed, None if names is None else {modality: names},
        hf_processor_mm_kwargs=arguments or {}, media_io_kwargs=loader or {},
    )  # fmt: skip
    token = tenant.SALT.set(salt)
    try:
        (found,) = inputs.get_mm_hashes("zoo", "blake3").values()
    finally:
        tenant.SALT.reset(token)
    return list(found)


def image(seed: int = 0, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


PIXELS = bytes(range(250)) * 36
RAMP = np.arange(3 * 16 * 16, dtype=np.float32).reshape(3, 16, 16)
FRAMES = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)


def with_palette(colours: list[int]) -> Image.Image:
    found = Image.frombytes("P", (16, 16), bytes(range(256)))
    found.putpalette(colours)
    return found


COLLISIONS: dict[str, tuple[str, Any, Any]] = {
    "30x100 against 100x30": (
        "image", Image.frombytes("RGB", (30, 100), PIXELS), Image.frombytes("RGB", (100, 30), PIXELS),
    ),
    "palettes": ("image", with_palette(list(range(256)) * 3), with_palette(list(range(255, -1, -1)) * 3)),
    "modes": ("image", Image.frombytes("L", (90, 100), PIXELS), Image.frombytes("RGB", (30, 100), PIXELS)),
    "tensors of two dtypes": ("image", torch.from_numpy(RAMP), torch.from_numpy(RAMP.view(np.int32))),
    "tensors of two shapes": ("image", torch.from_numpy(RAMP), torch.from_numpy(RAMP.reshape(3, 8, 32))),
    "bfloat16 against float16": (
        "image", torch.ones((3, 8, 8), dtype=torch.bfloat16),
        torch.ones((3, 8, 8), dtype=torch.bfloat16).view(torch.float16),
    ),
    "arrays of two byte orders": ("image", RAMP, RAMP.view(">f4")),
    "array against tensor": ("image", RAMP, torch.from_numpy(RAMP)),
    "swapped frames": ("video", FRAMES, FRAMES[[1, 0, 2, 3]]),
    "frames of another shape": ("video", FRAMES, FRAMES.reshape(4, 4, 16, 3)),
    "one changed pixel of a frame": ("video", FRAMES, FRAMES ^ np.eye(8, dtype=np.uint8)[0][None, None, :, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLISIONS)
@pytest.mark.parametrize("salt", [None, "s"])
def test_different_content_has_different_ids(name: str, salt: str | None, side: str) -> None:
    """On stock too: its framing of items is sound. The same item twice has one id."""
    modality, one, other = COLLISIONS[name]
    found = [hashes(modality, [item], salt=salt)[0] for item in (one, other, one)]
    assert found[0] == found[2] != found[1]


def media(seed: int, image_id: uuid.UUID | None = None) -> Any:
    """A picture with its bytes, as programs hand it over; vLLM copies a bare image, and its EXIF is lost on the way."""
    from vllm.multimodal.media import MediaWithBytes

    found = image(seed)
    if image_id is not None:
        found.getexif()[ExifTags.Base.ImageID] = image_id
    return MediaWithBytes(found, found.tobytes())


def test_exif_is_not_trusted(side: str) -> None:
    """Stock takes a UUID in an image's EXIF for its identity, whatever it shows."""
    one, other = (hashes("image", [media(seed, uuid.UUID(int=7))])[0] for seed in (1, 2))
    assert (one == other) == (side == "stock")
    assert (one == hashes("image", [media(1)])[0]) == (side == "identity")


ONE_AS_INTEGER = struct.unpack("<q", struct.pack("<d", 1.0))[0]
CONFUSED = {
    "integer and float": (1.0, ONE_AS_INTEGER),
    "truth and text": (True, "\x01"),
    "text and integer": ("bilinear", int.from_bytes(b"bilinear", "little")),
}


@pytest.mark.parametrize("kind", CONFUSED)
def test_arguments_of_other_types(kind: str, side: str) -> None:
    """Stock hashes a leaf's bytes without its type, so these two requests share a key."""
    one, other = (hashes("image", [image()], arguments={"factor": value})[0] for value in CONFUSED[kind])
    assert (one == other) == (side == "stock")


@pytest.mark.usefixtures("installed")
def test_stock_ids_without_salt_and_arguments() -> None:
    """Replicas with and without the plugin share keys; a uuid changes nothing."""
    items = [image(1), image(2, "RGBA")]
    plain, named = hashes("image", items), hashes("image", items, ["x", None])
    installer.undo("identity")
    assert plain == named == hashes("image", items)
    assert hashes("image", items, ["x", None])[0] == "x"  # control: stock's own


@pytest.mark.usefixtures("installed")
def test_every_tenant_has_its_own() -> None:
    found = [hashes("image", [image()], names, salt)[0] for salt in (None, "a", "b") for names in (None, ["x"])]
    assert found[0::2] == found[1::2]
    assert len(set(found)) == 3


@pytest.mark.usefixtures("installed")
def test_alone_a_uuid_is_looked_up() -> None:
    (bound,) = hashes("image", [image()], ["x"], "a")
    assert hashes("image", [None], ["x"], "a") == [bound]
    others = [hashes("image", [None], [name], salt)[0] for name, salt in (("x", "b"), ("x", None), ("y", "a"))]
    assert bound not in others
    (again,) = hashes("image", [image(2)], ["x"], "a")
    assert again != bound
    assert hashes("image", [None, image(3), None], ["x", None, "x"], "a") == [
        again, *hashes("image", [image(3)], salt="a"), again,
    ]  # fmt: skip


@pytest.mark.usefixtures("installed")
def test_a_uuid_is_never_a_key() -> None:
    """Whatever it looks like: another image's id, or a name that vLLM makes for one request."""
    (public,) = hashes("image", [image()])
    for name in (public, "renderer0-mm-1-image-0", ""):
        assert hashes("image", [None], [name]) != [name]
        assert hashes("image", [image(2)], [name]) == hashes("image", [image(2)])


@pytest.mark.usefixtures("installed")
def test_arguments_make_other_ids() -> None:
    seen = [
        hashes("image", [image()], ["x"], salt, arguments, loader)[0]
        for salt in (None, "a")
        for arguments in (None, {"max_pixels": 4096}, {"max_pixels": 4097})
        for loader in (None, {"image": {"image_mode": "L"}})
    ]
    assert len(set(seen)) == len(seen) == 12
    assert hashes("image", [None], ["x"], "a", {"max_pixels": 4096}) == [seen[8]]


@pytest.mark.usefixtures("installed")
def test_switched_off_by_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(status._is_on, "identity", False)
    assert hashes("image", [image()], ["x"], "a") == ["x"]


def test_names_that_vllm_makes() -> None:
    """Where nothing is cached, vLLM names items itself; only those names are kept, a client's is not."""
    from vllm_mmcache.components.identity.hooks import mark_own_names
    from vllm_mmcache.content.request_id import RequestScopedId

    def stock(mm_data: Any, mm_data_items: Any, mm_uuid_items: Any, mm_req_id: str) -> Any:
        return {"image": [name or f"{mm_req_id}-image-{n}" for n, name in enumerate(mm_uuid_items["image"])]}

    made = mark_own_names(stock, None, (None, None, {"image": ["x", None]}, "renderer0-mm-1"), {})["image"]
    assert made == ["x", "renderer0-mm-1-image-1"]
    assert [isinstance(name, RequestScopedId) for name in made] == [False, True]


@pytest.mark.usefixtures("installed")
def test_names_of_one_request_are_not_hashed() -> None:
    from vllm_mmcache.content.request_id import RequestScopedId

    own = RequestScopedId("renderer0-mm-1-image-0")
    assert hashes("image", [image()], [own], "a") == [own]
    assert hashes("image", [image()], [str(own)], "a") != [own]


@pytest.mark.usefixtures("installed")
def test_instances_that_share_names() -> None:
    """An encoder-cache connector finds items by the client's names: these count, but for one tenant alone."""
    from vllm_mmcache.components.identity import hooks as renderer

    token = renderer._NAMES_ARE_SHARED.set(True)
    try:
        assert hashes("image", [image()], ["x"]) == ["x"]
        ours = hashes("image", [image()], ["x"], "a")
        assert ours == hashes("image", [image(2)], ["x"], "a") != hashes("image", [image()], ["x"], "b")
        assert ours != ["x"]
    finally:
        renderer._NAMES_ARE_SHARED.reset(token)


def test_threads_see_the_request(installed: None) -> None:
    """vLLM's make_async with the group installed, and without it as the control."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from vllm.renderers import base

    async def ask(salt: str) -> str | None:
        tenant.SALT.set(salt)
        found: str | None = await base.make_async(tenant.SALT.get, executor)()
        return found

    async def both() -> list[str | None]:
        return list(await asyncio.gather(ask("a"), ask("b")))

    with ThreadPoolExecutor(1) as executor:
        assert asyncio.run(both()) == ["a", "b"]
        installer.undo("identity")
        assert asyncio.run(both()) == [None, None]


def test_a_function_that_was_made_at_the_start_sees_the_request_that_calls_it(installed: None) -> None:
    """As vLLM makes them, once with its renderer. The thread sees whose request it is, not who made the function."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from vllm.renderers import base

    async def ask(salt: str) -> str | None:
        tenant.SALT.set(salt)
        found: str | None = await in_thread()
        return found

    async def both() -> list[str | None]:
        return list(await asyncio.gather(ask("a"), ask("b")))

    with ThreadPoolExecutor(1) as executor:
        in_thread = base.make_async(tenant.SALT.get, executor)
        assert asyncio.run(both()) == ["a", "b"]


@pytest.mark.parametrize("name", ["u" * 129, "\ud800", 7])
@pytest.mark.usefixtures("installed")
def test_wrong_names(name: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    from vllm_mmcache.components.identity import hooks as renderer

    with pytest.raises(VLLMValidationError, match="uuid") as raised:
        renderer._check_name(name)
    assert "uuu" not in str(raised.value)
    renderer._check_name("u" * 128)


def named_media(seed: int) -> tuple[Any, str]:
    """An image with its file, as a server has it, and the name that the client transport gives it."""
    found = media(seed)
    return found, name_of(found.original_bytes)


@pytest.mark.usefixtures("installed")
def test_a_name_that_claims_a_digest_is_that_digest() -> None:
    """Without a salt, where everybody shares the names: nobody can bind it to another image."""
    from vllm.exceptions import VLLMValidationError

    item, name = named_media(1)
    other, _ = named_media(2)
    for wrong in (other, image(1)):  # another file; pixels without a file
        with pytest.raises(VLLMValidationError, match="claims a digest") as raised:
            hashes("image", [wrong], [name])
        assert name not in str(raised.value)
    (unbound,) = hashes("image", [None], [name])
    (bound,) = hashes("image", [item], [name])
    assert hashes("image", [None], [name]) == [bound] == hashes("image", [item]) != [unbound]
    with pytest.raises(VLLMValidationError, match="claims a digest"):
        hashes("image", [other], [name])
    assert hashes("image", [None], [name]) == [bound]


@pytest.mark.usefixtures("installed")
def test_a_claim_of_another_version_stands_for_nothing() -> None:
    """An older or newer client is served; what it names can't be checked here, so it sends its images whole."""
    item, name = named_media(1)
    for foreign in (name.replace("mmc2-", "mmc1-"), name.replace("mmc2-", "mmc3-")):
        assert hashes("image", [item], [foreign]) == hashes("image", [item])
        assert hashes("image", [None], [foreign]) != hashes("image", [item])


@pytest.mark.usefixtures("installed")
def test_a_claim_for_what_has_no_file_stands_for_nothing() -> None:
    """Kimi K2.5's images come as chunks of vision: a client that names them is served, and sends them whole."""
    from vllm_mmcache.components.identity import hooks

    _, name = named_media(1)
    first, other = ({"type": "image", "image": image(seed), "uuid": name} for seed in (1, 2))
    (bare,) = hashes("vision_chunk", [first])
    assert hashes("vision_chunk", [first], [name]) == [bare]
    assert hashes("vision_chunk", [other], [name]) == hashes("vision_chunk", [other]) != [bare], "not bound"
    shared = hooks._NAMES_ARE_SHARED.set(True)
    try:
        assert hashes("vision_chunk", [first], [name]) == [bare], "nor shared with other instances"
    finally:
        hooks._NAMES_ARE_SHARED.reset(shared)


@pytest.mark.usefixtures("installed")
def test_a_prompt_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again with the same one, about another tenant's image, is that tenant."""
    from vllm_mmcache.components.identity import hooks as renderer

    monkeypatch.setattr(renderer, "_tenant_of_images", lambda prompt: prompt["multi_modal_data"]["image"])
    prompt: dict[str, Any] = {"prompt_token_ids": [1], "multi_modal_data": {"image": "a"}}
    base = SimpleNamespace(config=SimpleNamespace(ec_transfer_config=None))
    for name in "ab":
        prompt["multi_modal_data"] = {"image": name}
        with renderer._request(base, prompt) as given:
            assert (given["cache_salt"], tenant.SALT.get()) == (name, name)
        assert "cache_salt" not in prompt


@pytest.mark.usefixtures("installed")
def test_instances_that_share_names_check_claims() -> None:
    from vllm.exceptions import VLLMValidationError

    from vllm_mmcache.components.identity import hooks as renderer

    item, name = named_media(1)
    token = renderer._NAMES_ARE_SHARED.set(True)
    try:
        assert hashes("image", [item], [name]) == [name]
        with pytest.raises(VLLMValidationError, match="claims a digest"):
            hashes("image", [named_media(2)[0]], [name])
    finally:
        renderer._NAMES_ARE_SHARED.reset(token)


MARKER = "0123456789abcdef" + "0" * 48


@pytest.mark.parametrize("ids", ["vllm", "dynamo"])
def test_dynamos_uuid_is_bound_to_the_content(ids: Any, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digits begin the identifier where they are asked for; what else stands there is the image and the tenant."""
    monkeypatch.setattr(settings, "_current", settings.Settings(kv_event_ids=ids))
    ((one,), (other,), (salted,)) = (
        hashes("image", [image(seed)], [MARKER], salt=salt) for seed, salt in ((1, None), (2, None), (1, "s"))
    )
    assert len({one, other, salted, MARKER}) == 4
    assert all(found.startswith(MARKER[:16]) == (ids == "dynamo") for found in (one, other))
    assert hashes("image", [None], [MARKER]) == [other], "the uuid alone stands for what it was last sent with"
    assert hashes("image", [None], [MARKER], salt="s") == [salted]
    assert hashes("image", [None], [MARKER], salt="another tenant")[0] not in (one, other, salted)
    assert hashes("image", [image(1)], [MARKER]) == [one], "one image keeps its identifier"
    assert hashes("image", [image(1)], ["a client's own name"]) == hashes("image", [image(1)])
