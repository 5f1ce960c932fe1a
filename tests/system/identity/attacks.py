# SPDX-License-Identifier: Apache-2.0
"""The attacks. Each is told the server, and says what it got (any text), or None where it got nothing.

The attacker and the victims have salts of their own where nothing else is said; salts are secret, uuids are not.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

from PIL import Image

from tests.support import files
from tests.support.target import MODES, Target, fresh, picture, png, url_of
from vllm_mmcache.base.tenant import parse_source
from vllm_mmcache.content.content_name import name_of

Attack = Callable[[Target], str | None]


def tenants(number: int = 2) -> list[str]:
    return [fresh("salt") for _ in range(number)]


def foreign_uuid_with_own_image(server: Target) -> str | None:
    victim, attacker = tenants()
    uuid, secret, own = fresh("uuid"), png(fresh("secret")), png(fresh("own"))
    server.ask(secret, uuid, victim)
    reply = server.ask(own, uuid, attacker)
    return None if reply.sees == server.truth(own) else "an answer about the victim's image"


def foreign_uuid_without_image(server: Target) -> str | None:
    victim, attacker = tenants()
    uuid = fresh("uuid")
    server.ask(png(fresh("secret")), uuid, victim)
    got = [server.ask(None, uuid, salt).status for salt in (attacker, None)]
    return None if got == [400, 400] else f"answered {got}"


def sequential_uuids(server: Target) -> str | None:
    victim, attacker = tenants()
    for number in (3, 5):
        server.ask(png(fresh("secret")), f"invoice-{number}", victim)
    hits = [number for number in range(8) if server.ask(None, f"invoice-{number}", attacker).status != 400]
    return f"answered for {hits}" if hits else None


def poisoned_uuid(server: Target) -> str | None:
    """The attacker is first with a uuid that a victim will use; without salts, so that they share."""
    uuid, own, logo = fresh("logo"), png(fresh("own")), png(fresh("logo"))
    server.ask(own, uuid)
    return None if server.ask(logo, uuid).sees == server.truth(logo) else "the victim sees the attacker's image"


def stale_rebinding(server: Target) -> str | None:
    """One tenant gives its uuid to another image: later requests must see that one."""
    (salt,) = tenants(1)
    uuid, before, after = fresh("uuid"), png(fresh("before")), png(fresh("after"))
    server.ask(before, uuid, salt)
    replies = [server.ask(after, uuid, salt), server.ask(None, uuid, salt)]
    return None if all(reply.sees == server.truth(after) for reply in replies) else "the image before is seen"


def uuid_is_a_content_id(server: Target) -> str | None:
    """The name that vLLM has for a public image, with another image: whoever sends the public one is served that."""
    public, own = png(fresh("public")), png(fresh("own"))
    truth, name = server.truth(public), server.mm_hash(public)
    server.evict()  # both have put the public one under it
    server.ask(own, name)
    return None if server.ask(public).sees == truth else "a victim without uuid sees another image"


def uuid_is_a_content_id_without_image(server: Target) -> str | None:
    """The id of an image tells that it was sent, and about what it shows."""
    secret = png(fresh("secret"))
    server.ask(secret)
    status = server.ask(None, server.mm_hash(secret)).status
    return None if status == 400 else f"answered {status}"


def uuid_is_an_internal_name(server: Target) -> str | None:
    server.ask(png(fresh("secret")), None, fresh("salt"))
    names = [f"renderer0-mm-{number}-image-0" for number in range(1, 6)]
    names += ["mmcache-0123456789abcdef-0-0", "", "None", "image", "0" * 64]
    hits = [name for name in names if server.ask(None, name).status != 400]
    return f"answered for {hits}" if hits else None


def long_uuid(server: Target) -> str | None:
    status = server.ask(png("any"), "u" * 2**20).status
    return None if status == 400 else f"a uuid of 1 MB was answered {status}"


def odd_characters(server: Target) -> str | None:
    """Uuids that some layer might cut, join or take for a path: never another image, never an error of the server."""
    (salt,) = tenants(1)
    stem = fresh("odd")
    names = [
        stem,
        f"{stem}\0",
        f"{stem}\0b",
        f"../{stem}",
        f"/etc/{stem}",
        f"{stem}/..",
        f"{stem}:x",
        f"{stem}\n",
        "💥",
    ]
    images = {name: png(fresh("odd image")) for name in names}
    wrong = [name for name, image in images.items() if server.ask(image, name, salt).sees != server.truth(image)]
    wrong += [name for name, image in images.items() if server.ask(None, name, salt).sees != server.truth(image)]
    return f"another image, or an error, for {wrong}" if wrong else None


def broken_unicode(server: Target) -> str | None:
    """A lone surrogate can't be sent on; the server must say so, and live on."""
    import json

    import httpx

    part = {"type": "image_url", "image_url": {"url": url_of(png("any"))}, "uuid": "\ud800"}
    body = {"model": "zoo", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"},
        timeout=60,
    )  # fmt: skip
    assert server.ask(png("any")).status == 200
    return None if answer.status_code == 400 else f"answered {answer.status_code}"


