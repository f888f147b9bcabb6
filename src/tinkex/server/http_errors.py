"""The one way to answer a request with an HTTP error."""

from __future__ import annotations

from collections.abc import Mapping


class Refusal(Exception):
    """A request that is answered with an HTTP error; `fields` join `detail` in its body."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        self.fields = dict(fields or {})
