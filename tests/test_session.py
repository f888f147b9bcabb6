"""Sessions: how they are opened, kept alive, kept informed, and found again."""

from __future__ import annotations

import gc
import itertools
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
import tinkex.client.session
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import Clock, settled, wait_until
from tinkex import ServiceClient
from tinkex.client.futures.api_future import start
from tinkex.client.http.exchange import HttpRequest, Reply
from tinkex.client.http.http_exchange import HttpExchange
from tinkex.client.session import Session, shadow_of
from tinkex.client.settings.config import Config

KEY = "tml-very-secret"


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        server.script("client/dynamic_config", Answer(body={}))
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
        yield server


@pytest.fixture
def configured() -> Iterator[Callable[..., None]]:
    """Sets program defaults that are forgotten afterwards."""
    yield tinkex.configure
    tinkex.configure()


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come quickly."""
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_SECONDS", 0.05)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time as a session sees it."""
    made = Clock()
    monkeypatch.setattr("tinkex.client.session.time", made)
    return made


def beats(faulty: FaultyServer, session_id: str | None = None) -> list[Seen]:
    """The heartbeats so far, of one session or of all."""
    seen = faulty.requests("session_heartbeat")
    return [beat for beat in seen if session_id in (None, beat.json["session_id"])]


def opened(faulty: FaultyServer, **options: Any) -> ServiceClient:
    service = ServiceClient(base_url=faulty.base_url, **options)
    service.get_server_capabilities()
    return service


# ── opening ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C29", "24.session.1")
def test_session_reports_its_client(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TAGS", "one, two")
    metadata = {"team": "red"}
    with opened(
        faulty, api_key=KEY, project_id="p-7", display_name="my run", user_metadata=metadata
    ) as service:
        assert service.holder.session_id == "s"
    (created,) = faulty.requests("create_session")
    tags = created.json["tags"]
    assert set(tags) >= {"one", "two"}
    assert created.json == {
        "tags": tags,
        "user_metadata": metadata,
        "sdk_version": "0.38.0",
        "project_id": "p-7",
        "display_name": "my run",
        "type": "create_session",
    }
    assert created.headers["x-api-key"] == KEY


@pytest.mark.covers("C29")
@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (Answer(body={}), "session_id"),
        (Answer(body={"session_id": 5}), "session_id"),
        (Answer(body=b"<html>", content_type="text/html"), "create_session"),
    ],
    ids=["nothing", "number", "page"],
)
def test_answer_that_is_no_session_is_an_error(
    faulty: FaultyServer, answer: Answer, word: str
) -> None:
    faulty.script("create_session", answer)
    service = ServiceClient(base_url=faulty.base_url)
    with pytest.raises(tinkex.APIResponseValidationError, match=word) as caught:
        service.get_server_capabilities()
    assert "create_session at 127.0.0.1" in str(caught.value)
    service.close().result(5)


@pytest.mark.covers("C29", "C33")
def test_failed_session_start_is_retried_by_the_next_call(faulty: FaultyServer) -> None:
    faulty.script(
        "create_session", Answer(403, {"detail": "not you"}), Answer(body={"session_id": "s"})
    )
    with ServiceClient(base_url=faulty.base_url) as service:
        with pytest.raises(tinkex.PermissionDeniedError, match="not you"):
            service.get_server_capabilities()
        assert service.holder.session_id == ""
        assert service.get_server_capabilities().supported_models == []
    assert len(faulty.requests("sessions/s/finish")) == 1


