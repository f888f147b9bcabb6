"""RestClient and AdminClient against a scripted server: what is sent, what comes of the answer,
what is refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import gc
import inspect
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from operation_examples import (
    ADDRESS,
    ADMIN_CASES,
    CASES,
    CHECKPOINT,
    NEW_YEAR,
    PATH,
    RUN,
    SEARCH,
    SPAN,
    SPAN_QUERY,
    TRAINING_RUN,
    WITHOUT_TWIN,
    Case,
)
from support import serving
from tinkex import AdminClient, RestClient, types
from tinkex.client.futures.api_future import AwaitableConcurrentFuture
from tinkex.client.http import exchange, retry
from tinkex.engine.fake import FakeEngine
from tinkex.wire.protocol import OPERATIONS

KEY = "tml-very-secret"


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[FaultyServer]:
    """A server of another origin."""
    with faulty_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(faulty: FaultyServer, elsewhere: FaultyServer) -> None:
    faulty.seen.clear()
    elsewhere.seen.clear()


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[RestClient]:
    with RestClient(base_url=faulty.base_url, api_key=KEY) as made:
        yield made


@pytest.fixture
def admin(faulty: FaultyServer) -> Iterator[AdminClient]:
    with AdminClient(base_url=faulty.base_url, api_key=KEY) as made:
        yield made


# ── every method: what is sent and what it gives ──────────────────────────────────────────────────


each = pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.name}-{'admin-' * case.admin}{n}" for n, case in enumerate(CASES)]
)


def expect(case: Case) -> Any:
    """The warning a call of a case gives, if any; others fail the test."""
    return pytest.warns(case.warns) if case.warns else contextlib.nullcontext()


def check(case: Case, seen: Seen, name: str) -> None:
    """The request is the case's, to the last header."""
    assert f"{seen.method} {seen.path}" == case.request
    assert (json.loads(seen.body) if seen.body else None) == case.body
    assert seen.headers["x-api-key"] == KEY
    assert seen.headers["x-sdk-version"] == "0.38.0"
    assert seen.headers["x-sdk-method"] == f"{'AdminClient' if case.admin else 'RestClient'}.{name}"
    assert seen.headers["accept"] == "application/json"
    if seen.method == "GET":
        assert not {"content-type", "x-idempotency-key"} & seen.headers.keys()
    else:
        assert seen.headers["content-type"] == "application/json"
        assert seen.headers["x-idempotency-key"]


@pytest.mark.covers("1.15/5", "C79", "24.rest.1", "24.rest.6", "24.rest.8", "W25", "U14", "U15")
@each
def test_each_method_and_its_twin(
    faulty: FaultyServer, client: RestClient, admin: AdminClient, case: Case
) -> None:
    user: Any = admin if case.admin else client
    faulty.script(case.request.split(" ", 1)[1], Answer(body=case.answer))
    with expect(case):
        future = getattr(user, case.name)(*case.args, **case.keywords)
    assert isinstance(future, AwaitableConcurrentFuture)
    assert future.result(10) == case.gives

    async def both() -> list[Any]:
        with expect(case):
            given = [await getattr(user, case.name)(*case.args, **case.keywords)]
        if case.name not in WITHOUT_TWIN:
            with pytest.warns(FutureWarning, match=f"{case.name}_async"):
                given.append(await getattr(user, f"{case.name}_async")(*case.args, **case.keywords))
        return given

    given = asyncio.run(both())
    assert given == [case.gives] * len(given)
    assert len(faulty.seen) == 1 + len(given)
    for seen, name in zip(faulty.seen, [case.name, case.name, f"{case.name}_async"], strict=False):
        check(case, seen, name)


UPLOADS = {"external_weights_upload_start", "external_weights_upload_finish"}


@pytest.mark.covers("C79", "W25")
def test_every_method_has_a_case_and_a_twin() -> None:
    # Those that came with 0.39 have no twin; tests/test_checkpoint_search.py calls them.
    apart = {
        "close",
        "get_telemetry",
        "holder",
        "search_checkpoints",
        "transport",
        *UPLOADS,
        "whoami",
        "with_raw_response",
    }
    for kind, cases in ((RestClient, CASES), (AdminClient, ADMIN_CASES)):
        names = {
            name for name in dir(kind) if not name.startswith("_") and not name.endswith("_async")
        } - apart
        assert names == {case.name for case in cases if case.admin is False}
        assert {
            name for name in names if not hasattr(kind, f"{name}_async")
        } == names & WITHOUT_TWIN


def test_every_rest_operation_has_a_case() -> None:
    """Paths of the table, filled in, cover what the cases ask for."""
    patterns = {op.name: re.compile(re.sub(r"\{\w+\}", "[^/]+", op.path)) for op in OPERATIONS}
    asked = {case.request.split(" ")[1].split("?")[0] for case in CASES}
    for path in asked:
        assert any(pattern.fullmatch(path) for pattern in patterns.values()), path


