# SPDX-License-Identifier: Apache-2.0
"""`mmcache uninstall` leaves nothing of ours: in a real directory, with real proofs, and a hook that was installed."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from tests.support.packages import file_tier, identity, redis_tier, save
from tests.support.store_server import Server, running_server, server
from tests.support.tiers import record_tier
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.cli.uninstall import uninstall
from vllm_mmcache.components.features.tiers import key_of
from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.storage import frame

__all__ = ["running_server", "server"]

repair = importlib.import_module("vllm_mmcache.environment.repair")  # the package has a function of that name

PLACE = user_proofs.ProofScope(
    vllm="0.32.0",
    platform="cpu",
    runner=1,
    scheduling="sync",
    torch="2.13",
    mmcache="0.1",
    device="cpu",
    architecture="A",
    tensor_parallel=1,
    pipeline_parallel=1,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing of ours is anywhere but below this folder."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(repair, "site_packages", lambda: tmp_path / "site")
    monkeypatch.delenv("MMCACHE_STORE", raising=False)
    return tmp_path


def fill(place: Path) -> None:
    """Features and records, with all that comes with them."""
    tier = file_tier(place)
    for number in (0, 1):
        assert save(tier, number)
    tier.backend.reject(key_of(identity(1)))
    kept = record_tier(place)
    kept.put_many({frame.key("test", "a"): b"value"})
    kept.close()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def install_hook() -> None:
    repair.install_hook("2.13+cpu", "0.28+cu130")
    module, _ = repair.hook_files()
    compiled = Path(importlib.util.cache_from_source(str(module)))
    compiled.parent.mkdir()
    compiled.write_bytes(b"compiled")
    repair.stamp_path().write_text("{}")


def test_nothing_is_left(
    home: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(home / "xdg_cache_home" / "mmcache")
    fill(home / "chosen")
    monkeypatch.setenv("MMCACHE_STORE", f"{home / 'chosen'} {server.url}")
    monkeypatch.setenv("MMCACHE_FILES", "s3://bucket/uploads")
    user_proofs.add(PLACE, ["features"], "test", [])
    install_hook()
    assert save(redis_tier(server.url, timeout_s=60), 0)
    assert len(files(home)) > 10

    uninstall()

    assert files(home) == []
    assert not list(home.rglob("mmcache"))
    assert not (home / "chosen").exists()
    said = capsys.readouterr().out
    assert "removed 1 proofs\nremoved the start-up hook for torchvision\n" in said
    assert f"left {server.url}, which others may use" in said
    assert "left s3://bucket/uploads, where images that clients uploaded are" in said
    assert "pip uninstall vllm-mmcache" in said
    assert server.client.dbsize() == 1

    uninstall()
    assert "removed" not in capsys.readouterr().out


def test_what_is_not_ours_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(home / "xdg_cache_home" / "mmcache")
    strangers = [home / "site" / "other.pth", home / "xdg_state_home" / "mmcache" / "notes"]
    for stranger in strangers:
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_text("mine")
    user_proofs.add(PLACE, ["features"], "test", [])
    uninstall()
    assert sorted(files(home)) == sorted(strangers)


def test_a_store_that_may_not_be_touched_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All else goes, and that it is left is an error."""
    place = home / "xdg_cache_home" / "mmcache"
    fill(place)
    (place / "features").rename(home / "elsewhere")
    (place / "features").symlink_to(home / "elsewhere")
    user_proofs.add(PLACE, ["features"], "test", [])
    with pytest.raises(StoreUnusable, match=f"{place} would be left: {place}/features has mode l"):
        uninstall(dry_run=True)
    assert capsys.readouterr().out == "would remove 1 proofs\n"
    with pytest.raises(StoreUnusable, match=f"{place} is left: {place}/features has mode l"):
        uninstall()
    said = capsys.readouterr().out
    assert "removed 1 proofs" in said
    assert "pip uninstall vllm-mmcache" in said
    assert files(home / "elsewhere")


@pytest.mark.parametrize(
    ("name", "said"),
    [("admin-key", "mmcache serve --observe` made is left"), ("proofs.json", "proofs.json can't be removed")],
)
def test_what_can_not_be_removed_is_named(home: Path, capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    """All else goes. Here a directory lies where a file should be."""
    state = home / "xdg_state_home" / "mmcache"
    (state / name / "in it").mkdir(parents=True)
    state.chmod(0o700)
    install_hook()
    with pytest.raises(StoreUnusable, match=said):
        uninstall()
    told = capsys.readouterr().out
    assert "removed the start-up hook for torchvision" in told
    assert "pip uninstall vllm-mmcache" in told


def test_what_another_user_has_installed_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start-up hook may belong to root. What was left before is said as well."""
    (home / "xdg_state_home" / "mmcache" / "admin-key" / "in it").mkdir(parents=True)

    def denied() -> None:
        raise PermissionError(13, "Permission denied", "the hook")

    monkeypatch.setattr(repair, "remove_hook", denied)
    with pytest.raises(StoreUnusable, match=r"made is left: .*; can't remove the hook: Permission denied"):
        uninstall()
    assert "pip uninstall vllm-mmcache" in capsys.readouterr().out


def test_a_home_that_can_not_be_looked_into(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as another user's; here a name that is too long."""
    monkeypatch.setenv("XDG_STATE_HOME", f"/{'x' * 300}")
    uninstall(dry_run=True)
    assert capsys.readouterr().out == "there is nothing to remove\n"


def test_without_a_home_directory_there_is_nothing(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(user_proofs, "state_directory", no_home)
    assert user_proofs.remove() == 0


def test_a_directory_without_a_store_is_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MMCACHE_STORE", str(home / "chosen"))
    (home / "chosen").mkdir()
    (home / "chosen" / "notes").write_text("mine")
    uninstall(dry_run=True)
    assert capsys.readouterr().out == "there is nothing to remove\n"
    uninstall()
    assert capsys.readouterr().out == "the package itself goes with: pip uninstall vllm-mmcache\n"
    assert files(home) == [home / "chosen" / "notes"]
