# SPDX-License-Identifier: Apache-2.0
"""Stores that several versions of mmcache use: what this format's versions wrote is read, other formats are left be."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.support.packages import features, file_tier, identity, load, save
from vllm_mmcache.components.features import identity as identities
from vllm_mmcache.components.features import package, tiers
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.lazy_media import hooks
from vllm_mmcache.components.lazy_media.video import hooks as video_loader
from vllm_mmcache.components.lazy_processing import vllm_item_record
from vllm_mmcache.storage import frame
from vllm_mmcache.storage.encryption import PLAIN

STORES = Path(__file__).parent / "stores"
"""Packages 1 and 2 of SMALL, as earlier versions have left them, in the folder of their format."""
SMALL = Shape(4, 8, "bfloat16")


@contextmanager
def next_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Features are of the next format within."""
    of_package, of_key = identities.FORMAT, identities.KEY_FORMAT
    with monkeypatch.context() as version:
        version.setattr(identities, "MAGIC", identities.MAGIC.replace(b"%d" % of_key, b"%d" % (of_key + 1)))
        version.setattr(package, "FORMAT", package.FORMAT.replace(str(of_package), str(of_package + 1)))
        yield


def test_what_an_earlier_version_of_this_format_wrote_is_read(tmp_path: Path) -> None:
    """Raising the format needs a reason: it makes every store of a user's worthless."""
    root = tmp_path / "features"
    shutil.copytree(STORES / f"format-{identities.FORMAT}", root)
    for folder in (root, *root.iterdir()):
        folder.chmod(0o700)
    tier = file_tier(tmp_path)
    assert [load(tier, number, SMALL) for number in (1, 2)] == [bytes(features(number, SMALL)) for number in (1, 2)]
    assert load(tier, 3, SMALL) is None


@pytest.mark.parametrize("is_first", [True, False], ids=["the earlier one first", "the later one first"])
def test_two_versions_on_one_store(is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own, and neither reads, replaces or sets aside what the other has written of the same image."""
    tier = file_tier(tmp_path)
    for of_this in (is_first, not is_first):
        with nullcontext() if of_this else next_version(monkeypatch):
            assert load(tier, 1) is None
            assert save(tier, 1)
    written = {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert len(written) == 2
    for version in (nullcontext(), next_version(monkeypatch)):
        with version:
            assert load(tier, 1) == bytes(features(1))
            # As `mmcache store check`.
            assert tier.check(lambda name, content: tiers.check(name, content, PLAIN)) == (1, [])
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == written
    assert tier.counts.snapshot()["set_aside"] == 0


def test_the_format_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity().key
    with next_version(monkeypatch):
        assert identities.Identity(**vars_of(identity())).key != before


def vars_of(one: identities.Identity) -> dict[str, str]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


@pytest.mark.parametrize(
    "module", [identities, frame, hooks, video_loader, vllm_item_record], ids=lambda module: str(module.__name__)
)
def test_each_kind_has_a_number_and_its_rule(module: object) -> None:
    """What is kept carries the number of its kind; beside each stands when it must be raised."""
    text = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    assert re.search(r'^FORMAT = [0-9]+\n"""[^"]*raise it when', text, re.MULTILINE)


def test_records_of_another_framing_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = frame.key("image", "a")
    monkeypatch.setattr(frame, "_KEY_CONTEXT", f"vllm-mmcache record key {frame.FORMAT + 1}")
    assert frame.key("image", "a") != before
