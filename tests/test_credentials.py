"""Credentials: where they are found, tokens and their renewal, proxies and gates; and the tiers of
settings."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import wait_until
from tinkex import Config, ConfigurationError, HttpClient, ServiceClient
from tinkex.client.settings.config import configure, mask_api_key
from tinkex.client.settings.credentials import (
    NO_HOPE,
    RENEW_AGAIN,
    RENEW_NOW,
    Token,
    claims,
    rejects_token,
    stored_key,
)
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.wire import codec, protocol


def token(expires: float, **extra: Any) -> str:
    body = (
        base64.urlsafe_b64encode(json.dumps({"exp": expires, "sub": "u", **extra}).encode())
        .decode()
        .rstrip("=")
    )
    return f"eyJh.{body}.sig"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    yield
    configure()


# ── tiers ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C01")
def test_each_tier_yields_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"base_url": "http://localhost:1"}
    assert Config.resolve(**base).default_headers == {}
    monkeypatch.setenv("TINKEX_DEFAULT_HEADERS", '{"X-A": "env", "X-N": 3}')
    assert Config.resolve(**base).default_headers == {"X-A": "env", "X-N": "3"}
    configure(default_headers={"X-A": "configured"})
    assert Config.resolve(**base).default_headers == {"X-A": "configured"}
    assert Config.resolve(**base, default_headers={"X-A": "given"}).default_headers == {
        "X-A": "given"
    }
    # empty says something, None does not
    assert Config.resolve(**base, default_headers={}).default_headers == {}
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
    [
        ("tml-abcdef123456", "tml-ab...3456"),
        ("abcd", "****"),
        ("abcde", "abc...bcde"),
        ("", ""),
        (None, None),
    ],
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


# ── credentials ───────────────────────────────────────────────────────────────────────────────────


def test_stored_key_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored_key() is None
    folder = tmp_path / ".tinker"
    folder.mkdir()
    stored = {"version": 1, "default": "5", "keys": {"5": {"type": "manual", "key": "tml-stored"}}}
    (folder / "credentials.json").write_text(json.dumps(stored))
    assert Config.resolve().api_key == "tml-stored"
    # it is for the service, not for this machine
    assert Config.resolve(base_url="http://localhost:1").api_key is None
    assert Config.resolve(base_url="https://example.com").api_key == "tml-stored"
    stored["keys"]["5"]["base_url"] = "http://localhost:1"  # type: ignore[index]
    (folder / "credentials.json").write_text(json.dumps(stored))
    # from a login at that server …
    assert Config.resolve(base_url="http://localhost:1/").api_key == "tml-stored"
    assert Config.resolve(base_url="http://localhost:2").api_key is None  # … and for no other
    assert stored_key() is None
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-cmd")
    assert Config.resolve().api_key is None
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    assert Config.resolve().api_key == "tml-env"
    (folder / "credentials.json").write_text("{broken")
    assert stored_key() is None


def test_command_gives_the_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_server() as server:
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "printf 'tml-from-command\\n'")
        with ServiceClient(base_url=server.base_url) as service:
            service.get_server_capabilities()
        keys = {seen.headers.get("x-api-key") for seen in server.seen}
        assert keys == {"tml-from-command"}


def test_clients_that_start_together_run_the_command_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each run leaves a line; the next client runs it anew, and a failure is everyone's."""
    ran = tmp_path / "ran"
    with faulty_server() as server, ExitStack() as stack:
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo x >> {ran}; sleep 0.3; echo tml-shared")
        clients = [stack.enter_context(HttpClient(base_url=server.base_url)) for _ in range(4)]
        for asked in [client.get("healthz", max_retries=0) for client in clients]:
            # the server has no such thing; that is an answer
            with pytest.raises(tinkex.NotFoundError):
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


@pytest.mark.parametrize(
    ("command", "words"), [("exit 3", "exit code 3"), ("true", "printed nothing")]
)
def test_credential_command_without_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
    with (
        ServiceClient(base_url="http://127.0.0.1:1") as service,
        pytest.raises(ConfigurationError, match=words),
    ):
        service.get_server_capabilities()