@pytest.mark.covers("C15")
def test_foreign_token_travels_as_a_header(faulty: FaultyServer, client: RestClient) -> None:
    faulty.script("copy_weights", Answer(503), Answer(body={"tinker_path": "t"}))
    client.copy_weights("a", "p", weights_access_token="tml-other").result(10)
    first, second = faulty.requests("copy_weights")
    assert first.headers["x-tinker-weights-access-token"] == "tml-other"
    assert b"tml-other" not in first.body
    assert re.fullmatch(r"[0-9a-f-]{36}", first.headers["x-idempotency-key"])
    assert first.headers["x-idempotency-key"] == second.headers["x-idempotency-key"]
    faulty.script("copy_weights", Answer(body={"tinker_path": "t"}))
    client.copy_weights("a", "p").result(10)
    assert "x-tinker-weights-access-token" not in faulty.requests("copy_weights")[-1].headers


def test_project_comes_from_the_environment(
    faulty: FaultyServer, client: RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.script("copy_weights", Answer(body={"tinker_path": "t"}))
    monkeypatch.setenv("TINKER_PROJECT_ID", "from-outside")
    assert client.copy_weights("a").result(10) == "t"
    assert faulty.seen[0].json["destination_project_id"] == "from-outside"


# ── what is refused here ──────────────────────────────────────────────────────────────────────────

BAD_PATHS = [
    "",
    "weights/1",
    "tinker://",
    "tinker://r/weights",
    "tinker://r/weights/a/b",
    "tinker://r/other/a",
]
BAD_PATHS += [
    "tinker://r/weights/..",
    "tinker://../weights/a",
    "tinker://r//a",
    "http://r/weights/a",
]
PATH_METHODS = [
    "delete_checkpoint",
    "delete_checkpoint_from_tinker_path",
    "get_checkpoint_archive_url",
    "get_checkpoint_archive_url_from_tinker_path",
    "get_external_weights_urls",
    "publish_checkpoint",
    "publish_checkpoint_from_tinker_path",
    "unpublish_checkpoint",
    "unpublish_checkpoint_from_tinker_path",
]
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    *((name, (path,), {}, "tinker:|id, got") for name in PATH_METHODS for path in BAD_PATHS),
    *(("get_training_run_by_tinker_path", (path,), {}, "tinker:|id, got") for path in BAD_PATHS),
    *(
        ("set_checkpoint_ttl_from_tinker_path", (path, 1), {}, "tinker:|id, got")
        for path in BAD_PATHS
    ),
    *(
        ("set_checkpoint_ttl_from_tinker_path", (PATH, ttl), {}, "ttl_seconds")
        for ttl in (0, -1, 1.5, True, "1")
    ),
    *(("copy_weights", ("a", "p"), {"ttl_seconds": ttl}, "ttl_seconds") for ttl in (0, -1, True)),
    ("copy_weights", ("a",), {}, "TINKER_PROJECT_ID"),
    ("copy_weights", ("a", ""), {}, "TINKER_PROJECT_ID"),
    *(
        ("delete_checkpoint", (RUN, bad), {}, "expected")
        for bad in ("0001", "other/1", "weights/", "weights/a/b", "")
    ),
    ("delete_checkpoint", ("", "weights/a"), {}, "training_run_id"),
    ("delete_checkpoint", (RUN,), {}, "expected"),
    ("get_external_weights_urls", (PATH,), {}, "external_weights"),
    *(
        (name, ("x", "mine"), {}, "owned, accessible")
        for name in ("get_training_run", "get_session")
    ),
    ("get_training_run_by_tinker_path", (PATH, "OWNED"), {}, "owned, accessible"),
    *(
        (name, (), {"access_scope": ""}, "owned, accessible")
        for name in ("list_training_runs", "list_sessions")
    ),
    *(
        (name, (bad, *more), {}, "must be an id")
        for name, more in {
            "get_training_run": (),
            "list_checkpoints": (),
            "get_session": (),
            "get_sampler": (),
            "export_session_trace": (),
            "assign_session_project": ("p",),
            "finish_session": (),
        }.items()
        for bad in ("", "..", None)
    ),
    *(
        ("get_checkpoint_archive_url", (PATH,), {"max_retries": n}, "max_retries")
        for n in (0, -1, True, 1.5)
    ),
    ("get_checkpoint_archive_url", (PATH,), {"retry_delay": -1}, "retry_delay"),
    ("finish_session", ("sess-1", "bored"), {}, "reason"),
]
REFUSED_ADMIN: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("get_audit_log", ("everything",), {}, "event_type"),
    ("get_audit_log", ("all", "2026-01-01"), {}, "day"),
    ("get_billing_usage", ("yesterday", "today"), {}, "starting_on"),
    ("get_billing_usage", ("2026-07-13T00:00:00Z", 5), {}, "ending_before"),
]


numbered = [f"{name}-{n}" for n, (name, *_) in enumerate([*REFUSED, *REFUSED_ADMIN])]


