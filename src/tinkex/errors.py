"""The error tree.

    TinkerError                        anything tinkex raises on purpose
    ├── ConfigurationError             nothing was sent: settings are missing or contradict each other   (ValueError)
    ├── APIError                       something was sent
    │   ├── APIConnectionError         no answer
    │   │   └── APITimeoutError        no answer in time                                                (TimeoutError)
    │   ├── APIResponseValidationError an answer that is not what the protocol says
    │   └── APIStatusError             an answer that says no
    │       ├── BadRequestError 400 · AuthenticationError 401 · BillingError 402 · PermissionDeniedError 403
    │       ├── NotFoundError 404 · ConflictError 409 · GoneError 410 · UnprocessableEntityError 422
    │       └── RateLimitError 429 · InternalServerError >= 500
    └── RequestFailedError             the operation was accepted and then failed; `category` says whose fault it is
    ExperimentalWarning                a warning: what was called may change or go without notice    (FutureWarning)

Every error keeps what it knows as attributes (`status_code`, `request_id`, `attempts`, `hint`, …), also when pickled.
"""

from __future__ import annotations

from typing import Any

from tinkex.types.sessions import RequestErrorCategory


class TinkerError(Exception):
    """The root: catch this to catch everything tinkex raises on purpose."""

    def __init__(self, message: str = "", *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        for name, value in details.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigurationError(TinkerError, ValueError):
    """Settings that are missing or contradict each other."""


class APIError(TinkerError):
    """A request was made and did not give what was asked for."""

    def __init__(
        self,
        message: str = "",
        *,
        body: object = None,
        request_id: str | None = None,
        attempts: int = 1,
        hint: str | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message, hint=hint, **details)
        self.body = body
        self.request_id = request_id
        self.attempts = attempts


class APIConnectionError(APIError):
    """The server could not be reached, or hung up."""


class APITimeoutError(APIConnectionError, TimeoutError):
    """The server did not answer in time."""


class APIResponseValidationError(APIError):
    """The server's answer is not what the protocol says."""


class APIStatusError(APIError):
    """The server refused."""

    def __init__(
        self,
        message: str = "",
        *,
        status_code: int = 0,
        retry_after: float | None = None,
        body: object = None,
        request_id: str | None = None,
        attempts: int = 1,
        hint: str | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message, body=body, request_id=request_id, attempts=attempts, hint=hint, **details)
        self.status_code = status_code
        self.retry_after = retry_after
        self.should_retry: bool | None = None
        """What the server said about trying again, if it did."""


class BadRequestError(APIStatusError):
    """400: the request makes no sense to the server."""


class AuthenticationError(APIStatusError):
    """401: no key, or one the server does not know."""


class BillingError(APIStatusError):
    """402: the account must be topped up."""


class PermissionDeniedError(APIStatusError):
    """403: this key may not do that."""


class NotFoundError(APIStatusError):
    """404: there is no such thing, or it is another owner's."""


class ConflictError(APIStatusError):
    """409: the present state does not allow it."""


class GoneError(APIStatusError):
    """410: it was there and has expired."""


class UnprocessableEntityError(APIStatusError):
    """422: understood, and wrong."""


class RateLimitError(APIStatusError):
    """429: too much at once."""


class InternalServerError(APIStatusError):
    """5xx: a fault on the server's side."""


class RequestFailedError(TinkerError):
    """An accepted operation failed; `category` is "user", "server" or "unknown"."""

    def __init__(
        self,
        message: str = "",
        request_id: str = "",
        category: RequestErrorCategory | str = RequestErrorCategory.Unknown,
        **details: Any,
    ) -> None:
        super().__init__(message, **details)
        self.request_id = request_id
        self.category = RequestErrorCategory(category)


class ExperimentalWarning(FutureWarning):
    """What was called may change or go in any release."""


STATUS_ERRORS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def error_for(status: int) -> type[APIStatusError]:
    """The class an HTTP status is raised as."""
    return STATUS_ERRORS.get(status, InternalServerError if status >= 500 else APIStatusError)


def is_retryable(error: BaseException) -> bool:
    """Whether the same request, sent again, may succeed."""
    if getattr(error, "should_retry", None) is not None:
        return bool(error.should_retry)  # type: ignore[attr-defined]
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or (
            error.status_code >= 500 and error.status_code not in (501, 505)
        )
    return isinstance(error, APIConnectionError)
