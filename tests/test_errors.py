"""Errors: what they know, how programs may make them, and that they travel whole and without
secrets."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import httpx
import pytest

import tinkex
from tinkex import errors
from tinkex.types import RequestErrorCategory
from tinkex.wire.redacted_http import (
    KEPT_CHARACTERS,
    SHOWN_CHARACTERS,
    Headers,
    Request,
    Response,
    describe_body,
    redact_url,
    wait_asked,
)

SENT = Request("POST", "https://host/api/v1/asample", {"X-API-Key": "tml-sesame", "Accept": "*/*"})
ANSWER = Response(404, {"Content-Type": "application/json"}, b'{"detail": "gone"}', SENT, 0.5)
STATUSES = {
    400: tinkex.BadRequestError,
    401: tinkex.AuthenticationError,
    402: tinkex.BillingError,
    403: tinkex.PermissionDeniedError,
    404: tinkex.NotFoundError,
    409: tinkex.ConflictError,
    410: errors.GoneError,
    422: tinkex.UnprocessableEntityError,
    429: tinkex.RateLimitError,
    500: tinkex.InternalServerError,
}

# ── what they know ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C09")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (tinkex.TinkerError("m"), "validation"),
        (tinkex.ConfigurationError("m"), "validation"),
        (tinkex.APIConnectionError("m"), "api_connection"),
        (tinkex.APITimeoutError("m"), "api_timeout"),
        (tinkex.APIResponseValidationError("m"), "validation"),
        (tinkex.RequestFailedError("m", "r", "server"), "request_failed"),
        *[(error("m"), "api_status") for error in STATUSES.values()],
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_every_error_has_every_attribute(error: tinkex.TinkerError, kind: str) -> None:
    assert error.type == kind
    assert error.message == "m" == str(error)
    for name in (
        "status",
        "category",
        "data",
        "retry_after",
        "retry_after_ms",
        "hint",
        "request",
        "response",
        "body",
    ):
        assert getattr(error, name) is None or name in ("status", "category")
    assert error.attempts == 1
    assert isinstance(error.is_user_error, bool)
    assert error.is_retryable is not error.is_user_error


@pytest.mark.covers("C09")
@pytest.mark.parametrize(("status", "kind"), STATUSES.items())
def test_class_stands_for_its_status(status: int, kind: type[tinkex.APIStatusError]) -> None:
    assert errors.error_for(status) is kind
    assert kind("m").status_code == kind("m").status == status
    assert kind("m").format() == f"[api_status ({status})] m"
    assert tinkex.APITimeoutError("slow").format() == "[api_timeout] slow"


@pytest.mark.covers("C09", "D34")
@pytest.mark.parametrize(
    ("status", "body", "category", "mistake", "again"),
    [
        (400, None, "user", True, False),
        (404, {"detail": "x"}, "user", True, False),
        (408, None, "server", False, True),
        (409, None, "user", True, True),
        (410, None, "server", False, False),
        (410, {"category": "user"}, "user", True, False),
        (422, {"category": "nobody"}, "user", True, False),
        (422, {"category": "SERVER"}, "server", True, False),
        (422, {"category": 5}, "user", True, False),
        (429, {"category": "user"}, "server", False, True),
        (500, None, "server", False, True),
        (501, None, "server", False, False),
        (500, {"category": "User"}, "user", True, True),
        (500, ["category"], "server", False, True),
        (302, None, "unknown", False, False),
    ],
)
def test_error_category_and_hint(
    status: int, body: Any, category: str, mistake: bool, again: bool
) -> None:
    error = errors.error_for(status)("m", status_code=status, body=body)
    assert error.category == category
    assert error.is_user_error is mistake
    assert error.is_retryable is not mistake
    assert errors.is_retryable(error) is again


@pytest.mark.covers("C09")
def test_errors_without_a_status_are_judged_by_their_category() -> None:
    assert tinkex.APIConnectionError("m").is_retryable
    assert tinkex.APIConnectionError("m").category is None
    assert tinkex.ConfigurationError("m").is_user_error
    assert not tinkex.APIResponseValidationError("m").is_retryable
    assert tinkex.RequestFailedError("m", "r", "USER").is_user_error
    for category in ("server", "unknown", "nobody", None):
        assert tinkex.RequestFailedError("m", "r", category).is_retryable
    assert tinkex.RequestFailedError("m", "r", "nobody").category is RequestErrorCategory.Unknown


@pytest.mark.covers("C09")
@pytest.mark.parametrize(
    ("body", "message", "category", "wait"),
    [
        ({"message": "a", "error": "b", "category": "user", "retry_after_ms": 0}, "a", "user", 0),
        ({"message": "", "error": "b", "retry_after_ms": 1500}, "b", "unknown", 1500),
        ({"error": "b", "category": "Server"}, "b", "server", None),
        ({}, "the request failed, and the server did not say why", "unknown", None),
        (None, "the request failed, and the server did not say why", "unknown", None),
        ("text", "text", "unknown", None),
    ],
)
def test_failure_is_read_from_an_answer(
    body: Any, message: str, category: str, wait: int | None
) -> None:
    error = tinkex.RequestFailedError.from_response(503, body)
    assert (error.message, error.category, error.status, error.retry_after_ms) == (
        message,
        category,
        503,
        wait,
    )
    assert error.data == (body if isinstance(body, dict) else None)
    assert error.format() == f"[request_failed (503)] {message}"


@pytest.mark.covers("C09")
@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"Retry-After": "2"}, None, 2),
        ({"RETRY-AFTER-MS": "250", "retry-after": "9"}, None, 0.25),
        ({"retry-after-ms": "0"}, None, 0),
        ({"retry-after": "-1"}, {"retry_after_ms": 30}, 0.03),
        ({"retry-after": "soon"}, {}, None),
        ({"retry-after": "inf"}, {"retry_after_ms": "x"}, None),
        ({}, {"retry_after_ms": 5000}, 5),
    ],
)
def test_time_to_wait_is_read_from_the_answer(
    headers: dict[str, str], body: Any, seconds: float | None
) -> None:
    error = tinkex.RateLimitError("m", response=Response(429, headers), body=body)
    assert error.retry_after == seconds == wait_asked(headers, body)
    assert error.retry_after_ms == (None if seconds is None else round(seconds * 1000))
    assert (
        tinkex.RateLimitError(
            "m", response=Response(429, headers), body=body, retry_after=0.0
        ).retry_after
        == 0
    )


# ── how they are made ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W17")
def test_forms_of_the_official_package_work() -> None:
    request = httpx.Request("GET", "https://host/x")
    response = httpx.Response(404, headers={"retry-after": "3"}, request=request)
    plain = tinkex.APIError("m", request, body={"a": 1})
    assert (plain.message, plain.request, plain.body, plain.data) == (
        "m",
        request,
        {"a": 1},
        {"a": 1},
    )
    for refused in (
        tinkex.NotFoundError("m", response, {"a": 1}),
        tinkex.NotFoundError("m", response=response, body={"a": 1}),
        tinkex.APIStatusError(message="m", response=response, body={"a": 1}),
    ):
        assert (refused.message, refused.response, refused.body) == ("m", response, {"a": 1})
        assert (refused.status_code, refused.request, refused.retry_after) == (404, request, 3)
    for invalid in (
        tinkex.APIResponseValidationError(response, "text", "m"),
        tinkex.APIResponseValidationError(response=response, body="text", message="m"),
        tinkex.APIResponseValidationError(response, body="text", message="m"),
    ):
        assert (invalid.message, invalid.response, invalid.body) == ("m", response, "text")
        assert (invalid.status_code, invalid.request, invalid.status) == (404, request, None)
    assert tinkex.APIResponseValidationError(response, None).message
    for lost in (
        tinkex.APIConnectionError(request, "m"),
        tinkex.APIConnectionError(request=request, message="m"),
    ):
        assert (lost.message, lost.request) == ("m", request)
    assert tinkex.APIConnectionError(request=request).message == "Connection error."
    for late in (tinkex.APITimeoutError(request), tinkex.APITimeoutError(request=request)):
        assert (late.message, late.request) == ("Request timed out.", request)
    failed = tinkex.RequestFailedError("m", "r", RequestErrorCategory.Server)
    assert (failed.message, failed.request_id, failed.category) == (
        "m",
        "r",
        RequestErrorCategory.Server,
    )
    with pytest.raises(TypeError, match="unexpected argument 3"):
        tinkex.APIConnectionError(request, "m", 3)


def test_response_without_a_request_will_do() -> None:
    refused = tinkex.ConflictError("m", response=httpx.Response(409), body=None)
    assert (refused.request, refused.status_code) == (None, 409)


def test_error_subclasses_take_a_request_and_a_response() -> None:
    lost = tinkex.APIConnectionError("m", hint="h", request=SENT, attempts=3)
    assert (lost.message, lost.hint, lost.request, lost.attempts) == ("m", "h", SENT, 3)
    assert str(lost) == "m\nhint: h"
    late = tinkex.APITimeoutError("m", request=SENT)
    assert (late.message, late.request) == ("m", SENT)
    invalid = tinkex.APIResponseValidationError("m", body=b"x", response=ANSWER)
    assert (invalid.message, invalid.body, invalid.response, invalid.request) == (
        "m",
        b"x",
        ANSWER,
        SENT,
    )
    refused = errors.error_for(503)(
        "m", status_code=503, retry_after=1.0, body="b", response=ANSWER, request_id="r"
    )
    assert (refused.status_code, refused.response, refused.request, refused.request_id) == (
        503,
        ANSWER,
        SENT,
        "r",
    )


class OwnError(tinkex.NotFoundError):
    """One that a program makes of ours, with a constructor of its own."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}", ANSWER, {"a": 1})
        self.sum = first + second