@pytest.mark.covers("1.15/5", "C80", "C82", "C83", "24.rest.4", "24.rest.5")
@pytest.mark.parametrize(
    ("name", "args", "keywords", "told"), [*REFUSED, *REFUSED_ADMIN], ids=numbered
)
def test_invalid_call_is_refused_before_sending(
    faulty: FaultyServer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.delenv("TINKER_PROJECT_ID", raising=False)
    kind = (
        RestClient
        if hasattr(RestClient, name) and (name, args, keywords, told) in REFUSED
        else AdminClient
    )
    user: Any = kind(base_url=faulty.base_url)
    with pytest.raises(ValueError, match=told):
        getattr(user, name)(*args, **keywords)
    if name not in WITHOUT_TWIN:
        with pytest.warns(FutureWarning, match=f"{name}_async"):
            call = getattr(user, f"{name}_async")(*args, **keywords)
        with pytest.raises(ValueError, match=told):
            asyncio.run(call)
    assert faulty.seen == []
    assert user._own is None


@pytest.mark.parametrize(
    "fields",
    [{"limit": 0}, {"limit": 201}, {"display_name": ""}, {"statuses": []}],
    ids=repr,
)
def test_searches_that_make_no_sense_cannot_be_written(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        types.SessionSearchRequest(**fields)
    with pytest.raises(ValueError, match=next(iter(fields))):
        types.SessionSearchRequest.model_validate(fields)


def test_parts_of_searches_are_checked() -> None:
    for urns in ([], ["u"] * 11):
        with pytest.raises(ValueError, match="1 to 10"):
            types.UserSearchOwner(owner_urns=urns)
    with pytest.raises(ValueError, match="reasons"):
        types.ClientFinishedSessionStatusQuery(reasons=[])
    with pytest.raises(ValueError, match="zone"):
        types.SessionSearchCursor(last_created_at=dt.datetime(2026, 1, 1), last_session_id="s")
    with pytest.raises(TypeError):
        types.SessionSearchRequest(surprise=1)  # type: ignore[call-arg]


# ── answers that need more than reading ───────────────────────────────────────────────────────────


@pytest.mark.covers("24.rest.7")
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (403, tinkex.PermissionDeniedError),
        (404, tinkex.NotFoundError),
        (409, tinkex.ConflictError),
        (401, tinkex.AuthenticationError),
    ],
)
def test_refusals_are_typed(
    faulty: FaultyServer,
    client: RestClient,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    kind: type[tinkex.APIStatusError],
) -> None:
    monkeypatch.setattr(retry, "CONFLICT_PATIENCE", 0.1)
    faulty.script(ADDRESS, Answer(status, {"detail": "no, because"}))
    with pytest.raises(kind, match="no, because") as caught:
        client.delete_checkpoint_from_tinker_path(PATH).result(10)
    assert caught.value.status_code == status
    with pytest.raises(kind):
        asyncio.run(client.delete_checkpoint_from_tinker_path(PATH).coroutine())


def test_passing_fault_is_tried_again(faulty: FaultyServer, client: RestClient) -> None:
    faulty.script(
        "sessions/s?access_scope=owned",
        Answer(503),
        Answer(body={"training_run_ids": ["r"], "sampler_ids": []}),
    )
    assert client.get_session("s").result(10).training_run_ids == ["r"]


def test_answer_that_is_something_else_is_named(faulty: FaultyServer, client: RestClient) -> None:
    faulty.script("sessions/s?access_scope=owned", Answer(body={"training_run_ids": 5}))
    with pytest.raises(tinkex.APIResponseValidationError, match="GetSessionResponse"):
        client.get_session("s").result(10)


@pytest.mark.covers("24.types.6")
@pytest.mark.parametrize("time", ["soon", "Fri, 02 Jan 2026 00:00:00 GMT", 5, None], ids=repr)
def test_invalid_time_is_refused_with_an_explanation(
    faulty: FaultyServer, client: RestClient, time: Any
) -> None:
    faulty.script(
        "training_runs/timeless", Answer(body={**TRAINING_RUN, "last_request_time": time})
    )
    with pytest.raises(
        tinkex.APIResponseValidationError, match=r"get_training_run at .*last_request_time"
    ):
        client.get_training_run("timeless").result(10)
    with pytest.raises(ValueError, match="time"):
        types.Checkpoint.model_validate({**CHECKPOINT, "time": time})


