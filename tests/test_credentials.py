"""Credentials: where they are found, tokens and their renewal, proxies and gates; and the tiers of settings."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, Seen, faulty_server
from tinkex import Config, ConfigurationError, HttpClient, ServiceClient
from tinkex.config import configure, mask_api_key
from tinkex.credentials import RENEW_BEFORE, RENEW_NOW, Token, claims, stored_key


def token(expires: float, **extra: Any) -> str:
    body = base64.urlsafe_b64encode(json.dumps({"exp": expires, "sub": "u", **extra}).encode()).decode().rstrip("=")
    return f"eyJh.{body}.sig"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    yield
    configure()


# ── tiers ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C01")
def test_each_tier_yields_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"base_url": "http://localhost:1"}
    assert Config.resolve(**base).default_headers == {}
    monkeypatch.setenv("TINKEX_DEFAULT_HEADERS", '{"X-A": "env", "X-N": 3}')
    assert Config.resolve(**base).default_headers == {"X-A": "env", "X-N": "3"}
    configure(default_headers={"X-A": "configured"})
    assert Config.resolve(**base).default_headers == {"X-A": "configured"}
    assert Config.resolve(**base, default_headers={"X-A": "given"}).default_headers == {"X-A": "given"}
    assert Config.resolve(**base, default_headers={}).default_headers == {}  # empty says something, None does not
    assert Config.resolve(**base, default_headers=None).default_headers == {"X-A": "configured"}


@pytest.mark.covers("C01", "24.config.2")
def test_false_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_DUMP_HEADERS", "yes")
    assert Config.resolve(base_url="local").dump_headers is True
    assert Config.resolve(base_url="local", dump_headers=False).dump_headers is False


@pytest.mark.covers("C01")
def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="unknown setting 'colour'"):
        Config.resolve(base_url="local", colour=1)
    with pytest.raises(TypeError, match="unknown setting 'colour'"):
        configure(colour=1)


@pytest.mark.covers("C05", "24.config.5")
@pytest.mark.parametrize(
    ("key", "shown"),
    [("tml-abcdef123456", "tml-ab...3456"), ("abcd", "****"), ("abcde", "abc...bcde"), ("", ""), (None, None)],
)
def test_masks(key: str | None, shown: str | None) -> None:
    assert mask_api_key(key) == shown


@pytest.mark.covers("C05", "24.config.6")
def test_secrets_are_not_in_the_repr() -> None:
    config = Config.resolve(
        base_url="https://example.com",
        api_key="tml-abcdefghijklmnop",
        cf_access_client_id="id",
        cf_access_client_secret="cfsecret",
        default_headers={"Authorization": "Bearer sesame"},
        proxy="http://me:hunter2@proxy:3128",
        credential_cmd="pass show tinker",
    )
    for secret in ("abcdefghijkl", "cfsecret", "sesame", "hunter2", "pass show"):
        assert secret not in repr(config)


# ── credentials ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_stored_key_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored_key() is None
    folder = tmp_path / ".tinker"
    folder.mkdir()
    stored = {"version": 1, "default": "5", "keys": {"5": {"type": "manual", "key": "tml-stored"}}}
    (folder / "credentials.json").write_text(json.dumps(stored))
    assert Config.resolve().api_key == "tml-stored"
    assert Config.resolve(base_url="http://localhost:1").api_key is None  # it is for the service, not for this machine
    assert Config.resolve(base_url="https://example.com").api_key == "tml-stored"
    stored["keys"]["5"]["base_url"] = "http://localhost:1"  # type: ignore[index]
    (folder / "credentials.json").write_text(json.dumps(stored))
    assert Config.resolve(base_url="http://localhost:1/").api_key == "tml-stored"  # from a login at that server …
    assert Config.resolve(base_url="http://localhost:2").api_key is None  # … and for no other
    assert stored_key() is None
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-cmd")
    assert Config.resolve().api_key is None
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    assert Config.resolve().api_key == "tml-env"
    (folder / "credentials.json").write_text("{broken")
    assert stored_key() is None


def test_a_command_gives_the_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_server() as server:
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "printf 'tml-from-command\\n'")
        with ServiceClient(base_url=server.base_url) as service:
            service.get_server_capabilities()
        keys = {seen.headers.get("x-api-key") for seen in server.seen}
        assert keys == {"tml-from-command"}


def test_clients_that_start_together_run_the_command_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each run leaves a line; the next client runs it anew, and a failure is everyone's."""
    ran = tmp_path / "ran"
    with faulty_server() as server, ExitStack() as stack:
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo x >> {ran}; sleep 0.3; echo tml-shared")
        clients = [stack.enter_context(HttpClient(base_url=server.base_url)) for _ in range(4)]
        for asked in [client.get("healthz", max_retries=0) for client in clients]:
            with pytest.raises(tinkex.NotFoundError):  # the server has no such thing; that is an answer
                asked.result(10)
        assert ran.read_text() == "x\n"
        assert {seen.headers["x-api-key"] for seen in server.seen} == {"tml-shared"}
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo x >> {ran}; sleep 0.3; exit 3")
        clients = [stack.enter_context(HttpClient(base_url=server.base_url)) for _ in range(3)]
        for asked in [client.get("healthz", max_retries=0) for client in clients]:
            with pytest.raises(ConfigurationError, match="exit code 3"):
                asked.result(10)
        with pytest.raises(ConfigurationError, match="exit code 3"):
            clients[0].get("healthz").result(10)
        assert ran.read_text() == "x\n" * 3