# ── they travel ───────────────────────────────────────────────────────────────────────────────────

EVERY = [
    tinkex.TinkerError("m", 5, hint="h"),
    tinkex.ConfigurationError("m", hint="h"),
    tinkex.APIError("m", SENT, body={"a": [1]}, request_id="r"),
    tinkex.APIConnectionError(SENT),
    tinkex.APITimeoutError(SENT),
    tinkex.APITimeoutError("m", hint="h", attempts=2),
    tinkex.APIResponseValidationError(ANSWER, b"x"),
    *[kind("m", ANSWER, {"detail": "d"}, hint="h") for kind in STATUSES.values()],
    tinkex.RequestFailedError.from_response(500, {"error": "e", "category": "server"}, "r"),
    tinkex.RequestFailedError("m", "r", "user"),
    OwnError(1, 2),
]


@pytest.mark.covers("W18")
@pytest.mark.parametrize("error", EVERY, ids=repr)
def test_copies_are_whole(error: tinkex.TinkerError) -> None:
    vars(error)["mine"] = {"a": 1}  # as programs do
    error.add_note("a note")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert twin.args == error.args
        for shown in (str, repr, type(error).format):
            assert shown(twin) == shown(error)
        assert vars(twin) == vars(error)
        assert twin.__notes__ == ["a note"]
        assert (twin.status, twin.category, twin.is_retryable) == (
            error.status,
            error.category,
            error.is_retryable,
        )