def test_billing_events_have_types(faulty: FaultyServer, admin: AdminClient) -> None:
    kinds: list[tuple[dict[str, Any], Any]] = [
        ({"type": "training", "token_count": 1}, types.TrainingBillingEvent(token_count=1)),
        (
            {"type": "sampling_prefill", "cached": True, "token_count": 2},
            types.SamplingPrefillBillingEvent(cached=True, token_count=2),
        ),
        (
            {"type": "sampling_sample", "token_count": 3},
            types.SamplingSampleBillingEvent(token_count=3),
        ),
        ({"type": "checkpoint", "count": 4}, types.CheckpointBillingEvent(count=4)),
        ({"type": "storage", "gigabyte_hours": 5}, types.StorageBillingEvent(gigabyte_hours=5.0)),
    ]
    hour = {"bucket_start": "2026-01-01T00:00:00Z", "bucket_end": "2026-01-01T01:00:00+00:00"}
    answer = {
        "data": [hour | {"event_info": info, "news": 1} for info, _ in kinds],
        "sessions": {"s": {"user_metadata": {"a": "b"}}},
        "cost_data_through": "2026-01-01T00:00:00",
    }
    faulty.script(f"billing/usage/events?{SPAN_QUERY}", Answer(body=answer))
    usage = admin.get_billing_usage(*SPAN).result(10)
    assert [event.event_info for event in usage.data] == [event for _, event in kinds]
    assert usage.data[0].bucket_start == NEW_YEAR == usage.cost_data_through
    assert usage.sessions["s"].user_metadata == {"a": "b"}
    assert types.BillingUsageResponse.model_validate_json(usage.model_dump_json()) == usage
    with pytest.raises(ValueError, match="training, sampling_prefill"):
        types.BillingUsageEvent.model_validate(hour | {"event_info": {"type": "news"}})


def test_session_states_differ(faulty: FaultyServer, client: RestClient) -> None:
    run = types.SessionFailedTrainingRunReason(training_run_id="r")
    states: list[Any] = [
        None,
        types.SessionActive(),
        types.SessionCancelled(detail="d"),
        types.ClientSessionFinished(reason=types.ClientSessionFinishErrored()),
        types.SessionFailed(category="user", reason=run, message="m"),
        types.SessionFailed(
            category="internal",
            reason=types.SessionFailedRequestReason(request_id="r", request_type="t"),
            message="m",
        ),
        types.SessionFailed(
            category="internal",
            reason=types.SessionFailedSamplingSessionReason(sampling_session_id="s"),
            message="m",
        ),
    ]
    summary = {
        "session_id": "s",
        "created_at": "2026-01-01T00:00:00Z",
        "owner": "o",
        "project_id": "p",
    }
    sessions = [
        summary | {"checkpoints_count": 1, "status": state and state.model_dump(mode="json")}
        for state in states
    ]
    cursor = {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "s"}
    faulty.script("sessions/search", Answer(body={"sessions": sessions, "next_cursor": cursor}))
    with pytest.warns(tinkex.ExperimentalWarning, match="search_sessions"):
        page = client.search_sessions(SEARCH).result(10)
    assert [session.status for session in page.sessions] == states
    with pytest.warns(tinkex.ExperimentalWarning):
        client.search_sessions(SEARCH.model_copy(update={"cursor": page.next_cursor})).result(10)
    assert faulty.seen[-1].json["cursor"] == cursor


def test_warnings_point_at_the_caller(client: RestClient, faulty: FaultyServer) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        faulty.script("audit?event_type=all", Answer(body={"entries": []}))
        faulty.script("sessions/search", Answer(body={"sessions": []}))
        client.get_audit_log().result(10)
        asyncio.run(client.get_audit_log_async())
        client.search_sessions(SEARCH).result(10)
    assert [Path(warning.filename).name for warning in caught[:2]] == [Path(__file__).name] * 2
    assert caught[-1].filename == __file__
    assert not hasattr(client, "search_sessions_async")
    assert "AdminClient.get_audit_log()" in str(caught[0].message)


def test_trace_is_waited_for(
    faulty: FaultyServer, client: RestClient, caplog: pytest.LogCaptureFixture
) -> None:
    pending, ready = (
        Answer(body={"status": "pending"}),
        Answer(body={"status": "ready", "url": "https://x"}),
    )
    faulty.script("sessions/s/trace_export", pending, pending, ready)
    with caplog.at_level(logging.WARNING, "tinkex"):
        assert client.export_session_trace("s", poll_seconds=0.01).result(10) == "https://x"
    assert len(faulty.seen) == 3
    assert caplog.text.count("being made") == 1
    faulty.script(
        "sessions/s/trace_export", pending, Answer(body={"status": "failed", "error": "no disk"})
    )
    with pytest.raises(RuntimeError, match="no disk"):
        asyncio.run(client.export_session_trace("s", poll_seconds=0.01).coroutine())
    faulty.script("sessions/s/trace_export", Answer(body={"status": "ready"}))
    with pytest.raises(tinkex.APIResponseValidationError, match="without a url"):
        client.export_session_trace("s").result(10)
    assert inspect.signature(client.export_session_trace).parameters["poll_seconds"].default == 5.0


# ── archives ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.14.1/1", "1.14.1/2", "C81", "24.rest.2", "24.rest.3")
def test_archive_being_packed_is_requested_again(faulty: FaultyServer, client: RestClient) -> None:
    packed = Answer(
        302,
        headers={"Location": "https://store/a?sig=%2F", "Expires": "Thu, 01 Jan 2026 00:00:00 GMT"},
    )
    faulty.script(f"{ADDRESS}/archive", Answer(503), Answer(503), packed)
    found = client.get_checkpoint_archive_url(PATH, max_retries=3, retry_delay=0.01).result(10)
    assert (found.url, found.expires) == ("https://store/a?sig=%2F", NEW_YEAR)
    assert [seen.headers["x-sdk-method"] for seen in faulty.seen] == [
        "RestClient.get_checkpoint_archive_url"
    ] * 3
    signature = inspect.signature(client.get_checkpoint_archive_url)
    assert [signature.parameters[name].default for name in ("max_retries", "retry_delay")] == [
        6,
        30.0,
    ]


