"""Settings of the environment: read with care, from any mapping, and shown without secrets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import tinkex
from tinkex.client.settings import environment
from tinkex.client.settings.config import Config
from tinkex.wire import protocol


@pytest.mark.covers("C06")
def test_environment_is_read_with_care() -> None:
    values = {
        "B": "maybe",
        "C": "a, ,b",
        "D": "[1]",
        "E": '{"x": true, "y": null, "z": {"a": 1}}',
        "F": '[["a","b"],["c"],["d",1],"ef"]',
        "G": " ",
        "H": "{broken",
        "I": "  words ",
        "J": ", ,",
    }
    assert environment.flag("B", values) is None
    assert environment.words("C", values) == ("a", "b")
    assert environment.words("J", values) is None
    assert environment.mapping("D", values) is None
    assert environment.mapping("H", values) is None
    assert environment.mapping("E", values) == {"x": "true", "z": '{"a": 1}'}
    assert environment.pairs("F", values) == (("a", "b"),)
    assert environment.pairs("H", values) is None
    assert environment.text("G", values) is None
    assert environment.text("I", values) == "words"
    assert environment.text("nowhere", values) is None


@pytest.mark.covers("C06")
def test_yes_and_no_have_several_names() -> None:
    assert all(environment.flag("X", {"X": text}) is True for text in ("1", "true", "YES", " On "))
    assert all(environment.flag("X", {"X": text}) is False for text in ("0", "false", "NO", "off"))
    assert all(environment.flag("X", {"X": text}) is None for text in ("2", "", "enabled"))


@pytest.mark.covers("C06")
def test_numbers_are_exact_and_positive() -> None:
    found = {
        text: environment.positive("X", {"X": text})
        for text in ("7", " 12 ", "0", "-3", "1.0", "1e3", "x", "²")
    }
    assert found == {
        "7": 7,
        " 12 ": 12,
        "0": None,
        "-3": None,
        "1.0": None,
        "1e3": None,
        "x": None,
        "²": None,
    }


@pytest.mark.covers("C06", "C07")
def test_levels_have_the_names_of_the_older_sdks() -> None:
    found = [
        environment.level("X", {"X": text})
        for text in ("debug", "INFO", "warn", "Warning", "error", "loud", "")
    ]
    assert found == ["debug", "info", "warn", "warn", "error", None, None]


@pytest.mark.covers("C06", "C61")
def test_polls_back_off_on_request() -> None:
    texts = ("1", "yes", "exponential", "Exponential", "0", "none", "linear", "")
    found = [environment.poll_backoff({"TINKEX_POLL_BACKOFF": text}) for text in texts]
    assert found == ["exponential"] * 4 + [None] * 4


@pytest.mark.covers("C06", "C11")
def test_pools_are_sized() -> None:
    size, count = "TINKEX_POOL_SIZE", "TINKEX_POOL_COUNT"
    assert environment.pool_sizes({size: "30", count: "4"}) == {"sample": 120}
    assert environment.pool_sizes({size: "30"}) == {"sample": 600}
    assert environment.pool_sizes({count: "4", size: "many"}) == {"sample": 200}
    assert environment.pool_sizes({size: "0", count: "-1"}) is None
    assert environment.pool_sizes({}) is None


@pytest.mark.covers("C06")
def test_client_is_listed_if_its_module_is_installed() -> None:
    texts = (
        "json:loads",
        "json.decoder:JSONDecoder",
        "nowhere:f",
        "json.nowhere:f",
        "json",
        "json:",
        ":f",
        ".:f",
    )
    found = [environment.http_client({"TINKEX_HTTP_CLIENT": text}) for text in texts]
    assert found == ["json:loads", "json.decoder:JSONDecoder", *[None] * 6]


@pytest.mark.covers("1.9/5", "C06")
def test_places_of_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.hf_token({"HF_TOKEN": "a", "HUGGING_FACE_HUB_TOKEN": "b"}) == "a"
    assert environment.hf_token({"HF_TOKEN": " ", "HUGGING_FACE_HUB_TOKEN": "b"}) == "b"
    assert environment.hf_token({}) is None
    monkeypatch.setenv("HOME", "/home/someone")
    assert environment.hf_home({}) == Path("/home/someone/.cache/huggingface")
    assert environment.hf_home({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/huggingface")
    assert environment.hf_home({"XDG_CACHE_HOME": "/cache", "HF_HOME": "~/hf"}) == Path(
        "/home/someone/hf"
    )
    assert environment.hf_token_path({"HF_HOME": "/hf"}) == Path("/hf/token")
    assert environment.hf_token_path({"HF_HOME": "/hf", "HF_TOKEN_PATH": "~/t"}) == Path(
        "/home/someone/t"
    )


@pytest.mark.covers("C06")
def test_empty_environment_sets_nothing() -> None:
    told = environment.snapshot({})
    assert set(told.values()) == {None}
    assert len(told) >= 20


@pytest.mark.covers("1.9/1", "1.9/2", "1.9/3", "1.9/4", "C01", "C06")
def test_every_name_is_read_into_its_setting() -> None:
    values = {
        "TINKER_API_KEY": " tml-x ",
        "TINKER_BASE_URL": "https://host",
        "TINKER_PROJECT_ID": "p",
        "TINKER_CREDENTIAL_CMD": "cmd",
        "TINKER_TAGS": "a,b",
        "TINKER_FEATURE_GATES": "g",
        "TINKER_TELEMETRY": "off",
        "TINKER_LOG": "warning",
        "CLOUDFLARE_ACCESS_CLIENT_ID": "id",
        "CLOUDFLARE_ACCESS_CLIENT_SECRET": "secret",
        "TINKEX_DUMP_HEADERS": "1",
        "TINKEX_DEFAULT_HEADERS": '{"a": 1}',
        "TINKEX_DEFAULT_QUERY": '{"b": "2"}',
        "TINKEX_PROXY": "http://p",
        "TINKEX_PROXY_HEADERS": '[["c", "d"]]',
        "TINKEX_PARITY": "BEAM",
        "TINKEX_POLL_BACKOFF": "on",
        "TINKEX_OTEL_PROPAGATE": "yes",
        "TINKEX_POOL_SIZE": "2",
        "TINKEX_POOL_COUNT": "3",
        "TINKEX_HTTP_CLIENT": "json:loads",
    }
    assert environment.snapshot(values) == {
        "api_key": "tml-x",
        "base_url": "https://host",
        "project_id": "p",
        "credential_cmd": "cmd",
        "tags": ("a", "b"),
        "feature_gates": ("g",),
        "telemetry": False,
        "log_level": "warn",
        "cf_access_client_id": "id",
        "cf_access_client_secret": "secret",
        "dump_headers": True,
        "default_headers": {"a": "1"},
        "default_query": {"b": "2"},
        "proxy": "http://p",
        "proxy_headers": (("c", "d"),),
        "parity_mode": "beam",
        "poll_backoff": "exponential",
        "otel_propagate": True,
        "pool_sizes": {"sample": 6},
        "http_client": "json:loads",
    }
    assert environment.snapshot(values).keys() - Config.__dataclass_fields__.keys() == {
        "parity_mode"
    }


@pytest.mark.covers("1.9/7", "C05", "C06")
def test_settings_are_shown_without_secrets() -> None:
    shown = environment.redact(
        {
            "api_key": "sesame",
            "cf_access_client_secret": "sesame",
            "credential_cmd": "echo sesame",
            "default_headers": {"authorization": "sesame", "X-Plain": "seen"},
            "default_query": {"token": "sesame", "page": "2"},
            "proxy": "http://me:sesame@proxy:1",
            "proxy_headers": (("X-Gate", "sesame"),),
            "base_url": "https://host",
            "project_id": None,
        }
    )
    assert "sesame" not in repr(shown)
    assert shown["default_headers"] == {"authorization": "[REDACTED]", "X-Plain": "seen"}
    assert (shown["default_query"]["page"], shown["proxy"], shown["base_url"]) == (
        "2",
        "http://proxy:1",
        "https://host",
    )
    assert environment.redact({"api_key": None}) == {"api_key": None}
    assert environment.mask_secret("sesame") == "[REDACTED]"
    assert environment.mask_secret(None) is None


@pytest.mark.covers("C08")
def test_package_and_the_protocol_have_versions_of_their_own() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", tinkex.__version__)
    settings = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert (
        f"tinker=={protocol.PROTOCOL_VERSION}"
        in settings["project"]["optional-dependencies"]["test"]
    )