@pytest.mark.parametrize(("command", "words"), [("exit 3", "exit code 3"), ("true", "printed nothing")])
def test_a_command_that_gives_nothing_is_told(monkeypatch: pytest.MonkeyPatch, command: str, words: str) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
    with ServiceClient(base_url="http://127.0.0.1:1") as service, pytest.raises(ConfigurationError, match=words):
        service.get_server_capabilities()


def test_a_server_that_wants_tokens_gets_them() -> None:
    given = token(4e9)
    with faulty_server() as server:
        server.script("client/config", Answer(body={"pjwt_auth_enabled": True}))
        server.script("auth/token", Answer(body={"jwt": given}))
        with ServiceClient(base_url=server.base_url, api_key="tml-raw") as service:
            service.get_server_capabilities()
        sent = {seen.path: seen.headers.get("x-api-key") for seen in server.seen}
    assert sent["client/config"] == sent["auth/token"] == "tml-raw"
    assert sent["create_session"] == sent["get_server_capabilities"] == given


async def test_a_token_is_renewed_in_time_and_once_at_a_time() -> None:
    now, made = [1000.0], list[str]()

    async def exchange() -> str:
        await asyncio.sleep(0)
        made.append(token(now[0] + 1000, n=len(made)))
        return made[-1]

    held = Token(exchange, lambda: now[0])
    assert set(await asyncio.gather(*(held.value() for _ in range(5)))) == {made[0]}
    assert len(made) == 1
    now[0] += 1000 - RENEW_BEFORE + 1
    assert await held.value() == made[0]  # still good; a new one is fetched behind the scenes
    await asyncio.sleep(0.01)
    assert await held.value() == made[1]
    now[0] += 1000 - RENEW_NOW + 1
    assert await held.value() == made[2]


async def test_an_old_token_is_kept_while_it_cannot_be_renewed() -> None:
    now, fail = [1000.0], [False]

    async def exchange() -> str:
        if fail[0]:
            raise tinkex.APIConnectionError("down")
        return token(now[0] + 1000)

    held = Token(exchange, lambda: now[0])
    first = await held.value()
    fail[0], now[0] = True, 1990.0
    assert await held.value() == first
    with pytest.raises(tinkex.APIConnectionError):
        await Token(exchange).value()


@pytest.mark.parametrize("text", ["", "eyJ", "a.b.c", "a.bnVsbA.c"])
def test_a_token_that_cannot_be_read_says_so(text: str) -> None:
    with pytest.raises(tinkex.TinkerError, match="cannot be read"):
        claims(text)


# ── on the way ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C04", "D14", "24.code.21")
def test_a_proxy_is_really_used() -> None:
    with faulty_server() as proxy:
        configure(proxy=proxy.base_url.replace("http://", "http://me:pass@"))
        service = ServiceClient(base_url="http://tinker.invalid:81", api_key="tml-x")
        service.get_server_capabilities()
        service.close("success").result(10)
        first: Seen = proxy.seen[0]
    assert first.headers["host"] == "tinker.invalid:81"
    assert first.headers["proxy-authorization"] == "Basic bWU6cGFzcw=="


@pytest.mark.covers("C04", "24.code.21")
def test_streams_and_redirects_go_through_the_proxy_too() -> None:
    with faulty_server() as proxy:
        config = Config(
            base_url="http://tinker.invalid:81",
            api_key="tml-x",
            proxy=proxy.base_url,
            proxy_headers=(("X-Proxy-Pass", "sesame"),),
        )
        proxy.script("events", Answer(body=b"data: 1\n\n", content_type="text/event-stream"))
        proxy.script("archive", Answer(302, headers={"Location": "http://bucket.invalid/there"}))
        proxy.script("/there", Answer(body={"found": True}))
        with HttpClient(config=config) as http:
            assert list(http.stream_get("events")) == [1]
            assert http.get("archive").result(10) == {"found": True}
        assert [seen.headers["host"] for seen in proxy.seen] == ["tinker.invalid:81"] * 2 + ["bucket.invalid"]
        assert {seen.headers["x-proxy-pass"] for seen in proxy.seen} == {"sesame"}
        assert "x-api-key" not in proxy.seen[-1].headers