# ── no secrets, no floods ─────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C05")
def test_recorded_exchange_holds_no_secret() -> None:
    request = Request(
        "GET",
        "https://me:sesame@host/x?a=1&api_key=sesame&X-Amz-Signature=sesame&sig=sesame&b",
        {
            "X-API-Key": "sesame",
            "authorization": "Bearer sesame",
            "Proxy-Authorization": "sesame",
            "CF-Access-Client-Secret": "sesame",
            "Cookie": "sesame",
            "X-Gate-Token": "sesame",
            "X-Idempotency-Key": "kept",
        },
    )
    response = Response(500, {"Set-Cookie": "sesame", "Date": "today"}, b"", request)
    error = tinkex.InternalServerError("m", response, None)
    assert b"sesame" not in pickle.dumps(error)
    for shown in (repr(request), repr(response), repr(error), repr(error.response.headers)):
        assert "sesame" not in shown
    assert request.headers["x-idempotency-key"] == "kept"
    assert (request.headers["x-api-key"], response.headers["DATE"]) == ("[REDACTED]", "today")
    assert request.url.endswith(
        "/x?a=1&api_key=[REDACTED]&X-Amz-Signature=[REDACTED]&sig=[REDACTED]&b"
    )
    assert redact_url("http://me:sesame@[") == "["


def test_answer_has_the_attributes_of_a_response() -> None:
    assert (ANSWER.json(), ANSWER.is_success) == ({"detail": "gone"}, False)
    assert ANSWER.text == '{"detail": "gone"}'
    assert Response(204).is_success
    assert Response(200, content=b"\xff").text == "�"
    with pytest.raises(ValueError, match="Expecting value"):
        Response(200).json()
    headers = Headers({"A": "1"})
    assert (headers["a"], dict(headers), "b" in headers, len(headers)) == (
        "1",
        {"A": "1"},
        False,
        1,
    )
    assert headers == Headers([("A", "1")])


@pytest.mark.covers("W17")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, ""),
        ("", ""),
        (b"", ""),
        ({}, ""),
        ({"detail": "d", "message": "m"}, "d"),
        ({"message": "m", "error": "e"}, "m"),
        ({"message": "", "error": {"message": "inner"}}, "inner"),
        ({"code": 3}, '{"code": 3}'),
        (
            {"detail": [{"loc": ["body", "rank"], "msg": "too high"}, {"msg": "odd"}]},
            "rank: too high; odd",
        ),
        (b'{"detail": "d"}', "d"),
        ([1, 2], "[1, 2]"),
        ({"code": b"x"}, "{'code': b'x'}"),
        ("  two\n lines ", "two lines"),
        (
            "<!DOCTYPE html><html><title>\n502 Bad Gateway</title><body>long</body>",
            "an HTML page: 502 Bad Gateway",
        ),
        (b"<html><style>x{}</style><p>Service  <b>down</b></p>", "an HTML page: Service down"),
        ("<html></html>", "an HTML page: blank"),
        ("<3 is not a page", "<3 is not a page"),
    ],
    ids=repr,
)
def test_bodies_are_summarized(body: Any, words: str) -> None:
    assert describe_body(body) == words


@pytest.mark.covers("W17")
def test_long_bodies_are_cut() -> None:
    page = "<html><title>" + "t" * 9000 + "</title>"
    assert len(describe_body(page)) <= SHOWN_CHARACTERS + 2
    assert len(describe_body({"detail": "x" * 9000})) <= SHOWN_CHARACTERS + 2
    assert tinkex.InternalServerError("m", body=page).body == page[:KEPT_CHARACTERS]
    assert tinkex.APIResponseValidationError("m", body=b"x" * 9000).body == b"x" * KEPT_CHARACTERS
    assert tinkex.InternalServerError("m", body=page[:100]).body == page[:100]