@pytest.mark.covers("C29")
def test_messages_of_the_server_are_logged(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told = {"info_message": "hello", "warning_message": "old client", "error_message": "quota gone"}
    faulty.script("create_session", Answer(body={"session_id": "s", **told}))
    opened(faulty).close().result(5)
    levels = {record.message: record.levelno for record in caplog.records}
    assert levels["hello"] == logging.INFO
    assert levels["old client"] == logging.WARNING
    assert levels["quota gone"] == logging.ERROR


@pytest.mark.covers("24.session.6")
def test_slow_answer_within_the_timeout_opens_the_session(
    faulty: FaultyServer, configured: Callable[..., None]
) -> None:
    configured(timeout=20.0)
    faulty.script("create_session", Answer(body={"session_id": "s"}, delay=0.5))
    with opened(faulty) as service:
        assert service.holder.session_id == "s"
    assert len(faulty.requests("create_session")) == 1


@pytest.mark.covers("D32", "C29")
@pytest.mark.parametrize("path", ["client/config", "create_session"])
def test_silent_server_times_out(
    faulty: FaultyServer, configured: Callable[..., None], path: str
) -> None:
    """Whatever patience later calls have: a request's time and that of its retries bound each step
    of opening."""
    first = 0.2 if path == "client/config" else 20.0
    configured(timeout=0.3, patience=300.0, first_contact_patience=first)
    faulty.script(path, Answer(delay=30))
    service = ServiceClient(base_url=faulty.base_url)
    began = time.monotonic()
    with pytest.raises(tinkex.APITimeoutError) as caught:
        service.get_server_capabilities()
    assert time.monotonic() - began < 20
    text = str(caught.value)
    assert path.replace("/", "_") in text
    assert "no answer within 0.3 s" in text
    assert faulty.base_url.removeprefix("http://") in text
    service.close().result(5)


@pytest.mark.covers("D32")
@pytest.mark.parametrize(
    ("path", "config"),
    [("create_session", {}), ("auth/token", {"pjwt_auth_enabled": True})],
    ids=["create_session", "token"],
)
def test_failing_server_times_out(
    faulty: FaultyServer,
    configured: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    config: dict[str, Any],
) -> None:
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.05)
    configured(timeout=1.0, patience=300.0)
    faulty.script("client/config", Answer(body=config))
    faulty.script(path, Answer(503, {"detail": "starting up"}))
    service = ServiceClient(base_url=faulty.base_url, api_key=KEY)
    began = time.monotonic()
    with pytest.raises(tinkex.InternalServerError, match="starting up"):
        service.get_server_capabilities()
    assert time.monotonic() - began < 30
    assert len(faulty.requests(path)) >= 2
    service.close().result(5)


# ── heartbeats ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C30")
def test_times_of_heartbeats() -> None:
    assert tinkex.client.session.HEARTBEAT_SECONDS == 10.0
    assert tinkex.client.session.HEARTBEAT_TIMEOUT == 10.0
    assert tinkex.client.session.SILENCE_SECONDS == 120.0


@pytest.mark.covers("C30", "D23")
def test_heartbeats_come_at_their_time_and_name_their_session(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_SECONDS", 0.2)
    with opened(faulty):
        wait_until(lambda: len(beats(faulty)) >= 3)
    created = faulty.requests("create_session")[0].when
    times = [created, *(beat.when for beat in beats(faulty))]
    assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(times))
    assert beats(faulty)[0].json == {"session_id": "s", "type": "session_heartbeat"}


@pytest.mark.covers("24.session.7")
@pytest.mark.parametrize("status", [503, 429, 402])
def test_heartbeat_ignores_configured_timeout_and_retries(
    faulty: FaultyServer,
    configured: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.001)
    configured(timeout=77.0, max_retries=9, patience=300.0)
    faulty.script("session_heartbeat", Answer(status, {"detail": "not now"}))
    with opened(faulty):
        wait_until(lambda: len(beats(faulty)) >= 3)
    seen = beats(faulty)
    assert {
        (beat.headers["x-stainless-read-timeout"], beat.headers["x-stainless-retry-count"])
        for beat in seen
    } == {("10", "0")}
    assert all(b.when - a.when >= 0.19 for a, b in itertools.pairwise(seen))


