"""The error tree.

    TinkerError                           any error that tinkex raises on purpose
    ├── ConfigurationError                settings are missing or wrong (a ValueError)
    ├── APIError                          a request failed
    │   ├── APIConnectionError            no answer
    │   │   └── APITimeoutError           no answer in time (a TimeoutError)
    │   ├── APIResponseValidationError    an answer that does not follow the protocol
    │   └── APIStatusError                an answer that refuses
    │       ├── BadRequestError 400 · AuthenticationError 401 · BillingError 402
    │       ├── PermissionDeniedError 403 · NotFoundError 404 · ConflictError 409
    │       ├── GoneError 410 · UnprocessableEntityError 422 · RateLimitError 429
    │       └── InternalServerError >= 500
    └── RequestFailedError                an accepted operation failed; `category` is the cause
    ExperimentalWarning                   an API that may change or go (a FutureWarning)

Every error has these attributes. They are None if nothing is known, and survive pickling:
`message`, `hint`, `type`, `status`, `category`, `body` (`data` if it is a mapping), `request`,
`response`, `request_id`, `attempts`, `retry_after`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tinkex.types.future_requests import RequestErrorCategory
from tinkex.wire.redacted_http import (
    Request as Request,
    Response as Response,
    bounded,
    describe_body as describe_body,
    wait_asked,
)

NOT_THE_CALLERS = {408, 410, 429}
"""Statuses of the 400s that are not the caller's mistake: too slow, expired, too many."""


class TinkerError(Exception):
    """The root: catch this to catch everything tinkex raises on purpose.

    Programs may set further attributes; they travel with the error.

    Example:
        >>> try:
        ...     raise RateLimitError("slow down", retry_after=2.0)  # as any call may
        ... except TinkerError as error:
        ...     print(error.format(), error.is_retryable, error.retry_after)
        [api_status (429)] slow down True 2.0
    """

    type: ClassVar[str] = "validation"
    """The kind of failure: api_connection, api_timeout, api_status, request_failed or validation.
    """
    message: str
    hint: str | None = None
    """Advice to the user."""
    category: RequestErrorCategory | None = None
    """Cause of the failure, as far as it is known."""
    body: object = None
    """Answer of the server: decoded, or the beginning of its text."""
    request: Any = None
    """The request, as a `Request`, or as a program set it."""
    response: Any = None
    """The answer, as a `Response`, or as what a program put there."""
    request_id: str | None = None
    """The id of the operation, or of the request, that failed."""
    attempts: int = 1
    """Number of attempts."""
    retry_after: float | None = None
    """Seconds the server asks to wait."""
    should_retry: bool | None = None
    """True or False if the server or a caller has decided on a retry."""

    def __init__(
        self, message: str = "", *others: object, hint: str | None = None, **details: Any
    ) -> None:
        super().__init__(message, *others)
        self.message = message
        self.hint = hint
        for name, value in details.items():
            setattr(self, name, value)

    @property
    def status(self) -> int | None:
        """The HTTP status, if there was one."""
        return getattr(self, "status_code", None) or None

    @property
    def data(self) -> Mapping[str, Any] | None:
        """The server's answer, if it is a mapping."""
        return self.body if isinstance(self.body, Mapping) else None

    @property
    def retry_after_ms(self) -> int | None:
        """Milliseconds the server asks to wait."""
        return None if self.retry_after is None else round(self.retry_after * 1000)

    @property
    def is_user_error(self) -> bool:
        """True for a caller's mistake, by category or status.

        Statuses 408, 410 and 429 are not the caller's mistake.
        """
        status = self.status or 0
        return self.category == RequestErrorCategory.User or (
            400 <= status < 500 and status not in NOT_THE_CALLERS
        )

    @property
    def is_retryable(self) -> bool:
        """True if the operation may succeed when the caller starts it again.

        This is True for all but the caller's mistakes. The function `is_retryable` answers another
        question: whether the same request may be sent again. They differ for 409, which may pass by
        itself but is the caller's conflict, and for 410 and failed operations, which must be
        submitted again.
        """
        return not self.is_user_error

    def format(self) -> str:
        """Return the error on one line, with its type and status.

        Returns:
            Type, status if there was one, and message.

        Example:
            >>> RateLimitError("slow down").format()
            '[api_status (429)] slow down'
        """
        status = f" ({self.status})" if self.status else ""
        return f"[{self.type}{status}] {self.message}"

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by way of the constructor: subclasses, also those of programs, have constructors of
        # their own.
        return _revive, (self.__class__, self.args), self.__dict__


