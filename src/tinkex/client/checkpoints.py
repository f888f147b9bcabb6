"""Experimental methods of RestClient: the search for checkpoints."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from tinkex import protocol
from tinkex.client.naming import name_requests
from tinkex.errors import ExperimentalWarning
from tinkex.futures import users_level

if TYPE_CHECKING:
    from tinkex.futures import APIFuture
    from tinkex.protocol import Operation
    from tinkex.types.checkpoint_search import CheckpointSearchRequest, CheckpointSearchResponse


class Caller(Protocol):
    """A client that calls operations."""

    def _call(self, op: Operation, request: Any = None) -> APIFuture[Any]: ...


@functools.partial(name_requests, owner="RestClient")
class CheckpointMethods:
    """Methods of RestClient that are about many checkpoints."""

    def search_checkpoints(self: Caller, request: CheckpointSearchRequest) -> APIFuture[CheckpointSearchResponse]:
        """Search your checkpoints, newest first. Experimental: it may change in any release.

        A page's `next_cursor` is the next request's `cursor`; the last page has none.

        Args:
            request: The checkpoints to look for, and the place to go on from.

        Returns:
            A future of a page of checkpoints.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> request = types.CheckpointSearchRequest(checkpoint_type="training", limit=1)
            >>> page = rest.search_checkpoints(request).result()
            >>> [checkpoint.base_model for checkpoint in page.checkpoints]
            ['tinkex/tiny']
        """
        warn_experimental("search_checkpoints")
        return self._call(protocol.SEARCH_CHECKPOINTS, request)


def warn_experimental(method: str) -> None:
    """Tell a method's caller that it may change."""
    warnings.warn(
        f"RestClient.{method} is experimental: it may change or go in any release without notice",
        ExperimentalWarning,
        stacklevel=users_level(),
    )
