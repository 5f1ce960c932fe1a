# SPDX-License-Identifier: Apache-2.0
"""Every attack on a stock server and on one with the plugin, wherever tenants are found.

What succeeds on stock shows that the attack can.

docs/identity.md says how many there are; a test compares.
"""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached

from tests.support.sizes import larger
from tests.support.target import MODEL, MODES, Target, fresh, png
from tests.system.identity.attacks import ATTACKS, tenants

pytestmark = [pytest.mark.engine, pytest.mark.answers]

DOCS = Path(__file__).parents[3] / "docs" / "identity.md"
PROCESSOR_CACHE_GB = "0.012"  # 21 images of 320x320 fill it
ARGS = (
    *CPU_ARGS, "--served-model-name", MODEL, "--enable-prefix-caching", "--enable-prompt-tokens-details",
    "--limit-mm-per-prompt", '{"image": 4, "video": 1}', "--trust-request-mm-kwargs", "--enable-scale-out",
    "--mm-processor-cache-gb", PROCESSOR_CACHE_GB,
)  # fmt: skip

SUCCEED_ON_STOCK = {
    "foreign uuid with an image of one's own",
    "foreign uuid without an image",
    "guessed sequential uuids",
    "uuid bound by the attacker first",
    "re-bound uuid",
    "uuid equal to another image's id, with an image",
    "uuid equal to another image's id, without one",
    "uuid of 1 MB",
    "uuid with a lone surrogate",
    "same uuid with processor arguments",
    "32 clients bind one uuid at once",
    "side channel: what is reused under another salt",
    "uuid that claims another image's digest",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module", params=[pytest.param("stock", marks=larger), *MODES])
def side(request: pytest.FixtureRequest) -> str:
    """Stock, or where the server with the plugin finds tenants."""
    return str(request.param)


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def server(side: str, model: Path, log_path: Path) -> Iterator[Target]:
    ours = {"MMCACHE_DISABLE": "1"} if side == "stock" else {"MMCACHE_TENANT_FROM": MODES[side]}
    with serve(model, log_path=log_path, env={"VLLM_SERVER_DEV_MODE": "1", **ours}, args=ARGS) as running:
        yield Target(running.url, "body" if side == "stock" else side)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(server: Target, side: str, name: str) -> None:
    got = ATTACKS[name](server)
    print(f"{side}: {name}: {got}")
    assert (got is not None) == (side == "stock" and name in SUCCEED_ON_STOCK), got


def test_times(server: Target, side: str) -> None:
    """Medians are reported, not judged: noise of a shared machine is no leak, and none of it is no proof."""
    victim, attacker = tenants()
    images = [png(fresh("time"), (160, 160)) for _ in range(16)]
    for image in images[:8]:
        server.ask(image, salt=victim)
    seen = [server.ask(image, salt=attacker) for pair in zip(images[:8], images[8:], strict=True) for image in pair]
    medians = [statistics.median(reply.seconds for reply in seen[number::2]) for number in (0, 1)]
    print(f"{side}: median seconds, sent by another tenant {medians[0]:.4f}, never sent {medians[1]:.4f}")
    assert {reply.cached_tokens for reply in seen} == {0}


def test_uuid_only_conversations(server: Target) -> None:
    """The honest use works: a tenant names its image once, and by its name from then on."""
    for salt in (None, fresh("salt")):  # of everybody without a tenant, and of one
        uuid, image = fresh("mine"), png(fresh("mine"))
        first = server.ask(image, uuid, salt)
        again = [server.ask(None, uuid, salt) for _ in range(2)]
        assert [reply.sees for reply in again] == [first.sees] * 2
        assert first.sees == server.truth(image)


def test_audit(server: Target, side: str, log_path: Path) -> None:
    """What was tried is counted; the log says each kind once a minute, and never a uuid or a salt."""
    if side == "stock":
        pytest.skip("stock counts nothing")
    for _ in range(2):
        assert server.ask(png("any"), "u" * 1000).status == 400
    counted = server.counters()
    names = ("rebound", "too_long")
    assert all(counted[f"mmcache:aliases_{name}"] >= 1 for name in (*names, "unknown"))
    said = re.findall(r"mmcache identity: .*mmcache:(aliases_\w+)_total", log_path.read_text())
    assert set(said) == {f"aliases_{name}" for name in names}
    assert len(said) < sum(counted[f"mmcache:aliases_{name}"] for name in names)
    assert not re.findall(r"mmcache identity: .*(uuid-|invoice|salt-|logo-)", log_path.read_text())


def test_docs_count_them() -> None:
    said = re.findall(r"(\d+) of (\d+) attacks succeed on stock\. With the plugin none does", DOCS.read_text())
    assert said == [(str(len(SUCCEED_ON_STOCK)), str(len(ATTACKS)))]
    assert set(ATTACKS) >= SUCCEED_ON_STOCK