@pytest.mark.covers("C04", "24.code.21")
def test_a_tunnel_is_asked_for_without_the_key() -> None:
    with faulty_server() as proxy:
        proxy.script("tinker.invalid:443", Answer(407, b"who are you?", content_type="text/plain"))
        address = proxy.base_url.replace("http://", "http://me:pass@")
        config = Config(base_url="https://tinker.invalid", api_key="tml-x", proxy=address)
        with HttpClient(config=config) as http, pytest.raises(tinkex.APIConnectionError) as caught:
            http.get("healthz", max_retries=0).result(10)
        [seen] = proxy.seen
    assert (seen.method, seen.path) == ("CONNECT", "tinker.invalid:443")
    assert seen.headers["proxy-authorization"] == "Basic bWU6cGFzcw=="
    assert "tml-x" not in repr(seen)
    assert "407" in caught.value.message
    assert "pass" not in str(caught.value)
    assert "bWU6" not in str(caught.value)


@pytest.mark.covers("C13", "24.http.9")
def test_gate_headers_and_default_query_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "gate")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "open")
    configure(default_query={"tenant": "a b"})
    with faulty_server() as server:
        with ServiceClient(base_url=server.base_url) as service:
            service.get_server_capabilities()
        for seen in server.seen:
            assert seen.headers["cf-access-client-id"] == "gate"
            assert seen.headers["cf-access-client-secret"] == "open"
        assert "tenant=a+b" in server.seen[0].path or "tenant=a%20b" in server.seen[0].path


@pytest.mark.covers("C05", "24.config.6", "C25")
def test_dumped_headers_are_redacted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tinkex")
    configure(dump_headers=True)
    with faulty_server() as server, ServiceClient(base_url=server.base_url, api_key="tml-sesame") as service:
        service.get_server_capabilities()
    assert "X-API-Key" in caplog.text
    assert "[REDACTED]" in caplog.text
    assert "sesame" not in caplog.text


def test_retries_can_be_counted() -> None:
    configure(max_retries=1)
    with faulty_server() as server:
        server.script("get_server_capabilities", *[Answer(503) for _ in range(5)])
        with ServiceClient(base_url=server.base_url) as service, pytest.raises(tinkex.InternalServerError) as caught:
            service.get_server_capabilities()
        assert caught.value.attempts == 2


@pytest.mark.covers("4.1/4")
def test_a_breaker_opens_for_its_endpoint_alone() -> None:
    configure(circuit_breaker=True, max_retries=0)
    with faulty_server() as server:
        server.script("get_server_capabilities", *[Answer(503) for _ in range(9)])
        with ServiceClient(base_url=server.base_url) as service:
            for _ in range(5):
                with pytest.raises(tinkex.InternalServerError):
                    service.get_server_capabilities()
            count = len(server.seen)
            with pytest.raises(tinkex.TinkerError, match="circuit breaker"):
                service.get_server_capabilities()
            assert len(server.seen) == count
            assert service.circuit_breakers()["GET get_server_capabilities"] == "open"
            assert service.circuit_breakers()["POST create_session"] == "closed"


# ── auth ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_auth_tells_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tinkex.auth.get_tinker_token() is None
    assert not tinkex.auth.tinker_has_credentials()
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "exit 1")  # counted, not run
    assert tinkex.auth.tinker_has_credentials()
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert tinkex.auth.get_tinker_token() == "tml-x"
    with faulty_server() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
        tinkex.auth.raise_if_tinker_not_accessible()
        server.script("get_server_capabilities", Answer(403, {"detail": "no"}))
        with pytest.raises(tinkex.PermissionDeniedError):
            tinkex.auth.raise_if_tinker_not_accessible()


def test_copies_exports_and_console_pages() -> None:
    with faulty_server() as server:
        server.script("retrieve_future", Answer(body={"model_id": "s:train:0"}))
        server.script("copy_weights", Answer(body={"tinker_path": "tinker://new/weights/x"}))
        with ServiceClient(base_url=server.base_url, project_id="p") as service:
            assert service.get_console_url().endswith("/sessions")
            assert service.copy_weights("tinker://a/weights/b").result(10) == "tinker://new/weights/x"
            assert server.requests("copy_weights")[0].json["destination_project_id"] == "p"
            client = service.create_lora_training_client("m")
            assert service.get_console_url().endswith("/sessions/s")
            assert client.get_console_url().endswith("/training_runs/s%3Atrain%3A0")
            server.script("save_weights_external", Answer(body={"request_id": "r"}))
            server.script("retrieve_future", Answer(body={"path": "tinker://s:train:0/external_weights/e"}))
            exported = client.save_weights_external("e", ttl_seconds=7200).result(10)
            assert exported.path == "tinker://s:train:0/external_weights/e"
            sent = server.requests("save_weights_external")[0].json
            assert sent == {
                "model_id": "s:train:0",
                "path": "e",
                "seq_id": 1,
                "ttl_seconds": 7200,
                "type": "save_weights_external",
            }
