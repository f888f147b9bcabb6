"""BackcompatSamplingClientFuture: what methods that make a sampling client return."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from tinkex.client.futures.backcompat import ADVICE, BackcompatClientFuture, forwarding
from tinkex.client.http.request_headers import name_requests
from tinkex.client.sampling_client import SamplingClient, open_sampler
from tinkex.client.session import Session


@name_requests
@forwarding(SamplingClient)
class BackcompatSamplingClientFuture(BackcompatClientFuture[SamplingClient], SamplingClient):
    """The future of a SamplingClient: `await` it, or call `.result()`.

    It can still be used as if it were the client, with a warning. A pickle of it is one of the
    client.

    Example:
        >>> service.create_sampling_client(base_model="tinkex/tiny").result()
        SamplingClient('...:sample:0')
    """

    def __reduce__(self) -> Any:
        message = f"DEPRECATED: pickling a {type(self).__name__} will be removed: {ADVICE}"
        warnings.warn(message, FutureWarning, stacklevel=2)
        return self.result().__reduce__()


def open_later(session: Session, **options: Any) -> BackcompatSamplingClientFuture:
    """Begin to open a sampler; `options` are those of `open_sampler`."""
    return BackcompatSamplingClientFuture(
        session.create(functools.partial(open_sampler, session, SamplingClient, **options))
    )