def other_arguments(server: Target) -> str | None:
    """The same uuid with processor arguments, for another image."""
    uuid, secret, own = fresh("uuid"), png(fresh("secret")), png(fresh("own"))
    arguments: dict[str, Any] = {"mm_processor_kwargs": {"max_pixels": 48 * 48}}
    server.ask(secret, uuid, **arguments)
    truth = server.truth(own, **arguments)
    if server.ask(own, uuid, **arguments).sees != truth:
        return "an answer about the victim's image"
    return None if server.ask(None, uuid, **arguments).sees == truth else "a stale image"


def race(server: Target) -> str | None:
    """32 clients bind one uuid to 32 images at once, half of them as one tenant, and ask by uuid alone at once."""
    uuid, (shared,) = fresh("race"), tenants(1)
    images = [png(fresh("race image")) for _ in range(32)]
    salts = [shared if number % 2 else fresh("salt") for number in range(32)]
    truths = [server.truth(image) for image in images]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        with_image = pool.map(lambda one: server.ask(one[0], uuid, one[1]), zip(images, salts, strict=True))
        alone = pool.map(lambda salt: server.ask(None, uuid, salt), salts)
        replies = list(with_image)
        later = list(alone)
    wrong = [number for number, reply in enumerate(replies) if reply.sees != truths[number]]
    for number, reply in enumerate(later):
        possible = truths[1::2] if number % 2 else [truths[number]]
        if reply.status not in (200, 400) or (reply.status == 200 and reply.sees not in possible):
            wrong.append(number)
    return f"{len(wrong)} of 64 answers are about another image" if wrong else None


def eviction(server: Target) -> str | None:
    """The image goes between its alias and the use of it, also while other images come in."""
    (salt,) = tenants(1)
    uuid, image = fresh("uuid"), png(fresh("evicted"))
    truth = server.truth(image)
    server.ask(image, uuid, salt)
    server.evict()
    if server.ask(None, uuid, salt).status != 400:
        return "answered from nothing"
    server.ask(image, uuid, salt)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        flood = [pool.submit(server.ask, png(fresh("flood"), (256, 256)), None, fresh("salt")) for _ in range(8)]
        replies = [*pool.map(lambda _: server.ask(None, uuid, salt), range(12))]
        assert {one.result().status for one in flood} == {200}
    wrong = [reply.status for reply in replies if reply.status != 400 and reply.sees != truth]
    return f"wrong answers: {wrong}" if wrong else None


def mixed_up(server: Target, urls: list[str], **more: Any) -> str | None:
    """Whether two items that differ get one answer, where a fresh tenant gets two. Without salts: they share."""
    truths = [server.truth(url=url, **more) for url in urls]
    assert all(one != other for number, one in enumerate(truths) for other in truths[:number]), "not told apart"
    for order in (urls, urls[::-1]):
        for url in order:
            if server.ask(url=url, **more).sees != truths[urls.index(url)]:
                return "one image for another"
    return None


def turned_sizes(server: Target) -> str | None:
    pixels = picture(fresh("turned"), (30, 100)).tobytes()
    return mixed_up(
        server, [url_of(files.saved(Image.frombytes("RGB", size, pixels), "PNG")) for size in ((30, 100), (100, 30))]
    )


def palettes(server: Target) -> str | None:
    image = picture(fresh("palette")).convert("P", palette=Image.Palette.ADAPTIVE)
    colours = image.getpalette()
    assert colours is not None
    other = image.copy()
    other.putpalette(colours[::-1])
    assert image.tobytes() == other.tobytes()
    return mixed_up(server, [url_of(files.saved(one, "PNG")) for one in (image, other)])


def modes(server: Target) -> str | None:
    """The same bytes of pixels as grey values of a wide image, as RGB, as RGBA, and as CMYK."""
    pixels = picture(fresh("modes"), (48, 64)).tobytes()
    shapes = {"L": (144, 64), "RGB": (48, 64), "RGBA": (36, 64), "CMYK": (36, 64)}
    images = {mode: Image.frombytes(mode, size, pixels) for mode, size in shapes.items()}
    return mixed_up(server, [url_of(files.saved(image, "TIFF"), "image/tiff") for image in images.values()])


