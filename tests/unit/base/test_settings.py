# SPDX-License-Identifier: Apache-2.0
"""Settings: variables, the command line over them, and what is said about a wrong one."""

import json
from types import SimpleNamespace

import pytest

from vllm_mmcache.base import settings
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.settings_messages import is_of_a_service
from vllm_mmcache.base.store_url import store_places


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
        ("MMCACHE_FEATURE_RAM_BYTES", "lots", ["MMCACHE_FEATURE_RAM_BYTES", "lots", "such as 512MiB"]),
        ("MMCACHE_STORE", "cache", ["MMCACHE_STORE", "'cache' is neither", "redis://", "default None"]),
        ("MMCACHE_STORE", "~no-such-user/a", ["MMCACHE_STORE", "no user of '~no-such-user/a'"]),
        ("MMCACHE_STORE", "/a /b", ["MMCACHE_STORE", "only one directory"]),
        ("MMCACHE_STORE", "redis://a,redis://b", ["MMCACHE_STORE", "only one URL"]),
        ("MMCACHE_FILES", "files", ["MMCACHE_FILES = 'files'", "neither", "/path", "s3://", "default None"]),
        ("MMCACHE_FILES", "redis:/cache:6379", ["MMCACHE_FILES = 'redis:/cache:6379'", "neither", "redis://"]),
        ("MMCACHE_FILES", "~no-such-user/a", ["MMCACHE_FILES", "no user of '~no-such-user/a'"]),
        ("MMCACHE_FILES", "/a redis://b", ["MMCACHE_FILES = '/a redis://b'", "only one place"]),
        ("MMCACHE_FILES", "redis://b /a", ["MMCACHE_FILES", "only one place", "%20"]),
        ("MMCACHE_FILES", "redis://b:port", ["MMCACHE_FILES", "its port is no number"]),
        ("MMCACHE_FILES", "s3://", ["MMCACHE_FILES = 's3://'", "names nothing behind ://"]),
        ("MMCACHE_FILES", "memory://files", ["MMCACHE_FILES = 'memory://files'", "one process"]),
        ("MMCACHE_FILES", "file://files", ["MMCACHE_FILES = 'file://files'", "absolute", "file:///path"]),
        ("MMCACHE_FILES", "local://./files", ["MMCACHE_FILES", "absolute"]),
        ("MMCACHE_STORE_TTL", "soon", ["MMCACHE_STORE_TTL", "'soon'", "such as 7d", "default 604800"]),
        ("MMCACHE_STORE_TTL", "-1", ["MMCACHE_STORE_TTL", "'-1'", "no length of time"]),
        ("MMCACHE_STORE_TTL", "7y", ["MMCACHE_STORE_TTL", "'7y'", "s, m, h, d or w"]),
        ("MMCACHE_STORE_TTL", "999999999999d", ["MMCACHE_STORE_TTL", "up to 100 years"]),
        ("MMCACHE_LAZY_MEDIA", "maybe", ["MMCACHE_LAZY_MEDIA", "maybe", "allowed: 1, true", "default None"]),
        ("MMCACHE_MEDIA_RECORDS", "0", ["MMCACHE_MEDIA_RECORDS", "'0'", "greater than or equal to 1", "default 65536"]),
        ("MMCACHE_MEDIA_RECORDS_BYTES", "much", ["MMCACHE_MEDIA_RECORDS_BYTES", "'much'", "such as 512MiB"]),
        ("MMCACHE_RECORDS_DISK_BYTES", "-1", ["MMCACHE_RECORDS_DISK_BYTES", "'-1'", "such as 512MiB"]),
    ],
)
def test_wrong_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: list[str]) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as error:
        settings.load_settings()
    assert all(part in str(error.value) for part in said)


