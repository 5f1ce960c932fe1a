# SPDX-License-Identifier: Apache-2.0
"""Settings: variables, the command line over them, and what is said about a wrong one."""

from types import SimpleNamespace

import pytest

from vllm_mmcache import settings
from vllm_mmcache.errors import SettingsError


def test_defaults_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.load_settings().block_keys is None  # on where proven
    monkeypatch.setenv("MMCACHE_BLOCK_KEYS", "0")
    assert settings.load_settings().block_keys is False


def test_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCACHE_BLOCK_KEYS", "0")
    assert settings.load_settings({"block_keys": True}).block_keys is True


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MMCACHE_BLOCK_KEYS", "maybe", ["MMCACHE_BLOCK_KEYS", "maybe", "allowed: 1, true", "default None"]),
        ("MMCACHE_LAZY_MEDIA", "maybe", ["MMCACHE_LAZY_MEDIA", "maybe", "allowed: 1, true", "default None"]),
        ("MMCACHE_MEDIA_RECORDS", "0", ["MMCACHE_MEDIA_RECORDS", "'0'", "greater than or equal to 1", "default 65536"]),
        ("MMCACHE_MEDIA_RECORDS_BYTES", "64MB", ["MMCACHE_MEDIA_RECORDS_BYTES", "'64MB'", "allowed: int"]),
        ("MMCACHE_BLOKC_KEYS", "1", ["MMCACHE_BLOKC_KEYS", "did you mean MMCACHE_BLOCK_KEYS"]),
    ],
)
def test_wrong_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: list[str]) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as error:
        settings.load_settings()
    assert all(part in str(error.value) for part in said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"block_keys": "maybe"}, "additional-config mmcache.block_keys = 'maybe'"),
        ({"blocks": True}, "unknown setting additional-config mmcache.blocks"),
        ({"disable": True}, "unknown setting additional-config mmcache.disable"),
    ],
)
def test_wrong_config(config: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        settings.load_settings(config)


def test_config_must_be_an_object() -> None:
    with pytest.raises(SettingsError, match="expected an object"):
        settings.config_of(SimpleNamespace(additional_config={"mmcache": 1}))
    assert settings.config_of(SimpleNamespace(additional_config={"other": 1})) == {}
    assert settings.config_of(SimpleNamespace(additional_config=object())) == {}


def test_every_field_is_documented_and_frozen() -> None:
    assert all(field.description for field in settings.Settings.model_fields.values())
    with pytest.raises(ValueError, match="frozen"):
        settings.load_settings().block_keys = False  # type: ignore[misc]
