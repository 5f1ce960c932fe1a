# SPDX-License-Identifier: Apache-2.0
"""What a conversation is called: the same for all its requests, and for no other tenant."""

import pytest

from vllm_mmcache.client.affinity import Affinity

ONE, OTHER = b"tenant one", b"tenant two"


def test_all_clients_of_a_tenant_call_an_image_the_same() -> None:
    names = {Affinity().name_of(ONE, ["mmc2-a"]) for _ in range(2)}
    assert len(names) == 1
    assert len(names.pop()) == 32


def test_tenants_and_keys_have_names_of_their_own() -> None:
    affinities = [Affinity(), Affinity(key="one"), Affinity(key=b"two")]
    names = [affinity.name_of(tenant, ["mmc2-a"]) for affinity in affinities for tenant in (ONE, OTHER)]
    assert len(set(names)) == 6
    assert not any("mmc2" in name for name in names)


def test_a_conversation_keeps_its_name() -> None:
    """Turns add images, and a window drops the oldest."""
    affinity = Affinity()
    images = [f"mmc2-{number}" for number in range(12)]
    names = {affinity.name_of(ONE, images[max(0, end - 3) : end]) for end in range(1, 13)}
    assert names == {Affinity().name_of(ONE, images[:1])}


def test_other_images_are_spread() -> None:
    affinity = Affinity()
    assert len({affinity.name_of(ONE, [f"mmc2-{number}"]) for number in range(100)}) == 100


@pytest.mark.parametrize(
    ("given", "headers"), [("x-user-id", ("x-user-id",)), (["x-a", "x-b"], ("x-a", "x-b")), ([], ())]
)
def test_headers(given: str | list[str], headers: tuple[str, ...]) -> None:
    assert Affinity(given).headers == headers