@pytest.mark.covers("C30", "24.session.3", "4.2/2")
@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize(
    "failure",
    [
        Answer(401, {"detail": "who?"}),
        Answer(403),
        Answer(404, {"detail": "no such session"}),
        Answer(422),
        Answer(500),
        Answer(503),
        Answer(drop=True),
        Answer(delay=0.5),
        Answer(body=b"[1", cut=1),
    ],
    ids=["401", "403", "404", "422", "500", "503", "dropped", "late", "cut"],
)
def test_heartbeats_go_on_through_every_failure(
    faulty: FaultyServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    failure: Answer,
) -> None:
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_TIMEOUT", 0.2 if failure.delay else 10.0)
    caplog.set_level(logging.WARNING)
    faulty.script("session_heartbeat", failure, failure, failure, Answer(body={}))
    with opened(faulty) as service:
        wait_until(lambda: len(beats(faulty)) >= 5)
        assert service.get_server_capabilities().supported_models == []
    assert caplog.text == ""  # two minutes have not passed


@pytest.mark.covers("C30")
@pytest.mark.usefixtures("lively")
def test_heartbeats_survive_unexpected_errors(
    faulty: FaultyServer, configured: Callable[..., None]
) -> None:
    class Odd(HttpExchange):
        """Exchanges of which those of heartbeats raise what they should not, twice."""

        left = 2

        async def send(self, request: HttpRequest) -> Reply:
            if request.path.endswith("session_heartbeat") and self.left:
                self.left -= 1
                raise ZeroDivisionError("odd")
            return await super().send(request)

    configured(http_client=lambda config: Odd(config.base_url))
    with opened(faulty):
        wait_until(lambda: len(beats(faulty)) >= 2)