def _revive(kind: type[TinkerError], args: tuple[Any, ...]) -> TinkerError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigurationError(TinkerError, ValueError):
    """Settings that are missing or contradict each other.

    Example:
        >>> try:
        ...     Config(base_url="127.0.0.1:8000")
        ... except ConfigurationError as error:
        ...     print(error.hint)
        give a full URL such as http://127.0.0.1:8000, or "local"
    """

    category = RequestErrorCategory.User


class APIError(TinkerError):
    """A request that failed.

    Example:
        >>> try:
        ...     raise BadRequestError(
        ...         "no such loss", body={"detail": "loss_fn"}, request_id="request-1"
        ...     )
        ... except APIError as error:
        ...     print(error.status, error.data, error.request_id)
        400 {'detail': 'loss_fn'} request-1
    """

    def __init__(
        self,
        message: str,
        request: Any = None,
        *,
        body: object = None,
        request_id: str | None = None,
        attempts: int = 1,
        hint: str | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message, hint=hint, **details)
        self.request = request
        self.body = bounded(body)
        self.request_id = request_id
        self.attempts = attempts


class APIConnectionError(APIError):
    """The server could not be reached, or closed the connection.

    Args:
        place: The request and the message, or the message alone.
        request: The request that could not be sent.
        message: The cause.
        details: As for APIError.

    Example:
        >>> error = APIConnectionError("connection refused", attempts=11)
        >>> error.format(), error.attempts, error.is_retryable
        ('[api_connection] connection refused', 11, True)
    """

    type = "api_connection"

    def __init__(
        self, *place: Any, request: Any = None, message: str = "Connection error.", **details: Any
    ) -> None:
        request, message = _placed(place, request, message)
        super().__init__(message, request, **details)


class APITimeoutError(APIConnectionError, TimeoutError):
    """The server did not answer in time.

    Example:
        >>> error = APITimeoutError()
        >>> error.format(), isinstance(error, TimeoutError), isinstance(error, APIConnectionError)
        ('[api_timeout] Request timed out.', True, True)
    """

    type = "api_timeout"

    def __init__(
        self, *place: Any, request: Any = None, message: str = "Request timed out.", **details: Any
    ) -> None:
        super().__init__(*place, request=request, message=message, **details)


class APIResponseValidationError(APIError):
    """The server's answer does not follow the protocol; a retry would not help.

    Args:
        place: The response, the body and the message, or the message alone.
        response: The answer.
        body: The body of the answer.
        message: The fault.
        details: As for APIError.

    Example:
        >>> error = APIResponseValidationError("metrics must be an object", status_code=200)
        >>> error.format(), error.is_retryable
        ('[validation] metrics must be an object', False)
    """

    type = "validation"
    category = RequestErrorCategory.User  # so that it is not tried again; nothing else is implied
    status_code: int = 0

    def __init__(
        self,
        *place: Any,
        response: Any = None,
        body: object = None,
        message: str | None = None,
        status_code: int | None = None,
        **details: Any,
    ) -> None:
        response, body, message = _placed(place, response, body, message)
        details.setdefault("request", _request_of(response))
        super().__init__(
            message or "The server's answer is not what was expected.", body=body, **details
        )
        self.response = response
        self.status_code = status_code or getattr(response, "status_code", None) or 0

    @property
    def status(self) -> int | None:
        """Always None, because the status of the answer, in `status_code`, is no failure."""
        return None