@pytest.mark.covers("C81")
def test_archive_that_is_never_packed_is_an_error(faulty: FaultyServer, client: RestClient) -> None:
    faulty.script(f"{ADDRESS}/archive", Answer(503, {"detail": "packing"}))
    with pytest.raises(tinkex.InternalServerError, match="packing") as caught:
        client.get_checkpoint_archive_url(PATH, max_retries=2, retry_delay=0.01).result(10)
    assert caught.value.attempts == len(faulty.seen) == 2


@pytest.mark.covers("1.14.1/3", "C81")
@pytest.mark.parametrize(
    "answer", [Answer(500), Answer(429), Answer(404), Answer(409)], ids=lambda a: str(a.status)
)
def test_other_archive_errors_are_not_retried(
    faulty: FaultyServer, client: RestClient, answer: Answer
) -> None:
    faulty.script(f"{ADDRESS}/archive", answer)
    with pytest.raises(tinkex.APIError):
        client.get_checkpoint_archive_url(PATH, retry_delay=0.01).result(10)
    assert len(faulty.seen) == 1


@pytest.mark.covers("24.types.6")
@pytest.mark.parametrize("headers", [{}, {"Expires": "0"}, {"Expires": "soon"}], ids=repr)
def test_archive_address_without_an_expiry_is_good_for_a_while(
    faulty: FaultyServer, client: RestClient, headers: dict[str, str]
) -> None:
    faulty.script(
        f"{ADDRESS}/archive", Answer(302, headers={"Location": "/files/a.tar", **headers})
    )
    found = client.get_checkpoint_archive_url(PATH).result(10)
    assert found.url == f"{faulty.base_url}/files/a.tar"
    left = found.expires - dt.datetime.now(dt.UTC)
    assert dt.timedelta(minutes=14) < left <= dt.timedelta(minutes=15)


# ── redirects ─────────────────────────────────────────────────────────────────────────────────────

LOG = {"entries": [{"timestamp": "2026-01-01T00:00:00Z", "event": "e"}]}


@pytest.mark.covers("W04")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_key_is_never_sent_to_another_origin(
    faulty: FaultyServer, elsewhere: FaultyServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    target = "/bucket/log%2F1.json?X-Sig=a%2Bb%3D&x=y"
    faulty.script(
        "audit?event_type=all",
        Answer(status, headers={"Location": elsewhere.base_url + target + "#part"}),
    )
    elsewhere.script(target, Answer(body=LOG, content_type="application/octet-stream"))
    secrets = {
        "CF-Access-Client-Id": "gate",
        "CF-Access-Client-Secret": "hush",
        "Authorization": "Bearer x",
    }
    with tinkex.ServiceClient(
        base_url=faulty.base_url, api_key=KEY, default_headers_overrides=secrets
    ) as service:
        log = AdminClient(service._session).get_audit_log().result(10)
    assert log.entries[0].event == "e"
    [here], [there] = faulty.seen, elsewhere.seen
    assert here.headers["x-api-key"] == KEY
    assert here.headers["cf-access-client-secret"] == "hush"
    assert there.method == "GET"
    assert there.path == target
    assert not {"x-api-key", "authorization", "cookie"} & there.headers.keys()
    assert not [name for name in there.headers if name.startswith(("cf-", "x-"))]
    assert KEY not in repr(there)


def test_same_origin_keeps_the_key(faulty: FaultyServer, admin: AdminClient) -> None:
    faulty.script("audit?event_type=all", Answer(302, headers={"Location": "/api/v1/stored?x=1"}))
    faulty.script("stored?x=1", Answer(body=LOG))
    assert admin.get_audit_log().result(10).entries[0].timestamp == NEW_YEAR
    assert [seen.headers.get("x-api-key") for seen in faulty.seen] == [KEY, KEY]


@pytest.mark.covers("W04")
def test_key_does_not_come_back_by_a_detour(
    faulty: FaultyServer, elsewhere: FaultyServer, admin: AdminClient
) -> None:
    faulty.script(
        "audit?event_type=all", Answer(302, headers={"Location": f"{elsewhere.base_url}/there"})
    )
    elsewhere.script("/there", Answer(302, headers={"Location": f"{faulty.base_url}/back"}))
    faulty.script("/back", Answer(body=LOG))
    admin.get_audit_log().result(10)
    assert [seen.headers.get("x-api-key") for seen in faulty.seen] == [KEY, None]


def test_redirects_end(faulty: FaultyServer, admin: AdminClient) -> None:
    faulty.script(
        "audit?event_type=all", Answer(302, headers={"Location": "/api/v1/audit?event_type=all"})
    )
    with pytest.raises(tinkex.APIStatusError) as caught:
        admin.get_audit_log().result(10)
    assert caught.value.status_code == 302
    assert len(faulty.seen) == 1 + exchange.MOST_REDIRECTS


@pytest.mark.covers("24.code.4")
@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://x/y", "http://[", "http://x:port/", ""], ids=repr
)
def test_only_web_addresses_are_followed(
    faulty: FaultyServer, admin: AdminClient, location: str
) -> None:
    faulty.script(
        "audit?event_type=all", Answer(302, headers={"Location": location} if location else {})
    )
    with pytest.raises(tinkex.APIStatusError) as caught:
        admin.get_audit_log().result(10)
    assert caught.value.status_code == 302
    assert len(faulty.seen) == 1