def test_server_that_wants_tokens_gets_them() -> None:
    given = token(4e9)
    with faulty_server() as server:
        server.script("client/config", Answer(body={"pjwt_auth_enabled": True}))
        server.script("auth/token", Answer(body={"jwt": given}))
        with ServiceClient(base_url=server.base_url, api_key="tml-raw") as service:
            service.get_server_capabilities()
        sent = {seen.path: seen.headers.get("x-api-key") for seen in server.seen}
    assert sent["client/config"] == sent["auth/token"] == "tml-raw"
    assert sent["create_session"] == sent["get_server_capabilities"] == given


def due_in(held: Token) -> float:
    """Seconds until a token is renewed in the background."""
    assert held._timer is not None
    return held._timer.when() - asyncio.get_running_loop().time()


async def ended(held: Token) -> None:
    """Wait for a background attempt to end."""
    assert held._attempt is not None
    await held._attempt


@pytest.mark.covers("U26")
async def test_tokens_are_renewed_before_requests_when_little_time_is_left_and_once_at_a_time() -> (
    None
):
    now, made = [1000.0], list[str]()

    async def exchange() -> str:
        await asyncio.sleep(0)
        made.append(token(now[0] + 1000, n=len(made)))
        return made[-1]

    held = Token(exchange, lambda: now[0])
    assert set(await asyncio.gather(*(held.value() for _ in range(5)))) == {made[0]}
    assert len(made) == 1
    now[0] += 1000 - RENEW_NOW - 1
    assert await held.value() == made[0]
    now[0] += 2
    assert set(await asyncio.gather(*(held.value() for _ in range(5)))) == {made[1]}
    assert len(made) == 2


@pytest.mark.covers("U26")
async def test_tokens_are_renewed_in_the_background_after_half_their_life() -> None:
    """Both times are the server's: this machine's clock does not matter."""
    life, made = {"iat": 4e9 - 1000.0}, list[str]()

    async def exchange() -> str:
        made.append(token(4e9, n=len(made), **life))
        return made[-1]

    held, delays = Token(exchange), list[float]()
    assert await held.value() == made[0]
    for _ in range(20):
        delays.append(due_in(held))
        held.renew_in_background()
        await ended(held)
    assert await held.value() == made[20]
    assert all(449 < delay < 551 for delay in delays)
    assert max(delays) - min(delays) > 10  # many clients do not all ask at the same time
    for odd in ({}, {"iat": 4e9}, {"iat": 5e9}, {"iat": "yesterday"}):
        life.clear()
        life.update(odd)  # type: ignore[arg-type]
        held.renew_in_background()
        await ended(held)
        assert RENEW_AGAIN - 1 < due_in(held) <= RENEW_AGAIN
    held.stop()
    count = len(made)
    held.renew_in_background()
    await asyncio.sleep(0.01)
    assert len(made) == count


@pytest.mark.covers("U26")
async def test_failed_background_renewals_are_tried_again_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="tinkex")
    now, error = [1000.0], list[tinkex.TinkerError]()

    async def exchange() -> str:
        if error:
            raise error[0]
        return token(now[0] + 1000, iat=now[0])

    held = Token(exchange, lambda: now[0])
    first = await held.value()
    error.append(tinkex.APIConnectionError("down"))
    for _ in range(3):
        held.renew_in_background()
        await ended(held)
        assert RENEW_AGAIN - 1 < due_in(held) <= RENEW_AGAIN
    levels = [
        record.levelno for record in caplog.records if "could not be renewed" in record.message
    ]
    assert levels == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    assert await held.value() == first
    error[0] = tinkex.AuthenticationError("revoked")
    now[0] += 1000 - NO_HOPE + 1
    armed = held._timer
    held.renew_in_background()
    await ended(held)
    assert held._timer is armed  # there is no next attempt
    error.clear()
    now[0] += NO_HOPE
    await held.value()
    assert 449 < due_in(held) < 551  # until a request had to renew it