class APIStatusError(APIError):
    """The server refused a request.

    Args:
        message: Its message.
        response: Its answer.
        body: The body of the answer.
        status_code: The status; by default that of the answer, else that of the class.
        retry_after: Seconds to wait; by default those of the answer.
        category: The cause; by default that of the answer.
        details: As for APIError.

    Example:
        >>> error = error_for(418)("I am a teapot", status_code=418)
        >>> type(error).__name__, error.status, error.is_user_error
        ('APIStatusError', 418, True)
    """

    type = "api_status"
    status_code: int = 0

    def __init__(
        self,
        message: str,
        response: Any = None,
        body: object = None,
        *,
        status_code: int | None = None,
        retry_after: float | None = None,
        category: RequestErrorCategory | str | None = None,
        **details: Any,
    ) -> None:
        details.setdefault("request", _request_of(response))
        super().__init__(message, body=body, **details)
        self.response = response
        self.status_code = (
            status_code or getattr(response, "status_code", None) or type(self).status_code
        )
        told = RequestErrorCategory.parse(category) if category else None
        self.category = told or category_of(self.status_code, body)
        headers = getattr(response, "headers", None)
        asked = wait_asked(headers if isinstance(headers, Mapping) else {}, body)
        self.retry_after = asked if retry_after is None else retry_after


def _placed(place: tuple[Any, ...], *named: Any) -> tuple[Any, ...]:
    """Return positional arguments as keywords; a text at first is the message."""
    if place and isinstance(place[0], str):
        place = (*named[:-1], *place)
    if len(place) > len(named):
        raise TypeError(f"unexpected argument {place[len(named)]!r}")
    return (*place, *named[len(place) :])


def _request_of(response: Any) -> Any:
    try:
        return getattr(response, "request", None)
    except RuntimeError:  # httpx: no request was set
        return None


def category_of(status: int, body: object = None) -> RequestErrorCategory:
    """Return the cause of a refusal: from its body, else from its status.

    A limit is never the caller's fault.

    Args:
        status: The HTTP status.
        body: The body of the answer.

    Returns:
        The category.

    Example:
        >>> category_of(503), category_of(400, {"category": "server"})
        (<RequestErrorCategory.Server: 'server'>, <RequestErrorCategory.Server: 'server'>)
    """
    told = str(body.get("category", "")).strip().lower() if isinstance(body, Mapping) else ""
    if status == 429:
        return RequestErrorCategory.Server
    if told in list(RequestErrorCategory):
        return RequestErrorCategory(told)
    if status in NOT_THE_CALLERS or status >= 500:
        return RequestErrorCategory.Server
    return RequestErrorCategory.User if status >= 400 else RequestErrorCategory.Unknown


class BadRequestError(APIStatusError):
    """400: the request is wrong.

    Example:
        >>> error = BadRequestError("top_p must be in (0, 1]")
        >>> error.format(), error.is_user_error
        ('[api_status (400)] top_p must be in (0, 1]', True)
    """

    status_code = 400


class AuthenticationError(APIStatusError):
    """401: there is no key, or the server does not know it.

    Example:
        >>> print(AuthenticationError("the key is unknown", hint="check TINKER_API_KEY"))
        the key is unknown
        hint: check TINKER_API_KEY
    """

    status_code = 401


class BillingError(APIStatusError):
    """402: the account must be topped up.

    Example:
        >>> error = BillingError("the account is empty")
        >>> error.status, error.is_retryable
        (402, False)
    """

    status_code = 402


class PermissionDeniedError(APIStatusError):
    """403: the key has no permission.

    Example:
        >>> error = PermissionDeniedError("this key may only sample")
        >>> error.format()
        '[api_status (403)] this key may only sample'
    """

    status_code = 403


class NotFoundError(APIStatusError):
    """404: it does not exist, or belongs to another owner.

    Example:
        >>> try:
        ...     raise NotFoundError(
        ...         "no checkpoint weights/step-100"
        ...     )  # as rest.delete_checkpoint(...).result() does
        ... except NotFoundError as error:
        ...     print(error.status, error)
        404 no checkpoint weights/step-100
    """

    status_code = 404


class ConflictError(APIStatusError):
    """409: the present state does not allow the request.

    Example:
        >>> error = ConflictError("the run is being saved")
        >>> is_retryable(error), error.is_retryable  # it may pass, but is the caller's conflict
        (True, False)
    """

    status_code = 409


