"""Outcomes of requests: events, and typed errors for replies that are bad, or did not come.

Neither of them has secrets in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from tinkex import events
from tinkex.client.http.exchange import Reply, bounded
from tinkex.client.http.request_headers import RequestKeys
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    Request,
    Response,
    TinkerError,
    describe_body,
    error_for,
)
from tinkex.wire import codec
from tinkex.wire.protocol import Operation
from tinkex.wire.redacted_http import wait_asked
from tinkex.wire.redaction import MOST_TRACEBACK, Scrubber, secrets_in

logger = logging.getLogger("tinkex")

KEPT_BYTES = 65_536
"""The part of an answer that an error keeps."""


class RejectedError(APIConnectionError):
    """A 400 with an empty body, probably from a proxy and not from the server."""


class ReplyErrors:
    """Makes the errors of one server's replies.

    Args:
        place: The server, as messages name it.
        home: The server's address, for errors without one.
        keys: Knows the secrets, which are left out.
    """

    def __init__(self, place: str, home: str, keys: RequestKeys) -> None:
        self.place, self._home, self._keys = place, home, keys

    def misread(self, op: Operation, reply: Reply, problem: str) -> APIResponseValidationError:
        """Return the error for a good status with a body that cannot be read."""
        response = self._response(op, reply)
        message = self._keys.scrubber.text(f"{op.name} at {self.place}: {problem}")
        return APIResponseValidationError(message, body=response.content, response=response)

    def refusal(self, op: Operation, reply: Reply, place: str = "") -> APIError:
        """Return the error for a bad status."""
        where = f"{op.title} at {place or self.place}"
        response = self._response(op, reply)
        error: APIError
        if reply.status == 400 and not reply.body:
            error = RejectedError(
                f"{where}: 400 without a word: a proxy on the way rejected it, not the server",
                request=response.request,
                response=response,
            )
        else:
            body = _loads(self._body(reply.body, reply.url))
            error = error_for(reply.status)(
                f"{where}: {reply.status}: {self._keys.scrubber.text(describe_body(body))}",
                response,
                body,
                status_code=reply.status,
                retry_after=reply.retry_after,
            )
            error.retry_after = bounded(error.retry_after)
            self._check_retry_after(where, reply)
        error.should_retry = reply.should_retry
        return error

    def unanswered(
        self, op: Operation, place: str, address: str, error: Exception
    ) -> APIConnectionError:
        """Return the error for an answer that did not come."""
        request = self._sent(op, address)
        if isinstance(error, TimeoutError):
            return APITimeoutError(f"{op.title} at {place}: {error}", request=request)
        return APIConnectionError(
            self._keys.scrubber.text(f"{op.title}: cannot reach {place}: {error}"),
            request=request,
            hint="check the base URL, and that the server is running",
        )

    @contextlib.contextmanager
    def typed(self, op: Operation, place: str, address: str) -> Iterator[None]:
        """Raise an exchange's errors in this block as `APIConnectionError`."""
        try:
            yield
        except TinkerError:
            raise
        except (TimeoutError, ConnectionError) as error:
            raise self.unanswered(op, place, address, error) from error

    def without_keys(self, text: str) -> str:
        """Return a server's text without our secrets and without anything like a key."""
        return self._keys.scrubber.without_keys(text)

    def log_deprecation(self, op: Operation, headers: Mapping[str, str]) -> None:
        """Log a deprecation note of the server, if there is one."""
        if note := headers.get("x-deprecation-note"):
            level = (
                logging.ERROR if headers.get("x-deprecation-level") == "error" else logging.WARNING
            )
            logger.log(level, "%s: %s", op.name, self._keys.scrubber.text(note))

    def _check_retry_after(self, where: str, reply: Reply) -> None:
        text = reply.headers.get("retry-after")
        if text is not None and wait_asked({"retry-after": text}) is None:
            shown = self._keys.scrubber.text(self._without_secrets(text, reply.url), 100)
            logger.warning("%s: a retry-after that cannot be read: %r", where, shown)

    def _without_secrets(self, text: str, url: str) -> str:
        """Remove keys, and the signature of the address that the text came from."""
        return Scrubber(secrets_in(url)).without_keys(self.without_keys(text))

    def _body(self, data: bytes, url: str) -> bytes:
        text = data.decode(errors="surrogateescape")
        return self._without_secrets(text, url).encode(errors="surrogateescape")

    def _sent(self, op: Operation, address: str) -> Request:
        """Return a request as an error keeps it."""
        return Request(op.method, self._keys.scrubber.without_keys(address))

    def _response(self, op: Operation, reply: Reply) -> Response:
        """Return an answer as an error keeps it."""
        headers = {
            name: self._without_secrets(value, reply.url) for name, value in reply.headers.items()
        }
        content = self._body(reply.body[:KEPT_BYTES], reply.url)
        return Response(
            reply.status, headers, content, self._sent(op, reply.url or self._home), reply.elapsed
        )


def _loads(body: bytes) -> Any:
    try:
        return codec.loads(body) if body else ""
    except ValueError:
        return body[:KEPT_BYTES].decode(errors="replace")


@contextlib.contextmanager
def announced(facts: Mapping[str, Any], keys: RequestKeys) -> Iterator[dict[str, Any]]:
    """Emit the events of a request around a block; the block may add to the outcome.

    Args:
        facts: Metadata of the events.
        keys: Knows the secrets, which are left out of unexpected errors.
    """
    outcome: dict[str, Any] = {}
    started = time.monotonic()

    def end(name: str, **more: Any) -> None:
        duration = (time.monotonic() - started) * 1000
        events.emit(name, {"duration": duration}, {**facts, **more})

    events.emit(events.HTTP_START, {"system_time": time.time()}, dict(facts))
    try:
        yield outcome
    except APIError as error:
        end(events.HTTP_STOP, result="error", retry_count=error.attempts - 1)
        raise
    except (asyncio.CancelledError, GeneratorExit):  # the caller gave up, which is no failure
        end(events.HTTP_STOP, result="cancelled", retry_count=outcome.get("retry_count", 0))
        raise
    except Exception as error:
        end(
            events.HTTP_EXCEPTION,
            kind=type(error).__name__,
            reason=keys.scrubber.text(str(error)),
            stacktrace=keys.scrubber.text(traceback.format_exc(), MOST_TRACEBACK, end=True),
        )
        raise
    end(events.HTTP_STOP, **{"result": "ok", "retry_count": 0, **outcome})