@pytest.mark.covers("C30", "24.session.2", "4.2/2")
@pytest.mark.usefixtures("lively")
def test_failing_heartbeats_are_logged_with_a_reason(
    faulty: FaultyServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    faulty.script("session_heartbeat", Answer(401, {"detail": "who are you"}))
    with opened(faulty):
        wait_until(lambda: len(beats(faulty)) >= 3)
        assert caplog.text == ""
        clock.ahead = 121.0
        wait_until(lambda: len(caplog.records) >= 2)
        told = [record.getMessage() for record in caplog.records]
        assert all("Heartbeat has failed" in text and "session s" in text for text in told)
        assert all("401" in text and "who are you" in text for text in told)
        faulty.script("session_heartbeat", Answer(body={}))
        count = len(beats(faulty))
        wait_until(lambda: len(beats(faulty)) >= count + 2)
        caplog.clear()
        faulty.script("session_heartbeat", Answer(500))
        count = len(beats(faulty))
        wait_until(lambda: len(beats(faulty)) >= count + 2)
        assert caplog.text == ""  # it was heard in between: the time counts anew


@pytest.mark.covers("C30")
@pytest.mark.usefixtures("lively")
def test_heartbeats_of_a_gone_session_stop_silently(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.session.SILENCE_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    faulty.script("session_heartbeat", Answer(body={}), Answer(410, {"detail": "finished"}))
    with opened(faulty):
        wait_until(lambda: len(beats(faulty)) == 2)
        time.sleep(0.3)
        assert len(beats(faulty)) == 2
    assert caplog.text == ""


@pytest.mark.covers("C31", "24.session.5")
@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("allowed", [0, 2])
def test_heartbeats_stop_after_repeated_failures(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture, allowed: int
) -> None:
    caplog.set_level(logging.WARNING)
    faulty.script("session_heartbeat", Answer(500, {"detail": "on fire"}))
    with ServiceClient(base_url=faulty.base_url) as service:
        service.holder.max_failure_count = allowed
        service.get_server_capabilities()
        wait_until(lambda: "given up" in caplog.text)
        time.sleep(0.3)
        assert len(beats(faulty)) == allowed + 1
        assert "session s" in caplog.text
        assert "on fire" in caplog.text
        # only the heartbeats have ended
        assert service.get_server_capabilities().supported_models == []
    assert faulty.requests("sessions/s/finish")


@pytest.mark.covers("C31")
@pytest.mark.usefixtures("lively")
def test_only_failures_in_a_row_count(faulty: FaultyServer) -> None:
    good, bad = Answer(body={}), Answer(500)
    faulty.script("session_heartbeat", bad, good, bad, good, bad, bad)
    with ServiceClient(base_url=faulty.base_url) as service:
        service.holder.max_failure_count = 1
        service.get_server_capabilities()
        wait_until(lambda: len(beats(faulty)) == 6)
        time.sleep(0.3)
        assert len(beats(faulty)) == 6


@pytest.mark.covers("C31", "24.code.12")
@pytest.mark.usefixtures("lively")
def test_heartbeats_stop_after_a_time(
    faulty: FaultyServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with ServiceClient(base_url=faulty.base_url) as service:
        service.holder.max_failure_duration = 60.0
        service.get_server_capabilities()
        wait_until(lambda: beats(faulty))
        clock.ahead, count = 100.0, len(beats(faulty))
        wait_until(lambda: len(beats(faulty)) >= count + 3)
        faulty.script("session_heartbeat", Answer(500))
        count = len(beats(faulty))
        wait_until(lambda: len(beats(faulty)) >= count + 3)
        assert caplog.text == ""  # counted from the last that was heard
        clock.ahead = 161.0
        wait_until(lambda: "given up" in caplog.text)
        settled(lambda: len(beats(faulty)))


@pytest.mark.covers("C31")
def test_limit_is_off_by_default() -> None:
    session = Session(Config.resolve(base_url="http://127.0.0.1:1"))
    assert session.max_failure_count == session.max_failure_duration == float("inf")


@pytest.mark.covers("D11")
@pytest.mark.usefixtures("lively")
def test_slow_heartbeat_delays_no_other(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_TIMEOUT", 60)
    opened_so_far, release = iter(range(10)), threading.Event()
    faulty.script(
        "create_session", lambda _: Answer(body={"session_id": f"s{next(opened_so_far)}"})
    )
    faulty.script("sessions/s0/finish", Answer())
    faulty.script("sessions/s1/finish", Answer())
    faulty.script(
        "session_heartbeat",
        lambda seen: Answer(
            body={}, until=release.is_set if seen.json["session_id"] == "s0" else None
        ),
    )
    with opened(faulty) as slow, opened(faulty) as quick:
        assert (slow.holder.session_id, quick.holder.session_id) == ("s0", "s1")
        wait_until(lambda: beats(faulty, "s0"))
        count = len(beats(faulty, "s1"))
        wait_until(lambda: len(beats(faulty, "s1")) >= count + 8)
        assert len(beats(faulty, "s0")) == 1
        release.set()


@pytest.mark.covers("C32")
@pytest.mark.usefixtures("lively")
def test_closing_ends_heartbeats(faulty: FaultyServer) -> None:
    service = opened(faulty)
    wait_until(lambda: len(beats(faulty)) >= 2)
    service.close().result(5)
    settled(lambda: len(beats(faulty)))


# ── sessions found again ──────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.code.12")
@pytest.mark.usefixtures("lively")
def test_session_is_found_again_by_its_copies_and_kept_alive_by_them(
    faulty: FaultyServer,
) -> None:
    """The client that opened it is gone without a word; one shadow beats for both copies, and does
    not end it."""
    service = ServiceClient(base_url=faulty.base_url)
    pickled = pickle.dumps(service.create_sampling_client(base_model="m").result())
    del service
    gc.collect()
    time.sleep(0.15)
    before = len(beats(faulty))
    first, second = pickle.loads(pickled), pickle.loads(pickled)
    assert first.holder is second.holder
    assert first.holder.session_id == "s"
    assert first.get_base_model() == second.get_base_model() == "m"
    assert faulty.requests("samplers/s:sample:0") == []
    start(first.holder.opened()).result(5)
    wait_until(lambda: len(beats(faulty)) >= before + 2)
    assert {beat.json["session_id"] for beat in beats(faulty)} == {"s"}
    assert len(faulty.requests("create_session")) == 1
    first.holder.call(first.holder.finish, "success", None).result(5)
    assert faulty.requests("sessions/s/finish") == []
    assert pickle.loads(pickled).holder is not first.holder  # what is closed is not found again
    del first, second
    gc.collect()


def test_shadow_sessions_differ_by_server_and_key() -> None:
    here = Config.resolve(base_url="http://127.0.0.1:1", api_key="tml-a")
    others = [
        Config.resolve(base_url="http://127.0.0.1:1", api_key="tml-b"),
        Config.resolve(base_url="http://127.0.0.1:2", api_key="tml-a"),
    ]
    shadow = shadow_of(here, "s")
    assert shadow_of(here, "s") is shadow
    assert shadow not in [shadow_of(here, "t"), *(shadow_of(other, "s") for other in others)]


# ── the configuration that changes ────────────────────────────────────────────────────────────────


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest time between two looks at the configuration is short."""
    monkeypatch.setattr("tinkex.client.session.SHORTEST_REFRESH", 0.05)


def test_configuration_is_fetched_before_the_session_is_made(faulty: FaultyServer) -> None:
    faulty.script(
        "client/dynamic_config", Answer(body={"sample_cancel_enabled": True, "unheard_of": 1})
    )
    with opened(faulty) as service:
        assert service.holder.dynamic_config.sample_cancel_enabled
        assert service.holder.dynamic_config.refresh_interval_sec == 300
    paths = [seen.path for seen in faulty.seen]
    assert paths[:3] == ["client/config", "client/dynamic_config", "create_session"]
    hello = faulty.requests("client/dynamic_config")[0]
    assert hello.json == {"sdk_version": "0.38.0"}
    assert hello.headers["x-stainless-read-timeout"] == "10"


@pytest.mark.parametrize(
    "answer", [Answer(404), Answer(500), Answer(drop=True), Answer(body=b"nonsense")]
)
def test_server_without_a_changing_configuration_is_no_problem(
    faulty: FaultyServer, answer: Answer
) -> None:
    faulty.script("client/dynamic_config", answer)
    with opened(faulty) as service:
        assert not service.holder.dynamic_config.sample_cancel_enabled
    assert len(faulty.requests("client/dynamic_config")) == 1


@pytest.mark.usefixtures("eager")
def test_configuration_is_refreshed_and_failures_keep_the_last(faulty: FaultyServer) -> None:
    new = {"refresh_interval_sec": 0, "sample_cancel_enabled": True}
    failures = [Answer(500), Answer(drop=True), Answer(body=b"nonsense"), Answer(404)]
    faulty.script(
        "client/dynamic_config",
        Answer(body={"refresh_interval_sec": 0}),
        Answer(body=new),
        *failures,
        Answer(body={"refresh_interval_sec": 0, "sample_cancel_max_batch_size": 3}),
    )

    def asked() -> int:
        return len(faulty.requests("client/dynamic_config"))

    with opened(faulty) as service:
        holder = service.holder
        for count in (3, 4, 5, 6):
            wait_until(lambda count=count: asked() >= count)  # type: ignore[misc]
            assert holder.dynamic_config.sample_cancel_enabled or asked() > 6
        wait_until(lambda: holder.dynamic_config.sample_cancel_max_batch_size == 3)
    times = [seen.when for seen in faulty.requests("client/dynamic_config")]
    assert all(later - earlier >= 0.045 for earlier, later in itertools.pairwise(times))


def test_configuration_is_not_asked_for_more_often_than_every_ten_seconds() -> None:
    assert tinkex.client.session.SHORTEST_REFRESH == 10.0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", ["closed", "dropped"])
def test_configuration_is_asked_for_no_longer_when_the_session_is(
    faulty: FaultyServer, way: str
) -> None:
    faulty.script("client/dynamic_config", Answer(body={"refresh_interval_sec": 0}))
    service = opened(faulty)
    wait_until(lambda: len(faulty.requests("client/dynamic_config")) >= 3)
    if way == "closed":
        service.close().result(5)
    del service
    gc.collect()
    settled(lambda: len(faulty.requests("client/dynamic_config")))


@pytest.mark.covers("W16")
def test_periodic_work_does_not_keep_a_session_alive(faulty: FaultyServer) -> None:
    """The next beat is seconds away, the next look at the configuration minutes."""
    service = opened(faulty)
    assert service.holder.dynamic_config.refresh_interval_sec == 300
    session = weakref.ref(service.holder)
    del service
    gc.collect()
    wait_until(lambda: session() is None, 8.0)
    wait_until(lambda: faulty.open_connections == 0, 8.0)