class GoneError(APIStatusError):
    """410: it has expired.

    Example:
        >>> error = GoneError("the sampler has expired")
        >>> is_retryable(error), error.is_retryable  # not by the same request: by a new sampler
        (False, True)
    """

    status_code = 410


class UnprocessableEntityError(APIStatusError):
    """422: the request is well formed, but its content is wrong.

    Example:
        >>> error = UnprocessableEntityError(
        ...     "data[0]: no target_tokens", body={"detail": "data[0]: no target_tokens"}
        ... )
        >>> error.status, error.data["detail"]
        (422, 'data[0]: no target_tokens')
    """

    status_code = 422


class RateLimitError(APIStatusError):
    """429: there were too many requests.

    Example:
        >>> error = RateLimitError("slow down", retry_after=1.5)
        >>> error.retry_after, error.is_user_error, error.is_retryable
        (1.5, False, True)
    """

    status_code = 429


class InternalServerError(APIStatusError):
    """5xx: the server failed.

    Example:
        >>> error = InternalServerError("overloaded", status_code=503)
        >>> error.format(), error.is_retryable
        ('[api_status (503)] overloaded', True)
    """

    status_code = 500


class RequestFailedError(TinkerError):
    """An accepted operation failed; `category` is "user", "server" or "unknown".

    Example:
        >>> error = RequestFailedError("out of memory", "request-1", "server")
        >>> error.category, error.is_retryable, error.request_id
        (<RequestErrorCategory.Server: 'server'>, True, 'request-1')
    """

    type = "request_failed"
    request_id: str
    category: RequestErrorCategory

    def __init__(
        self,
        message: str,
        request_id: str,
        category: RequestErrorCategory | str | None,
        **details: Any,
    ) -> None:
        super().__init__(message, **details)
        self.request_id = request_id
        self.category = RequestErrorCategory.parse(category)

    @classmethod
    def from_response(cls, status: int, body: object, request_id: str = "") -> Self:
        """Make the error of an answer, with its message, category and the time to wait.

        Args:
            status: The HTTP status.
            body: The body of the answer.
            request_id: The operation.

        Returns:
            The error, to be raised.

        Example:
            >>> RequestFailedError.from_response(
            ...     500, {"error": "out of memory", "category": "server"}
            ... ).format()
            '[request_failed (500)] out of memory'
        """
        told = body if isinstance(body, Mapping) else {}
        message = next((str(told[name]) for name in ("message", "error") if told.get(name)), "")
        return cls(
            message or describe_body(body) or "the request failed, and the server did not say why",
            request_id,
            told.get("category"),
            status_code=status,
            body=bounded(body),
            retry_after=wait_asked({}, body),
        )


class ExperimentalWarning(FutureWarning):
    """A warning: this API may change or go in any release.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ExperimentalWarning)
        ...     warnings.warn("this may change", ExperimentalWarning)
    """


STATUS_ERRORS = {error.status_code: error for error in APIStatusError.__subclasses__()}
"""The error class of each status; other statuses from 500 count as 500."""


def error_for(status: int) -> type[APIStatusError]:
    """Return the error class of an HTTP status.

    Args:
        status: The HTTP status.

    Returns:
        The class; `APIStatusError` if the status has none of its own.

    Example:
        >>> error_for(429).__name__
        'RateLimitError'
    """
    return STATUS_ERRORS.get(status, InternalServerError if status >= 500 else APIStatusError)


def is_retryable(error: BaseException) -> bool:
    """Return True if the same request may succeed when it is sent again.

    The transport uses this function. To decide whether to start the operation again, read
    `error.is_retryable`.

    Args:
        error: The error of the request.

    Returns:
        True to send it again.

    Example:
        >>> is_retryable(RateLimitError("slow down")), is_retryable(BadRequestError("no such loss"))
        (True, False)
    """
    if isinstance(error, TinkerError) and error.should_retry is not None:
        return error.should_retry
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or (
            error.status_code >= 500 and error.status_code not in (501, 505)
        )
    return isinstance(error, APIConnectionError)
