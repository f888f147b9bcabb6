"""Where a client goes and with which key: the argument, else the environment, else an error with
the ways out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from tinkex import Config, ConfigurationError, RecoveryPolicy, ServiceClient
from tinkex.client.settings import config as module
from tinkex.client.settings.config import HOSTED_URL, configure, poll_delay
from tinkex.client.settings.setting_forms import POOL_SIZES

HERE: dict[str, Any] = {"base_url": "http://localhost:1"}


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (
        "TINKER_BASE_URL",
        "TINKER_API_KEY",
        "TINKER_PROJECT_ID",
        "TINKER_TAGS",
        "TINKER_TELEMETRY",
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    configure()


@pytest.mark.covers("C02")
def test_missing_settings_error_names_both_solutions() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ServiceClient()
    text = str(caught.value)
    assert "TINKER_API_KEY" in text
    assert 'base_url="local"' in text
    assert "TINKER_BASE_URL=local" in text


@pytest.mark.covers("C01")
def test_key_alone_means_the_hosted_service(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.resolve(api_key="tml-x").base_url == HOSTED_URL
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    config = Config.resolve()
    assert (config.base_url, config.api_key) == (HOSTED_URL, "tml-env")
    assert Config.resolve(api_key="tml-arg").api_key == "tml-arg"


@pytest.mark.parametrize(
    "url", ["local", "local:3", "http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"]
)
def test_no_key_is_needed_on_this_machine(url: str) -> None:
    config = Config.resolve(base_url=url)
    assert config.base_url == url
    assert config.api_key is None


@pytest.mark.covers("C02")
@pytest.mark.parametrize(
    "url", ["https://example.com", "http://10.0.0.1:8000", "http://localhost.example.com"]
)
def test_key_is_needed_elsewhere(url: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"api_key is required: .* needs an API key"
    ) as caught:
        Config.resolve(base_url=url)
    assert "TINKER_API_KEY" in str(caught.value)
    assert Config.resolve(base_url=url, api_key="tml-x").base_url == url


@pytest.mark.covers("C01")
def test_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (
        Config.resolve(base_url="http://localhost:1/prefix//").base_url
        == "http://localhost:1/prefix"
    )
    assert Config.resolve(base_url="local/").base_url == "local"


@pytest.mark.covers("C02")
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
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"address|URL") as caught:
        Config.resolve(base_url=url, api_key="tml-x")
    assert '"local"' in str(caught.value)


@pytest.mark.covers("C05")
def test_key_is_not_shown() -> None:
    config = Config.resolve(
        base_url="https://example.com", api_key="tml-secret", default_headers={"X-Gate": "hush"}
    )
    assert "tml-secret" not in repr(config)
    assert "hush" not in repr(config)
    assert "secret" not in repr(ServiceClient(base_url="https://example.com", api_key="tml-secret"))


def test_white_space_around_a_key_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x\n")
    assert Config.resolve().api_key == "tml-x"


def test_unknown_arguments_are_pointed_out() -> None:
    with pytest.warns(FutureWarning, match=r"surprise, wonder"):
        ServiceClient(base_url="http://localhost:1", wonder=1, surprise=2)


# ── tiers ─────────────────────────────────────────────────────────────────────────────────────────

# Of each setting: the variable that sets it, what it says, what that means; a default of the
# process; an argument.
TIERS: dict[str, tuple[str | None, str, Any, Any, Any]] = {
    "base_url": (
        "TINKER_BASE_URL",
        "http://localhost:2",
        "http://localhost:2",
        "local:c",
        "local:d",
    ),
    "api_key": ("TINKER_API_KEY", "tml-env", "tml-env", "tml-app", "tml-arg"),
    "credential_cmd": ("TINKER_CREDENTIAL_CMD", "env", "env", "app", "arg"),
    "project_id": ("TINKER_PROJECT_ID", "env", "env", "app", "arg"),
    "user_metadata": (None, "", None, {"a": "b"}, {}),
    "tags": (
        "TINKER_TAGS",
        "env, x",
        ("tinkex-python", "env", "x"),
        ["tinkex-python", "app"],
        ["tinkex-python"],
    ),
    "feature_gates": ("TINKER_FEATURE_GATES", "env,x", ("env", "x"), ["app"], []),
    "timeout": (None, "", 60, 5, 6.5),
    "max_retries": (None, "", None, 3, 0),
    "patience": (None, "", 300, 3, 0),
    "first_contact_patience": (None, "", 10, 3, 0),
    "poll_backoff": (
        "TINKEX_POLL_BACKOFF",
        "yes",
        "exponential",
        ("exponential", 1, 2),
        ("exponential", 1, 9),
    ),
    "default_headers": ("TINKEX_DEFAULT_HEADERS", '{"a": 1}', {"a": "1"}, {"b": "2"}, {}),
    "default_query": ("TINKEX_DEFAULT_QUERY", '{"a": 1}', {"a": "1"}, {"b": "2"}, {}),
    "user_agent": (None, "", None, "app/1", "arg/1"),
    "cf_access_client_id": ("CLOUDFLARE_ACCESS_CLIENT_ID", "env", "env", "app", "arg"),
    "cf_access_client_secret": ("CLOUDFLARE_ACCESS_CLIENT_SECRET", "env", "env", "app", "arg"),
    "proxy": ("TINKEX_PROXY", "http://env", "http://env:80", "http://app:81", "https://arg:82"),
    "proxy_headers": ("TINKEX_PROXY_HEADERS", '[["a", "b"]]', (("a", "b"),), [("c", "d")], []),
    "pool_sizes": (
        "TINKEX_POOL_SIZE",
        "1",
        POOL_SIZES | {"sample": 20},
        POOL_SIZES,
        POOL_SIZES | {"sample": 0},
    ),
    "http_client": ("TINKEX_HTTP_CLIENT", "json:loads", "json:loads", print, len),
    "telemetry": ("TINKER_TELEMETRY", "off", False, True, False),
    "log_level": ("TINKER_LOG", "warning", "warn", "error", "info"),
    "otel_propagate": ("TINKEX_OTEL_PROPAGATE", "on", True, False, True),
    "circuit_breaker": (None, "", False, True, False),
    "dump_headers": ("TINKEX_DUMP_HEADERS", "on", True, False, True),
    "recovery": (None, "", None, RecoveryPolicy(enabled=True), RecoveryPolicy()),
}


@pytest.mark.covers("C01", "24.config.1", "24.config.2")
@pytest.mark.parametrize("name", TIERS)
def test_every_setting_has_four_tiers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the level of logging is another test's business
    monkeypatch.setattr(module, "_applied_levels", [0])
    variable, text, told, app, argument = TIERS[name]

    def resolved(**given: Any) -> Any:
        value = getattr(Config.resolve(**(given if name == "base_url" else HERE | given)), name)
        return list(value) if isinstance(value, tuple) and isinstance(app, list) else value

    if variable is not None:
        assert variable not in os.environ
        monkeypatch.setenv(variable, text)
    assert resolved() == (list(told) if isinstance(app, list) else told)
    configure(**{name: app})
    assert resolved() == app
    assert resolved(**{name: None}) == app
    assert resolved(**{name: argument}) == argument
    configure()
    assert resolved() == (list(told) if isinstance(app, list) else told)


@pytest.mark.covers("C01", "24.config.1")
def test_all_settings_have_their_tiers_tested() -> None:
    assert set(TIERS) == {item.name for item in fields(Config)}


@pytest.mark.covers("C01", "24.config.7")
def test_defaults() -> None:
    config = Config.resolve(base_url="local")
    assert (config.timeout, config.max_retries, config.poll_backoff, config.telemetry) == (
        60,
        None,
        None,
        True,
    )
    assert (config.tags, config.feature_gates) == (("tinkex-python",), ("async_sampling",))
    assert (config.default_headers, config.default_query, config.proxy, config.proxy_headers) == (
        {},
        {},
        None,
        (),
    )
    assert (config.dump_headers, config.otel_propagate, config.log_level, config.http_client) == (
        False,
        False,
        None,
        None,
    )
    assert config.pool_sizes == POOL_SIZES
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.covers("C01")
def test_headers_and_queries_are_brought_into_one_form() -> None:
    pairs: Any = [(" X-A ", 1), ("X-B", 0.5), ("X-C", None), (3, "three")]
    for config in (
        Config(**HERE, default_headers=pairs),
        Config.resolve(**HERE, default_headers=dict(pairs)),
    ):
        assert config.default_headers == {"X-A": "1", "X-B": "0.5", "3": "three"}


# ── what is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C02", "C04", "C61")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base_url": "example.com"}, "invalid base_url"),
        ({"base_url": "https://"}, "invalid base_url"),
        ({"base_url": "not-a-url", "api_key": "", "timeout": 0}, "invalid base_url"),
        ({"base_url": "http://me:sekret@host"}, "invalid base_url: 'host'"),
        ({"api_key": "sekret"}, "api_key must start with the 'tml-' prefix"),
        ({"api_key": ""}, "api_key is required"),
        ({"timeout": 0}, "timeout must be a positive integer"),
        ({"timeout": -1}, "timeout must be a positive integer"),
        ({"timeout": True}, "timeout must be a positive integer"),
        ({"timeout": "60"}, "timeout must be a positive integer"),
        ({"timeout": float("nan")}, "timeout must be a positive integer"),
        ({"timeout": float("inf")}, "timeout must be a positive integer"),
        ({"max_retries": -1}, "max_retries must be a non-negative integer"),
        ({"max_retries": 1.5}, "max_retries must be a non-negative integer"),
        ({"max_retries": True}, "max_retries must be a non-negative integer"),
        ({"patience": -1}, "patience must be a number of seconds"),
        ({"first_contact_patience": "1"}, "first_contact_patience must be a number of seconds"),
        ({"http_client": 3}, "http_client must implement"),
        ({"http_client": "json"}, "http_client must implement"),
        ({"http_client": "json:"}, "http_client must implement"),
        ({"proxy": "host:3128"}, "proxy URL scheme must be http or https"),
        ({"proxy": "socks5://me:sekret@host"}, "proxy URL scheme must be http or https"),
        ({"proxy": "sekret.example.com"}, "proxy must be a URL string or"),
        ({"proxy": "http://"}, "proxy must be a URL string or"),
        ({"proxy": "http://me:sekret@host:99999"}, "proxy must be a URL string or"),
        ({"proxy": "http://host:0"}, "proxy must be a URL string or"),
        ({"proxy": 3128}, "proxy must be a URL string or"),
        ({"proxy": ("http", "host")}, "proxy must be"),
        ({"proxy": ("ftp", "host", 1, [])}, "proxy must be"),
        ({"proxy": ("http", "ho/st", 1, [])}, "proxy must be"),
        ({"proxy": ("http", "", 1, [])}, "proxy must be"),
        ({"proxy": ("http", "host", 0, [])}, "proxy must be"),
        ({"proxy": ("http", "host", 65536, [])}, "proxy must be"),
        ({"proxy": ("http", "host", "1", [])}, "proxy must be"),
        ({"proxy": ("http", "host", True, [])}, "proxy must be"),
        ({"proxy": ("http", "host", 1, {"x": 1})}, "no options are known"),
        ({"proxy_headers": {"a": "sekret"}}, "proxy_headers must be a list"),
        ({"proxy_headers": "ab"}, "proxy_headers must be a list"),
        ({"proxy_headers": [("a", 1)]}, "proxy_headers must be a list of"),
        ({"proxy_headers": [("a",)]}, "proxy_headers must be a list of"),
        ({"proxy_headers": ["ab"]}, "proxy_headers must be a list of"),
        ({"default_headers": {" ": "x"}}, "blank key"),
        ({"default_headers": {"a": b"sekret"}}, "must be text or a number"),
        ({"default_headers": {"a": True}}, "must be text or a number"),
        ({"default_query": {"a": [1]}}, r"default_query\['a'\]"),
        ({"default_headers": 3}, "must be a mapping"),
        ({"default_headers": "sekret"}, "must be a mapping"),
        ({"poll_backoff": "linear"}, "poll_backoff must be"),
        ({"poll_backoff": 3}, "poll_backoff must be"),
        ({"poll_backoff": ("exponential", 0, 1)}, "poll_backoff must be"),
        ({"poll_backoff": ("exponential", 2, 1)}, "poll_backoff must be"),
        ({"poll_backoff": ("exponential", 1)}, "poll_backoff must be"),
        ({"poll_backoff": ("linear", 1, 2)}, "poll_backoff must be"),
        ({"poll_backoff": ("exponential", "1", 2)}, "poll_backoff must be"),
        ({"tags": "abc"}, "tags must be a list"),
        ({"tags": [1]}, "tags must be a list"),
        ({"feature_gates": "abc"}, "feature_gates must be a list"),
        ({"telemetry": "yes"}, "telemetry must be True or False"),
        ({"dump_headers": 1}, "dump_headers must be True or False"),
        ({"otel_propagate": 0}, "otel_propagate must be True or False"),
        ({"log_level": "loud"}, "log_level must be one of debug, info, warn, error"),
        ({"project_id": "  "}, "project_id must not be blank"),
        ({"user_agent": ""}, "user_agent must not be blank"),
        ({"user_metadata": ["a"]}, "user_metadata must be a mapping"),
        ({"pool_sizes": {"futures": 1}}, "pool_sizes has no class 'futures'; there are session"),
        ({"pool_sizes": {"train": -1}}, r"pool_sizes\['train'\] must be"),
        ({"pool_sizes": {"train": True}}, r"pool_sizes\['train'\] must be"),
        ({"pool_sizes": 5}, "pool_sizes must be a mapping"),
    ],
    ids=repr,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        Config.resolve(**{"base_url": "https://example.com", "api_key": "tml-x", **settings})
    assert isinstance(caught.value, ValueError)
    assert "sekret" not in str(caught.value)
    if settings.get("api_key") != "":
        # of a Config that is made by hand, too
        with pytest.raises(ConfigurationError, match=words):
            Config(**{"base_url": "https://example.com", "api_key": "tml-x", **settings})


@pytest.mark.covers("C02", "24.config.3")
def test_keys_are_of_known_kinds_except_on_this_machine() -> None:
    for key in ("tml-x", "eyJhbGciOi.x.y"):
        assert Config.resolve(base_url="https://example.com", api_key=key).api_key == key
    for url in ("local", "http://localhost:1", "http://[::1]:1"):
        assert Config.resolve(base_url=url, api_key="anything").api_key == "anything"
    with pytest.raises(ConfigurationError, match="prefix"):
        replace(Config(base_url="local", api_key="anything"), base_url="https://example.com")


# ── parity, proxies, polls, pools ─────────────────────────────────────────────────────────────────


@pytest.mark.covers("C03", "24.config.8")
def test_parity_mode_chooses_the_defaults_of_an_older_sdk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(**given: Any) -> tuple[float, int | None]:
        config = Config.resolve(base_url="local", **given)
        return config.timeout, config.max_retries

    python = (module.PYTHON_TIMEOUT, module.PYTHON_MAX_RETRIES)
    beam = (module.BEAM_TIMEOUT, module.BEAM_MAX_RETRIES)
    assert (python, beam) == ((60, 10), (120, 2))
    assert chosen() == (60, None)
    for text in ("python", "Python", "PYTHON"):
        monkeypatch.setenv("TINKEX_PARITY", text)
        assert chosen() == python
    for text in ("beam", "BEAM", "elixir", "ELIXIR"):
        monkeypatch.setenv("TINKEX_PARITY", text)
        assert chosen() == beam
    for text in ("Beam", "other"):
        monkeypatch.setenv("TINKEX_PARITY", text)
        assert chosen() == (60, None)
        assert chosen(parity_mode="beam") == beam
    monkeypatch.setenv("TINKEX_PARITY", "beam")
    configure(parity_mode="python")
    assert chosen() == python
    assert chosen(parity_mode="elixir") == beam
    assert chosen(parity_mode="unheard-of") == python
    assert chosen(parity_mode="beam", timeout=7, max_retries=0) == (7, 0)


@pytest.mark.covers("C04", "24.config.4")
@pytest.mark.parametrize(
    ("proxy", "url"),
    [
        ("http://host", "http://host:80"),
        ("https://host/", "https://host:443/"),
        ("http://host:3128", "http://host:3128"),
        ("http://[::1]", "http://[::1]:80"),
        (("http", "host", 8080, []), "http://host:8080"),
        (["https", "host", 1], "https://host:1"),
        (("https", "::1", None, None), "https://[::1]:443"),
    ],
    ids=repr,
)
def test_proxies_have_several_forms(proxy: Any, url: str) -> None:
    config = Config.resolve(**HERE, proxy=proxy)
    assert config.proxy == config.proxy_url == url
    assert config.proxy_authorization == {}
    assert replace(config, timeout=1).proxy == url


@pytest.mark.covers("C04", "24.config.4")
def test_account_of_a_proxy_is_a_header_unless_headers_are_given() -> None:
    config = Config.resolve(**HERE, proxy="http://user:pass@host")
    assert config.proxy_url == "http://host:80"
    assert config.proxy_authorization == {"Proxy-Authorization": "Basic dXNlcjpwYXNz"}
    assert "pass" not in repr(config)
    given = Config.resolve(**HERE, proxy="http://user:pass@host", proxy_headers=[["X-A", "b"]])
    assert given.proxy_authorization == {"X-A": "b"}
    assert Config.resolve(
        **HERE, proxy="http://user:pass@host", proxy_headers=[]
    ).proxy_authorization


@pytest.mark.covers("C61")
def test_polls_wait_by_their_policy() -> None:
    def waits(policy: Any) -> list[float]:
        made = Config(**HERE, poll_backoff=policy).poll_backoff
        return [poll_delay(made, number) for number in (0, 1, 4, 5, 5000)]

    assert waits(None) == waits(False) == waits("none") == [0] * 5
    assert waits("exponential") == waits(True) == [1, 2, 16, 30, 30]
    assert (
        waits(("exponential", 0.025, 0.04))
        == waits(["exponential", 0.025, 0.04])
        == [0.025, *[0.04] * 4]
    )
    assert waits(lambda number: number / 2) == [0, 0.5, 2, 2.5, 2500]
    odd = iter([-1.0, "soon", None, float("nan"), True])
    assert waits(lambda _: next(odd)) == [0] * 5


@pytest.mark.covers("C11")
def test_pools_that_are_not_named_keep_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_POOL_SIZE", "5")
    monkeypatch.setenv("TINKEX_POOL_COUNT", "2")
    assert Config.resolve(base_url="local").pool_sizes == POOL_SIZES | {"sample": 10}
    configure(pool_sizes={"train": 3, "rest": 4})
    sizes = Config.resolve(base_url="local", pool_sizes={"rest": 0}).pool_sizes
    assert sizes == POOL_SIZES | {"sample": 10, "train": 3, "rest": 0}
    assert Config(base_url="local", pool_sizes={"poll": 7}).pool_sizes == POOL_SIZES | {"poll": 7}


# ── another client for HTTP ───────────────────────────────────────────────────────────────────────


class Carrier:
    """Looks like what requests go through."""

    def __init__(self, config: Config) -> None:
        self.config = config

    async def send(self) -> None:
        """Look so."""

    async def stream(self) -> None:
        """Look so."""

    async def close(self) -> None:
        """Look so."""


@pytest.mark.covers("C12")
def test_requests_can_go_through_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config(base_url="local").make_http_client() is None
    config = Config(base_url="local", http_client=Carrier)
    assert config.make_http_client().config is config
    monkeypatch.setattr(json, "Carrier", Carrier, raising=False)
    monkeypatch.setenv("TINKEX_HTTP_CLIENT", "json:Carrier")
    assert isinstance(Config.resolve(base_url="local").make_http_client(), Carrier)
    monkeypatch.setenv("TINKEX_HTTP_CLIENT", "nowhere:Carrier")
    assert Config.resolve(base_url="local").make_http_client() is None


@pytest.mark.covers("C02", "C12")
@pytest.mark.parametrize(
    "client",
    ["nowhere:x", "json:nowhere", lambda config: object()],
    ids=["no-module", "no-member", "no-methods"],
)
def test_invalid_http_client_is_refused_on_use(client: Any) -> None:
    config = Config.resolve(base_url="local", http_client=client)
    with pytest.raises(ConfigurationError, match="http_client must implement"):
        config.make_http_client()


# ── the level of logging ──────────────────────────────────────────────────────────────────────────

LOGGING = """
import logging, sys
import tinkex
from tinkex.client.settings.config import Config, configure
logger = logging.getLogger("tinkex")
exec(sys.argv[1])
Config.resolve(base_url="local", log_level="error")
logger.debug("a detail")
logger.info("a fact")
print(logging.getLevelName(logger.level))
"""


@pytest.mark.covers("1.18/1", "1.9/3", "C07")
@pytest.mark.parametrize(
    ("variable", "before", "level", "written"),
    [
        ("", "", "NOTSET", ""),
        ("loud", "", "NOTSET", ""),
        ("info", "", "INFO", "INFO tinkex: a fact\n"),
        ("debug", "", "DEBUG", "DEBUG tinkex: a detail\nINFO tinkex: a fact\n"),
        ("warning", "", "WARNING", ""),
        ("debug", "configure(log_level='warn')", "WARNING", ""),
        ("info", "logging.basicConfig(format='own: %(message)s')", "INFO", "own: a fact\n"),
        (
            "info",
            "Config.resolve(base_url='local'); logging.basicConfig(format='own: %(message)s')",
            "INFO",
            "own: a fact\n",
        ),
        ("info", "Config.resolve(base_url='local'); logger.setLevel('CRITICAL')", "CRITICAL", ""),
    ],
)
def test_level_of_logging_is_set_once(variable: str, before: str, level: str, written: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGGING, before],
        env=os.environ | {"TINKER_LOG": variable},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert (done.stdout.strip(), done.stderr) == (level, written)
