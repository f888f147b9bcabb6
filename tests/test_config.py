"""Where a client goes and with which key: the argument, else the environment, else an error with the ways out."""

from __future__ import annotations

import pytest

from tinkex import Config, ConfigurationError, ServiceClient
from tinkex.config import HOSTED_URL


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_PROJECT_ID", "TINKER_TAGS"):
        monkeypatch.delenv(name, raising=False)


def test_with_nothing_set_the_error_names_both_ways_out() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ServiceClient()
    text = str(caught.value)
    assert "TINKER_API_KEY" in text
    assert 'base_url="local"' in text
    assert "TINKER_BASE_URL=local" in text


def test_a_key_alone_means_the_hosted_service(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.resolve(api_key="tml-x").base_url == HOSTED_URL
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    config = Config.resolve()
    assert (config.base_url, config.api_key) == (HOSTED_URL, "tml-env")
    assert Config.resolve(api_key="tml-arg").api_key == "tml-arg"


@pytest.mark.parametrize("url", ["local", "local:3", "http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"])
def test_no_key_is_needed_on_this_machine(url: str) -> None:
    config = Config.resolve(base_url=url)
    assert config.base_url == url
    assert config.api_key is None


@pytest.mark.parametrize("url", ["https://example.com", "http://10.0.0.1:8000", "http://localhost.example.com"])
def test_a_key_is_needed_elsewhere(url: str) -> None:
    with pytest.raises(ConfigurationError, match="needs an API key") as caught:
        Config.resolve(base_url=url)
    assert "TINKER_API_KEY" in str(caught.value)
    assert Config.resolve(base_url=url, api_key="tml-x").base_url == url


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "local")
    monkeypatch.setenv("TINKER_PROJECT_ID", "from-env")
    monkeypatch.setenv("TINKER_TAGS", "a, b,,")
    config = Config.resolve()
    assert (config.base_url, config.project_id) == ("local", "from-env")
    assert config.tags == ("tinkex-python", "a", "b")
    given = Config.resolve(base_url="http://localhost:9", project_id="given")
    assert (given.base_url, given.project_id) == ("http://localhost:9", "given")


def test_empty_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "")
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert Config.resolve(base_url="", api_key="").base_url == HOSTED_URL
    monkeypatch.setenv("TINKER_API_KEY", "")
    with pytest.raises(ConfigurationError, match="no API key and no base URL"):
        Config.resolve()


def test_trailing_slashes_are_dropped() -> None:
    assert Config.resolve(base_url="http://localhost:1/prefix//").base_url == "http://localhost:1/prefix"
    assert Config.resolve(base_url="local/").base_url == "local"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://localhost",
        "example.com",
        "locally",
        "http://",
        "https:///path",
        "http://[::1",
        "http://h:x",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"address|URL") as caught:
        Config.resolve(base_url=url, api_key="tml-x")
    assert '"local"' in str(caught.value)


def test_the_key_is_not_shown() -> None:
    config = Config.resolve(base_url="https://example.com", api_key="tml-secret", default_headers={"X-Gate": "hush"})
    assert "tml-secret" not in repr(config)
    assert "hush" not in repr(config)
    assert "secret" not in repr(ServiceClient(base_url="https://example.com", api_key="tml-secret"))


def test_white_space_around_a_key_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x\n")
    assert Config.resolve().api_key == "tml-x"


def test_unknown_arguments_are_pointed_out() -> None:
    with pytest.warns(FutureWarning, match=r"surprise, wonder"):
        ServiceClient(base_url="http://localhost:1", wonder=1, surprise=2)