def planted_exif(server: Target) -> str | None:
    """Two images with one ImageID, as text of a UUID and as its bytes."""
    for image_id in ("0123456789abcdef0123456789abcdef", bytes(range(16))):
        tags = files.exif(ImageID=image_id)
        images = [picture(fresh("exif")) for _ in range(2)]
        found = mixed_up(server, [url_of(files.saved(image, "JPEG", exif=tags), "image/jpeg") for image in images])
        if found:
            return found
    return None


def shared_header(server: Target) -> str | None:
    """Files of one length that differ in their last bytes of pixels alone."""
    image = picture(fresh("header"), (256, 128))
    other = image.copy()
    image.paste((0, 0, 0), (0, 0, 256, 64))
    other.paste((255, 255, 255), (0, 0, 256, 64))  # a BMP holds the upper rows last
    contents = [files.saved(one, "BMP") for one in (image, other)]
    assert contents[0][: len(contents[0]) // 2] == contents[1][: len(contents[1]) // 2]
    assert len(contents[0]) == len(contents[1])
    return mixed_up(server, [url_of(content, "image/bmp") for content in contents])


def video_frames(server: Target) -> str | None:
    """Two videos of the same frames in another order."""
    frames = [files.saved(picture(fresh("frame")), "JPEG") for _ in range(4)]
    orders = [frames, [frames[1], frames[0], *frames[2:]]]
    urls = [
        ",".join([url_of(order[0], "video/jpeg"), *(url_of(f).partition(",")[2] for f in order[1:])])
        for order in orders
    ]
    return mixed_up(server, urls, video=True)


def side_channel(server: Target) -> str | None:
    """What is reused of an image that another tenant has sent: nothing, as of one that nobody has ever sent."""
    victim, attacker = tenants()
    secret, unseen = png(fresh("secret"), (128, 128)), png(fresh("unseen"), (128, 128))
    for _ in range(2):
        server.ask(secret, salt=victim)
    seen = {}
    for name, image in (("secret", secret), ("unseen", unseen)):
        before = server.counters()
        cached = server.ask(image, salt=attacker).cached_tokens
        after = server.counters()
        names = [n for n in after if n in ("vllm:mm_cache_hits", "mmcache:images_decoded", "mmcache:images_avoided")]
        seen[name] = [cached, *(after[n] - before.get(n, 0) for n in names)]
    return None if seen["secret"] == seen["unseen"] else f"reuse shows: {seen}"


def claimed_digest(server: Target) -> str | None:
    """The name that the client transport gives a public image, bound to another one; by everybody's own tenant."""
    own, logo = png(fresh("own")), png(fresh("logo"))
    name = name_of(logo)
    bound = server.ask(own, name).status
    if bound != 400:
        return f"bound, with the status {bound}"
    if server.ask(None, name).status != 400:
        return "the name stands for something"
    if server.ask(logo, name).sees != server.truth(logo):
        return "the victim sees another image"
    again = server.ask(own, name).status
    return None if again == 400 and server.ask(None, name).sees == server.truth(logo) else "bound again"


def forged_tenant(server: Target) -> str | None:
    """A client that the gateway knows as the attacker names the victim in its body, by name or by salt."""
    if server.mode == "body":
        return None  # there the body is where tenants are named: who knows a salt is that tenant
    victim, attacker = tenants()
    secret = png(fresh("secret"), (128, 128))
    server.ask(secret, salt=victim)
    forged = [victim, parse_source(MODES[server.mode]).salt_of(victim)]
    answered = [one for one in forged if server.ask(secret, salt=attacker, cache_salt=one).status != 400]
    return f"answered {len(answered)} of 2" if answered else None


ATTACKS: dict[str, Attack] = {
    "foreign uuid with an image of one's own": foreign_uuid_with_own_image,
    "foreign uuid without an image": foreign_uuid_without_image,
    "guessed sequential uuids": sequential_uuids,
    "uuid bound by the attacker first": poisoned_uuid,
    "re-bound uuid": stale_rebinding,
    "uuid equal to another image's id, with an image": uuid_is_a_content_id,
    "uuid equal to another image's id, without one": uuid_is_a_content_id_without_image,
    "uuid equal to an internal name": uuid_is_an_internal_name,
    "uuid of 1 MB": long_uuid,
    "uuids with NUL, path and other characters": odd_characters,
    "uuid with a lone surrogate": broken_unicode,
    "same uuid with processor arguments": other_arguments,
    "32 clients bind one uuid at once": race,
    "eviction between alias and use": eviction,
    "30x100 against 100x30": turned_sizes,
    "palettes": palettes,
    "equal pixel bytes in other modes": modes,
    "planted EXIF ImageID": planted_exif,
    "files that share a header": shared_header,
    "swapped video frames": video_frames,
    "side channel: what is reused under another salt": side_channel,
    "uuid that claims another image's digest": claimed_digest,
    "another tenant named in the body": forged_tenant,
}