def test_errors_of_the_other_place_name_it(
    faulty: FaultyServer, elsewhere: FaultyServer, admin: AdminClient
) -> None:
    other = elsewhere.base_url.replace("127.0.0.1", "localhost")
    faulty.script(
        "audit?event_type=all", Answer(302, headers={"Location": f"{other}/there?sig=secret"})
    )
    elsewhere.script("/there?sig=secret", Answer(403, {"detail": "expired"}))
    with pytest.raises(tinkex.PermissionDeniedError, match="at localhost: 403: expired") as caught:
        admin.get_audit_log().result(10)
    assert "sig=secret" not in str(caught.value)


@pytest.mark.covers("W04")
def test_only_reading_is_sent_on(
    faulty: FaultyServer, elsewhere: FaultyServer, client: RestClient
) -> None:
    for path in (ADDRESS, f"{ADDRESS}/publish", f"{ADDRESS}/ttl"):
        faulty.script(path, Answer(307, headers={"Location": f"{elsewhere.base_url}/there"}))
    for future in (
        client.delete_checkpoint(PATH),
        client.publish_checkpoint(PATH),
        client.unpublish_checkpoint(PATH),
        client.set_checkpoint_ttl_from_tinker_path(PATH, 5),
    ):
        with pytest.raises(tinkex.APIStatusError) as caught:
            future.result(10)
        assert caught.value.status_code == 307
    assert elsewhere.seen == []


# ── whoami ────────────────────────────────────────────────────────────────────────────────────────


def token(**claims: Any) -> str:
    return f"eyJh.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.sig"


CLAIMS = {"sub": "tml:user:1", "org_id": "o1", "exp": 4e9}


def test_server_token_identifies_its_user(faulty: FaultyServer, client: RestClient) -> None:
    faulty.script("client/config", Answer(body={"pjwt_auth_enabled": True}))
    faulty.script("auth/token", Answer(body={"jwt": token(**CLAIMS, email="")}))
    expected = types.WhoamiResponse(user_urn="tml:user:1", org_urn="tml:organization:o1")
    assert client.whoami().result(10) == expected
    assert [seen.path for seen in faulty.seen] == ["client/config", "auth/token"]
    assert faulty.seen[1].json == {}


def test_own_token_identifies_its_user(faulty: FaultyServer) -> None:
    with RestClient(
        base_url=faulty.base_url, api_key=token(**CLAIMS, email="a@b.c", iss="passport-x")
    ) as client:
        assert client.whoami().result(10).email == "a@b.c"
    assert faulty.seen == []


@pytest.mark.parametrize("key", [KEY, token(**CLAIMS, iss="someone")])
def test_plain_key_identifies_no_user(faulty: FaultyServer, key: str) -> None:
    faulty.script("client/config", Answer(body={}))
    with (
        RestClient(base_url=faulty.base_url, api_key=key) as client,
        pytest.raises(RuntimeError, match="token"),
    ):
        client.whoami().result(10)


def test_token_without_an_owner_is_an_error(faulty: FaultyServer, client: RestClient) -> None:
    faulty.script("client/config", Answer(body={"pjwt_auth_enabled": True}))
    faulty.script("auth/token", Answer(body={"jwt": token(exp=1)}))
    with pytest.raises(RuntimeError, match="sub"):
        client.whoami().result(10)


# ── life of a client ──────────────────────────────────────────────────────────────────────────────


def test_no_session_is_opened(faulty: FaultyServer, client: RestClient) -> None:
    faulty.script("sessions?limit=20&offset=0&access_scope=owned", Answer(body={"sessions": []}))
    client.list_sessions().result(10)
    assert len(faulty.seen) == 1


@pytest.mark.covers("C39")
def test_service_client_makes_a_rest_client(faulty: FaultyServer) -> None:
    faulty.script("sessions?limit=20&offset=0&access_scope=owned", Answer(body={"sessions": ["x"]}))
    with tinkex.ServiceClient(base_url=faulty.base_url, api_key=KEY) as service:
        with pytest.warns(FutureWarning, match="RestClient"):
            client = service.create_rest_client()
        assert client.list_sessions().result(10).sessions == ["x"]
        assert client.transport is service._session.transport
        client.close().result(10)
        assert client.list_sessions().result(10).sessions == ["x"]
    with pytest.raises(tinkex.TinkerError, match="closed"):
        client.list_sessions().result(10)
    assert {seen.path.split("?")[0] for seen in faulty.seen} == {"sessions"}