@pytest.mark.covers("U26")
async def test_old_tokens_are_used_until_they_expire_and_never_after() -> None:
    now, error = [1000.0], list[tinkex.TinkerError]()

    async def exchange() -> str:
        if error:
            raise error[0]
        return token(now[0] + 1000)

    held = Token(exchange, lambda: now[0])
    first = await held.value()
    error.append(tinkex.APIConnectionError("down"))
    now[0] = 1990.0
    assert await held.value() == first
    error[0] = tinkex.AuthenticationError("revoked")
    with pytest.raises(tinkex.AuthenticationError):
        await held.value()
    error[0] = tinkex.APIConnectionError("down")
    now[0] = 2000.0
    with pytest.raises(tinkex.APIConnectionError):
        await held.value()
    with pytest.raises(tinkex.APIConnectionError):
        await Token(exchange).value()


@pytest.mark.covers("U26")
async def test_expired_tokens_from_the_server_are_refused() -> None:
    async def exchange() -> str:
        return token(1000.0, iat=0)

    with pytest.raises(tinkex.TinkerError, match="expired 5 s ago"):
        await Token(exchange, lambda: 1005.0).value()


@pytest.mark.covers("U26")
@pytest.mark.parametrize("place", ["argument", "command"])
@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [(token(1e9), tinkex.TinkerError, "expired"), ("eyJunk", ValueError, "cannot be read")],
    ids=["expired", "malformed"],
)
def test_unusable_tokens_given_as_key_raise_without_a_request(
    monkeypatch: pytest.MonkeyPatch, place: str, key: str, kind: type[Exception], words: str
) -> None:
    if place == "command":
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {key}")
    with faulty_server() as server:
        given = {"api_key": key} if place == "argument" else {}
        for _ in range(2):
            with (
                ServiceClient(base_url=server.base_url, **given) as service,  # type: ignore[arg-type]
                pytest.raises(kind, match=words),
            ):
                service.create_sampling_client(base_model="m").result()
        assert server.seen == []


def test_token_given_as_key_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_server() as server:
        with ServiceClient(base_url=server.base_url, api_key=token(4e9)) as service:
            service.get_server_capabilities()
        assert {seen.headers["x-api-key"] for seen in server.seen} == {token(4e9)}


# ── rejected tokens ──────────────────────────────────────────────────────────────────────────────


MARKED = Answer(
    401, {"detail": "no"}, headers={"WWW-Authenticate": 'Bearer realm="x", error="invalid_token"'}
)
UNMARKED = Answer(401, {"detail": "no"}, headers={"WWW-Authenticate": "Bearer"})


class Gate:
    """A server that wants tokens and accepts the latest one alone."""

    def __init__(self, server: FaultyServer) -> None:
        self.server = server
        self.given: list[str] = []
        self.rejects: Answer = MARKED
        self.is_shut = False
        server.script("client/config", Answer(body={"pjwt_auth_enabled": True}))
        server.script("auth/token", self.exchange)

    def exchange(self, seen: Seen) -> Answer:
        now = time.time()
        self.given.append(token(now + 1000, iat=now, n=len(self.given)))
        return Answer(body={"jwt": self.given[-1]}, delay=0.05)

    def rotate(self) -> None:
        """Accept no token that was given out so far."""
        self.given.append("none")

    def guard(self, path: str, answer: Answer) -> None:
        """Answer a path if the token is accepted."""

        def check(seen: Seen) -> Answer:
            accepted = not self.is_shut and seen.headers["x-api-key"] == self.given[-1]
            return answer if accepted else self.rejects

        self.server.script(path, check)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with faulty_server() as server:
        yield Gate(server)


@pytest.fixture
def guarded(gate: Gate) -> Iterator[ServiceClient]:
    """A client whose token is no longer accepted."""
    gate.guard("copy_weights", Answer(body={"tinker_path": "tinker://new/weights/x"}))
    with ServiceClient(base_url=gate.server.base_url, api_key="tml-raw", project_id="p") as service:
        service.get_server_capabilities()
        gate.rotate()
        yield service


PATH = "tinker://run/weights/x"