@pytest.mark.parametrize(
    "files",
    ["/srv/files", "/srv/my files, too", "~/files", "file:///srv/files", "s3://bucket/a folder", "gs://b", "hdfs:///files",
     "abfs://container@account.dfs.core.windows.net/files", "arrow_hdfs://host/files", "redis://cache:6379/3",
     "redis+cluster://a:1,b:2", "unix:///run/valkey.sock"],
)  # fmt: skip
def test_places_of_files(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCACHE_FILES", files)
    assert settings.load_settings().files == files


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


def test_sizes_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.load_settings().feature_ram_bytes == 2 * 1024**3
    monkeypatch.setenv("MMCACHE_FEATURE_RAM_BYTES", "512MiB")
    assert settings.load_settings({"store_disk_bytes": 1000}).feature_ram_bytes == 512 * 1024**2
    assert settings.load_settings({"store_disk_bytes": 1000}).store_disk_bytes == 1000


@pytest.mark.parametrize(
    ("given", "seconds", "words"),
    [
        ("0", 0, "0 days"),
        ("90", 90, "90 seconds"),
        (" 90m ", 5400, "90 minutes"),
        ("1h", 3600, "1 hour"),
        ("7d", 604800, "7 days"),
        ("2w", 1209600, "14 days"),
        (60, 60, "1 minute"),
    ],
)
def test_lengths_of_time(given: object, seconds: int, words: str) -> None:
    """Also from the command line, as a number, and over to another process."""
    read = settings.load_settings({"store_ttl": given})
    assert (read.store_ttl, read.store_ttl.words()) == (seconds, words)
    carried = json.loads(json.dumps(settings.carried(read)))
    assert settings.received(carried).store_ttl == seconds


@pytest.mark.parametrize("given", [True, 1.5, None, "", "1.5d", "7 d d", [7]])
def test_what_is_no_length_of_time(given: object) -> None:
    with pytest.raises(SettingsError, match="such as 7d"):
        settings.load_settings({"store_ttl": given})


@pytest.mark.parametrize(
    ("store", "places"),
    [
        (None, (None, None)),
        ("/a", ("/a", None)),
        ("rediss://u:p@h:1/0", (None, "rediss://u:p@h:1/0")),
        ("valkey://h, /a/b", ("/a/b", "valkey://h")),
        ("/a unix:///run/redis.sock", ("/a", "unix:///run/redis.sock")),
    ],
)
def test_places_of_the_store(
    store: str | None, places: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMCACHE_STORE", store or "")
    assert store_places(settings.load_settings().store) == places


@pytest.mark.parametrize("password", ["secret", "sec/ret", "a@secret"])
def test_a_password_is_not_said(password: str) -> None:
    for port in ("port", "99999"):
        with pytest.raises(SettingsError) as error:
            settings.load_settings({"store": f"redis://user:{password}@host:{port}"})
        assert not any(part in str(error.value) for part in ("sec", "ret@"))


def test_config_must_be_an_object() -> None:
    with pytest.raises(SettingsError, match="expected an object"):
        settings.config_of(SimpleNamespace(additional_config={"mmcache": 1}))
    assert settings.config_of(SimpleNamespace(additional_config={"other": 1})) == {}
    assert settings.config_of(SimpleNamespace(additional_config=object())) == {}


def test_every_field_is_documented_and_frozen() -> None:
    assert all(field.description for field in settings.Settings.model_fields.values())
    with pytest.raises(ValueError, match="frozen"):
        settings.load_settings().block_keys = False


@pytest.mark.parametrize(
    ("variables", "config", "said"),
    [
        ({"REQUIRE_SALT": "1", "IDENTITY": "0"}, {}, "MMCACHE_REQUIRE_SALT = True and MMCACHE_IDENTITY = False"),
        ({"REQUIRE_SALT": "1", "DISABLE": "1"}, {}, "MMCACHE_DISABLE = True and MMCACHE_REQUIRE_SALT = True"),
        ({"OBSERVE": "1"}, {"metrics": False}, "MMCACHE_OBSERVE = True and additional-config mmcache.metrics = False"),
        ({}, {"image_extraction": True, "lazy_media": False}, "additional-config mmcache.image_extraction = True and "),
    ],
)
def test_contradictions(
    variables: dict[str, str], config: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"MMCACHE_{name}", value)
    with pytest.raises(SettingsError, match="contradict each other") as raised:
        settings.load_settings(config)
    assert said in str(raised.value)
    for name in variables:
        monkeypatch.delenv(f"MMCACHE_{name}")
    settings.load_settings(dict([*config.items()][1:]))  # one of the two alone is no contradiction


def test_settings_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was set, and nothing else; a process that gets it has the same settings, whatever its own variables say."""
    monkeypatch.setenv("MMCACHE_FEATURE_RAM_BYTES", "1MiB")
    sent = settings.carried(settings.load_settings({"features": False, "store": "/a/store"}))
    assert sent == {"feature_ram_bytes": 1 << 20, "features": False, "store": "/a/store"}
    monkeypatch.setenv("MMCACHE_FEATURE_RAM_BYTES", "2MiB")
    monkeypatch.setenv("MMCACHE_OBSERVE", "1")
    found = settings.received(json.loads(json.dumps(sent)))
    assert (found.feature_ram_bytes, found.features, found.observe) == (1 << 20, False, False)
    with pytest.raises(SettingsError, match="same version of mmcache"):
        settings.received({"of_a_later_version": True})


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has warned of no variable."""
    monkeypatch.setattr(settings, "_warned_of", set())


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("variable", "level", "said"),
    [
        ("MMCACHE_BLOKC_KEYS", "WARNING", "did you mean MMCACHE_BLOCK_KEYS?"),
        ("MMCACHE_OF_A_LATER_VERSION", "WARNING", "`mmcache doctor --settings` lists them"),
        ("MMCACHE_PORT", "WARNING", "`mmcache doctor --settings`"),  # not the address that Kubernetes gives
        ("MMCACHE_REQUIRE_SALTS", "ERROR", "did you mean MMCACHE_REQUIRE_SALT?"),
        ("MMCACHE_REQUIRED_SALT", "ERROR", "did you mean MMCACHE_REQUIRE_SALT?"),
        ("MMCACHE_IDENTIY", "ERROR", "did you mean MMCACHE_IDENTITY?"),
        ("MMCACHE_STORE_KEY", "ERROR", "did you mean MMCACHE_STORE_KEY_FILE?"),
        ("MMCACHE_ADMIN_KEY_FIEL", "ERROR", "did you mean MMCACHE_ADMIN_KEY_FILE?"),
    ],
)
def test_an_unknown_variable_is_one_line_and_stops_nothing(
    variable: str, level: str, said: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "s3cret")
    settings.load_settings()
    for _ in range(2):
        settings.warn_of_unknown_variables()
    (record,) = log.records
    assert record.levelname == level
    assert f"{variable} is no setting" in record.getMessage()
    assert said in record.getMessage()
    assert "s3cret" not in record.getMessage()


SERVICE = {
    # What kubelet sets for a Service `mmcache` with two ports, as in its documentation.
    "MMCACHE_SERVICE_HOST": "10.0.0.11",
    "MMCACHE_SERVICE_PORT": "8000",
    "MMCACHE_SERVICE_PORT_HTTP": "8000",
    "MMCACHE_SERVICE_PORT_METRICS": "9000",
    "MMCACHE_PORT": "tcp://10.0.0.11:8000",
    "MMCACHE_PORT_8000_TCP": "tcp://10.0.0.11:8000",
    "MMCACHE_PORT_8000_TCP_PROTO": "tcp",
    "MMCACHE_PORT_8000_TCP_PORT": "8000",
    "MMCACHE_PORT_8000_TCP_ADDR": "10.0.0.11",
    # And for a Service `mmcache-valkey`.
    "MMCACHE_VALKEY_SERVICE_HOST": "10.0.0.12",
    "MMCACHE_VALKEY_SERVICE_PORT": "6379",
    "MMCACHE_VALKEY_PORT": "tcp://10.0.0.12:6379",
    "MMCACHE_VALKEY_PORT_6379_TCP": "tcp://10.0.0.12:6379",
    "MMCACHE_VALKEY_PORT_6379_TCP_PROTO": "tcp",
    "MMCACHE_VALKEY_PORT_6379_TCP_PORT": "6379",
    "MMCACHE_VALKEY_PORT_6379_TCP_ADDR": "10.0.0.12",
}


@pytest.mark.usefixtures("unwarned")
def test_variables_of_kubernetes_services_are_not_meant_for_us(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    before = settings.load_settings()
    for name, value in SERVICE.items():
        monkeypatch.setenv(name, value)
    assert settings.load_settings() == before
    settings.warn_of_unknown_variables()
    assert log.records == []
    forms = {settings.PREFIX + name.upper(): value for name in settings.Settings.model_fields for value in ("1", "")}
    assert settings.unknown_variables(forms) == {}
    assert not any(is_of_a_service(name, "tcp://10.0.0.1:80") for name in forms), "a setting is no Service's variable"
    monkeypatch.setenv("MMCACHE_SERVICE_HOSTS", "10.0.0.11")  # control
    settings.warn_of_unknown_variables()
    assert len(log.records) == 1


@pytest.mark.usefixtures("unwarned")
def test_a_misspelt_protection_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value refuses as before, beside a name that is unknown."""
    monkeypatch.setenv("MMCACHE_REQUIRE_SALTS", "1")
    assert settings.load_settings().require_salt is False
    monkeypatch.setenv("MMCACHE_REQUIRE_SALT", "perhaps")
    with pytest.raises(SettingsError, match="MMCACHE_REQUIRE_SALT = 'perhaps'"):
        settings.load_settings()


@pytest.mark.parametrize(
    ("config", "variables", "is_on", "warnings"),
    [
        ({}, {"MMCACHE_PIXELS": "0"}, False, ["MMCACHE_PIXELS is an older name of MMCACHE_LAZY_PROCESSING"]),
        ({"pixels": False}, {}, False, ["mmcache.pixels is an older name of lazy_processing"]),
        ({"pixels": False}, {"MMCACHE_LAZY_PROCESSING": "1"}, False, ["mmcache.pixels is an older"]),  # config wins
        ({"lazy_processing": True}, {"MMCACHE_PIXELS": "0"}, True, ["MMCACHE_PIXELS is an older name"]),
        ({"lazy_processing": True, "pixels": False}, {}, True, ["mmcache.pixels is an older name"]),
        ({}, {"MMCACHE_LAZY_PROCESSING": "1", "MMCACHE_PIXELS": "0"}, True, ["MMCACHE_PIXELS is an older name"]),
        ({}, {"MMCACHE_PIXELS": ""}, None, []),
        ({"lazy_processing": False}, {}, False, []),
    ],
)
def test_an_older_name_is_read_and_said(
    config: dict[str, object],
    variables: dict[str, str],
    is_on: bool | None,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(settings, "_warned_of", set())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # each name is said once
        assert settings.load_settings(config).lazy_processing is is_on
        settings.warn_of_unknown_variables()
    said = [record.getMessage() for record in log.records]
    assert len(said) == len(warnings)
    assert all(part in line for part, line in zip(warnings, said, strict=True))


def test_a_wrong_value_is_said_under_the_name_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCACHE_LIFTED_BODIES", "perhaps")
    with pytest.raises(SettingsError, match=r"^MMCACHE_LIFTED_BODIES = 'perhaps' is not allowed"):
        settings.load_settings()
    with pytest.raises(SettingsError, match=r"^additional-config mmcache.pixels = 'perhaps' is not allowed"):
        settings.load_settings({"pixels": "perhaps"})
