"""An answer with everything about it, for those who want more than its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from tinkex.client.http.exchange import Reply
from tinkex.errors import APIResponseValidationError
from tinkex.types.record import from_builtins
from tinkex.wire.protocol import Operation


@dataclasses.dataclass(frozen=True, slots=True)
class APIResponse:
    """An answer with everything about it; names of headers are lower-case, times are seconds.

    Example:
        >>> response = http.with_raw_response.get("healthz").result()
        >>> response.status, response.data
        (200, {'status': 'ok'})
    """

    status: int
    headers: Mapping[str, str]
    method: str
    url: str
    body: bytes
    data: Any
    """The decoded body."""
    elapsed: float
    retries: int

    @property
    def status_code(self) -> int:
        """The status, by its other name."""
        return self.status

    def header(self, name: str) -> str | None:
        """A header, whatever the case of its name.

        Args:
            name: The header.

        Returns:
            Its value, or None.

        Example:
            >>> http.with_raw_response.get("healthz").result().header("Content-Type")
            'application/json'
        """
        return self.headers.get(name.lower())

    def parse(self, parser: Any = None) -> Any:
        """The data: as it is, as a record type reads it, or as a function makes of it.

        Args:
            parser: A record type, a function of the data, or None for the data as they are.

        Returns:
            What was made of the data.

        Raises:
            APIResponseValidationError: The data are not what the parser takes.
            TypeError: This is no parser.

        Example:
            >>> response = http.with_raw_response.get("get_server_capabilities").result()
            >>> response.parse(GetServerCapabilitiesResponse)
            GetServerCapabilitiesResponse(supported_models=[...])
            >>> response.parse(lambda data: len(data["supported_models"]))
            1
        """
        if parser is None:
            return self.data
        try:
            if isinstance(parser, type) and issubclass(parser, msgspec.Struct):
                return from_builtins(parser, self.data)
            if callable(parser):
                return parser(self.data)
        except Exception as error:
            raise APIResponseValidationError(
                f"{self.method} {self.url}: the answer is not what was asked for: {error}",
                body=self.data,
            ) from error
        raise TypeError(f"a parser is a record type or a function, got {type(parser).__name__}")


def wrapped(op: Operation, reply: Reply, data: Any) -> APIResponse:
    """A reply and what was made of it, as one."""
    return APIResponse(
        reply.status,
        reply.headers,
        op.method,
        reply.url,
        reply.body,
        data,
        reply.elapsed,
        reply.retries,
    )