@pytest.mark.covers("U25")
def test_all_rejected_requests_share_one_renewed_token(gate: Gate, guarded: ServiceClient) -> None:
    gate.rejects = replace(MARKED, until=lambda: len(gate.server.requests("copy_weights")) >= 6)
    futures = [guarded.copy_weights(PATH) for _ in range(6)]
    assert [future.result(10) for future in futures] == ["tinker://new/weights/x"] * 6
    assert len(gate.server.requests("auth/token")) == 2
    sent = gate.server.requests("copy_weights")
    assert len(sent) == 12
    by_key: dict[str, list[Seen]] = {}
    for seen in sent:
        by_key.setdefault(seen.headers["x-idempotency-key"], []).append(seen)
    assert len(by_key) == 6
    for first, second in by_key.values():
        assert first.headers["x-api-key"] == gate.given[0]
        assert second.headers["x-api-key"] == gate.given[-1]
        assert (
            first.headers["x-stainless-retry-count"]
            == second.headers["x-stainless-retry-count"]
            == "0"
        )
        assert first.body == second.body
    assert guarded.copy_weights(PATH).result(10)
    assert len(gate.server.requests("copy_weights")) == 13


@pytest.mark.covers("U25")
def test_second_rejection_raises(gate: Gate, guarded: ServiceClient) -> None:
    gate.is_shut = True
    with pytest.raises(tinkex.AuthenticationError):
        guarded.copy_weights(PATH).result(10)
    assert len(gate.server.requests("copy_weights")) == 2
    assert len(gate.server.requests("auth/token")) == 2


@pytest.mark.covers("U25")
def test_rejection_that_does_not_name_the_token_is_not_replayed(
    gate: Gate, guarded: ServiceClient
) -> None:
    gate.rejects = UNMARKED
    with pytest.raises(tinkex.AuthenticationError):
        guarded.copy_weights(PATH).result(10)
    assert len(gate.server.requests("copy_weights")) == 1
    assert len(gate.server.requests("auth/token")) == 1


@pytest.mark.covers("U25")
def test_rejected_keys_are_not_replayed() -> None:
    with faulty_server() as server:
        server.script("copy_weights", MARKED)
        service = ServiceClient(base_url=server.base_url, api_key="tml-raw", project_id="p")
        with service, pytest.raises(tinkex.AuthenticationError):
            service.copy_weights(PATH).result(10)
        assert len(server.requests("copy_weights")) == 1
        assert server.requests("auth/token") == []


@pytest.mark.covers("U25")
def test_exchange_that_fails_gives_its_own_error(gate: Gate, guarded: ServiceClient) -> None:
    gate.server.script("auth/token", Answer(403, {"detail": "this key may do nothing"}))
    with pytest.raises(tinkex.PermissionDeniedError, match="may do nothing"):
        guarded.copy_weights(PATH).result(10)
    assert len(gate.server.requests("copy_weights")) == 1
    with pytest.raises(tinkex.PermissionDeniedError):
        guarded.copy_weights(PATH).result(10)
    assert len(gate.server.requests("copy_weights")) == 1  # a rejected token is not sent again


@pytest.mark.covers("U25")
def test_retries_keep_their_count_and_take_a_new_token_along(
    gate: Gate, guarded: ServiceClient
) -> None:
    """The token expires between two attempts: the count goes on after the replay."""
    accepted = Answer(body={"tinker_path": "tinker://new/weights/x"})
    gate.server.script("copy_weights", Answer(503), MARKED, Answer(503), accepted)
    assert guarded.copy_weights(PATH).result(10)
    sent = gate.server.requests("copy_weights")
    assert [seen.headers["x-stainless-retry-count"] for seen in sent] == ["0", "1", "1", "2"]
    assert [seen.headers["x-api-key"] for seen in sent] == [gate.given[0]] * 2 + [
        gate.given[-1]
    ] * 2
    assert len({seen.headers["x-idempotency-key"] for seen in sent}) == 1


@pytest.mark.covers("U25")
def test_polls_and_streams_are_replayed_too(gate: Gate, guarded: ServiceClient) -> None:
    server = gate.server
    server.script("create_sampling_session", Answer(body={"sampling_session_id": "x"}))
    sampler = guarded.create_sampling_client(base_model="m").result()
    server.script("asample", Answer(body={"request_id": "r"}))
    done = codec.encode(
        SampleResponse([SampledSequence("length", tokens_np=np.array([7], np.int32))])
    )
    gate.guard("retrieve_future", Answer(body=done.data, content_type=codec.PROTOBUF))
    prompt, params = tinkex.ModelInput.from_ints([1]), tinkex.SamplingParams(max_tokens=1)
    assert sampler.sample(prompt, 1, params).result(10).sequences[0].tokens == [7]
    assert len(server.requests("retrieve_future")) == 2
    gate.rotate()
    event = b'data: {"index": 0, "token_id": 7, "is_done": true, "finish_reason": "length"}\n\n'
    gate.guard(protocol.STREAM_SAMPLE.path, Answer(body=event, content_type="text/event-stream"))
    assert [chunk.token_id for chunk in sampler.sample_stream(prompt, params)] == [7]
    assert len(server.requests(protocol.STREAM_SAMPLE.path)) == 2
    assert len(server.requests("auth/token")) == 3