def test_session_excludes_an_address(faulty: FaultyServer) -> None:
    with tinkex.ServiceClient(base_url=faulty.base_url) as service:
        for kind in (RestClient, AdminClient):
            with pytest.raises(ValueError, match="not both"):
                kind(service._session, base_url="http://x")


def test_settings_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, faulty: FaultyServer
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", faulty.base_url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-outside")
    faulty.script("audit?event_type=all", Answer(body=LOG))
    with AdminClient() as admin:
        admin.get_audit_log().result(10)
        assert repr(admin) == f"AdminClient(base_url={faulty.base_url!r})"
    assert faulty.seen[0].headers["x-api-key"] == "tml-outside"
    monkeypatch.delenv("TINKER_BASE_URL")
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(tinkex.ConfigurationError):
        RestClient()


def test_closed_client_is_a_clear_error(faulty: FaultyServer) -> None:
    client = RestClient(base_url=faulty.base_url)
    client.close().result(10)
    client.close().result(10)
    with pytest.raises(RuntimeError, match="closed"):
        client.list_sessions()


def test_dropped_client_finishes_its_calls(faulty: FaultyServer) -> None:
    faulty.script("audit?event_type=all", Answer(body=LOG, delay=0.2))
    client = AdminClient(base_url=faulty.base_url)
    future, gone = client.get_audit_log(), weakref.ref(client)
    carrier = client.transport
    del client
    gc.collect()
    assert future.result(10).entries
    for _ in range(100):
        gc.collect()
        if gone() is None and carrier._closed:
            return
        threading.Event().wait(0.02)
    pytest.fail("the client is still there, or its connections are")


def test_our_own_server_answers_queries_over_both_ways(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path / "a") as url, AdminClient(base_url=url) as admin:
        assert admin.get_audit_log("checkpoints", dt.date(2026, 1, 2)).result(10).entries == []
    backend = tinkex.LocalBackend(engine=FakeEngine(), data_dir=tmp_path / "b")
    with backend, AdminClient(base_url=backend.base_url) as admin:
        assert admin.get_audit_log("checkpoints", dt.date(2026, 1, 2)).result(10).entries == []


# ── the official clients ──────────────────────────────────────────────────────────────────────────

INTROSPECT = """
import inspect, json, warnings
warnings.simplefilter("ignore")
import tinker
from pydantic_core import PydanticUndefined
from tinker import types

def default(value):
    return "required" if value is inspect.Parameter.empty else repr(value)

def fields(kind):
    return {
        name: "required" if f.is_required() else repr(f.get_default(call_default_factory=True))
        for name, f in kind.model_fields.items()
    }

clients = {
    kind.__name__: {
        name: [
            [p.name, p.kind.name, default(p.default)]
            for p in inspect.signature(method).parameters.values()
        ]
        for name, method in inspect.getmembers(kind, callable) if not name.startswith("_")
    }
    for kind in (tinker.RestClient, tinker.AdminClient)
}
models = {name: fields(kind) for name, kind in vars(types).items() if hasattr(kind, "model_fields")}
print(json.dumps({"clients": clients, "models": models}))
"""


@pytest.fixture(scope="module")
def official() -> Any:
    """Return the names of the official package, from its own process."""
    done = subprocess.run(
        [sys.executable, "-c", INTROSPECT], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


WIDER = {("delete_checkpoint", "checkpoint_id"), ("delete_checkpoint_async", "checkpoint_id")}
"""Ours may be left out: the first argument may be a whole path."""
NOT_OURS = {"get_telemetry"}


@pytest.mark.parametrize("kind", [RestClient, AdminClient])
def test_official_methods_are_ours_too(official: Any, kind: type[Any]) -> None:
    theirs = official["clients"][kind.__name__]
    assert len(theirs) > 5
    for name, parameters in theirs.items():
        if name in NOT_OURS:
            continue
        mine = list(inspect.signature(getattr(kind, name)).parameters.values())
        for ours, (wanted, how, default) in zip(mine, parameters, strict=False):
            assert (ours.name, ours.kind.name) == (wanted, how), name
            if (name, wanted) not in WIDER:
                shown = (
                    "required" if ours.default is inspect.Parameter.empty else repr(ours.default)
                )
                assert shown == default, (name, wanted)
        more = mine[len(parameters) :]
        assert len(mine) >= len(parameters)
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in more), name


CALLS = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import tinker
url, calls = sys.argv[1], json.loads(sys.argv[2])
kinds = (tinker.RestClient, tinker.AdminClient)
clients = [kind(base_url=url, api_key="tml-x") for kind in kinds]
for admin, name, args, keywords in calls:
    getattr(clients[admin], name)(*args, **keywords).result(30)