@pytest.mark.parametrize(
    ("header", "is_one"),
    [
        ('Bearer error="invalid_token"', True),
        ('Bearer realm="a", error = invalid_token', True),
        ('Bearer error="invalid_request"', False),
        ('Bearer error="invalid_tokens"', False),
        ("Bearer", False),
    ],
)
def test_marks_of_rejected_tokens_are_read(header: str, is_one: bool) -> None:
    assert rejects_token({"www-authenticate": header}) is is_one
    assert not rejects_token({})


@pytest.mark.covers("U26")
def test_tokens_are_renewed_without_any_request(gate: Gate) -> None:
    def short(seen: Seen) -> Answer:
        now = time.time()
        return Answer(body={"jwt": token(now + 3.0, iat=now)})

    gate.server.script("auth/token", short)
    with ServiceClient(base_url=gate.server.base_url, api_key="tml-raw") as service:
        service.get_server_capabilities()
        wait_until(lambda: len(gate.server.requests("auth/token")) >= 3)
    times = [seen.when for seen in gate.server.requests("auth/token")]
    assert all(1.3 < later - earlier < 2.9 for earlier, later in itertools.pairwise(times))
    count = len(times)
    time.sleep(1.8)
    assert len(gate.server.requests("auth/token")) == count  # not after close


@pytest.mark.parametrize("text", ["", "eyJ", "a.b.c", "a.bnVsbA.c"])
def test_malformed_token_is_a_clear_error(text: str) -> None:
    with pytest.raises(tinkex.TinkerError, match="cannot be read"):
        claims(text)


# ── on the way ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C04", "D14", "24.code.21")
def test_proxy_is_really_used() -> None:
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
        assert [seen.headers["host"] for seen in proxy.seen] == ["tinker.invalid:81"] * 2 + [
            "bucket.invalid"
        ]
        assert {seen.headers["x-proxy-pass"] for seen in proxy.seen} == {"sesame"}
        assert "x-api-key" not in proxy.seen[-1].headers


@pytest.mark.covers("C04", "24.code.21")
def test_tunnel_is_asked_for_without_the_key() -> None:
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
    with (
        faulty_server() as server,
        ServiceClient(base_url=server.base_url, api_key="tml-sesame") as service,
    ):
        service.get_server_capabilities()
    assert "X-API-Key" in caplog.text
    assert "[REDACTED]" in caplog.text
    assert "sesame" not in caplog.text


def test_retries_can_be_counted() -> None:
    configure(max_retries=1)
    with faulty_server() as server:
        server.script("get_server_capabilities", *[Answer(503) for _ in range(5)])
        with (
            ServiceClient(base_url=server.base_url) as service,
            pytest.raises(tinkex.InternalServerError) as caught,
        ):
            service.get_server_capabilities()
        assert caught.value.attempts == 2


@pytest.mark.covers("4.1/4")
def test_breaker_opens_for_its_endpoint_alone() -> None:
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


# ── auth ──────────────────────────────────────────────────────────────────────────────────────────


def test_auth_status_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert (
                service.copy_weights("tinker://a/weights/b").result(10) == "tinker://new/weights/x"
            )
            assert server.requests("copy_weights")[0].json["destination_project_id"] == "p"
            client = service.create_lora_training_client("m").result()
            assert service.get_console_url().endswith("/sessions/s")
            assert client.get_console_url().endswith("/training_runs/s%3Atrain%3A0")
            server.script("save_weights_external", Answer(body={"request_id": "r"}))
            server.script(
                "retrieve_future", Answer(body={"path": "tinker://s:train:0/external_weights/e"})
            )
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