os._exit(0)  # its threads sometimes bring an orderly end down
"""


def is_official(case: Case, surface: Any) -> bool:
    """Return True if the official client takes the case's arguments and JSON can hold them."""
    if case.name not in surface["AdminClient" if case.admin else "RestClient"]:
        return False
    if case.name == "delete_checkpoint" and len(case.args) == 1:
        return False  # ours alone takes a path here
    if None in case.args and "ttl" not in case.name:
        return False  # ours alone may leave the scope open
    return all(arg is None or isinstance(arg, str | int) for arg in case.args)


def test_official_clients_send_the_same(official: Any, faulty: FaultyServer) -> None:
    cases = [case for case in CASES if is_official(case, official["clients"])]
    assert len({case.name for case in cases}) > 18
    faulty.script("telemetry", Answer(body={"status": "accepted"}))
    faulty.script("client/config", Answer(body={}))
    for case in cases:
        faulty.script(case.request.split(" ", 1)[1], Answer(body=case.answer))
    calls = [[case.admin, case.name, case.args, case.keywords] for case in cases]
    command = [sys.executable, "-c", CALLS, faulty.base_url, json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = [seen for seen in faulty.seen if not seen.path.startswith(("client/", "telemetry"))]
    for case, request in zip(cases, seen, strict=True):
        assert f"{request.method} {request.path}" == case.request
        assert (json.loads(request.body) if request.body else None) == case.body
        assert (
            request.headers["x-sdk-method"]
            == f"{'AdminClient' if case.admin else 'RestClient'}.{case.name}"
        )
        assert request.headers["x-sdk-version"] == "0.38.0"


@pytest.mark.parametrize(
    "name",
    [
        "AccessibleSearchOwner",
        "AuditLogEntry",
        "AuditLogResponse",
        "AuthTokenResponse",
        "BillingEventInfo",
        "BillingUsageEvent",
        "BillingUsageResponse",
        "BillingUsageSession",
        "Checkpoint",
        "CheckpointBillingEvent",
        "CheckpointsListResponse",
        "ClientFinishedSessionStatusQuery",
        "ClientSessionFinishReason",
        "ClientSessionFinished",
        "CopyWeightsRequest",
        "CopyWeightsResponse",
        "CurrentCheckpointStorageUsageItem",
        "CurrentCheckpointStorageUsageResponse",
        "Cursor",
        "ExternalWeightsUrlsResponse",
        "GetBillingUsageRequest",
        "GetCurrentCheckpointStorageUsageRequest",
        "GetSessionResponse",
        "ListSessionsResponse",
        "SaveWeightsExternalRequest",
        "SaveWeightsExternalResponse",
        "SaveWeightsExternalResponseInternal",
        "SearchOwner",
        "SessionFailedReason",
        "SessionSearchCursor",
        "SessionSearchRequest",
        "SessionSearchResponse",
        "SessionStatus",
        "SessionStatusQuery",
        "SessionSummary",
        "StorageBillingEvent",
        "TrainingRun",
        "TrainingRunsResponse",
        "UserSearchOwner",
        "WhoamiResponse",
    ],
)
def test_official_names_are_ours_too(name: str) -> None:
    assert getattr(types, name) is not None
    assert name in types.__all__


def test_checkpoints_have_a_page() -> None:
    """As the official ones write it."""
    saved = types.SaveWeightsResponse(path=PATH)
    base = "https://tinker.thinkingmachines.ai"
    assert saved.get_console_url() == f"{base}/checkpoints/sess-1%3Atrain%3A0/weights%2F0001"
    sampler = types.SaveWeightsForSamplerResponse(path="tinker://r/sampler_weights/a b")
    assert sampler.get_console_url() == f"{base}/checkpoints/r/sampler_weights%2Fa%20b"
    assert sampler.get_playground_url() == (
        f"{base}/playground?mode=checkpoint&checkpoint=tinker%3A%2F%2Fr%2Fsampler_weights%2Fa%20b"
    )
    with pytest.raises(ValueError, match="expected"):
        types.SaveWeightsResponse(path="elsewhere").get_console_url()


def test_run_is_unloaded_by_its_id(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url, tinkex.ServiceClient(base_url=url) as service:
        first, second = (service.create_lora_training_client("fake").result() for _ in range(2))
        saved = first.save_state("kept").result(10).path
        with RestClient(base_url=url) as rest:
            assert rest.unload_model(first.model_id).result(10).model_id == first.model_id
            assert rest.unload_model(second.model_id).result(10).model_id == second.model_id
            with pytest.raises(tinkex.NotFoundError, match="nowhere"):
                rest.unload_model("nowhere").result(10)
            with pytest.raises(ValueError, match="model_id"):
                rest.unload_model("")
        for client in (first, second):
            with pytest.raises(tinkex.APIStatusError):
                client.save_state("late").result(10)
        assert service.create_training_client_from_state(saved).result().model_id not in (
            first.model_id,
            second.model_id,
        )
