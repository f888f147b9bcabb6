"""BackcompatTrainingClientFuture: what methods that make a training client return."""

from __future__ import annotations

from tinkex.client.futures.backcompat import BackcompatClientFuture, forwarding
from tinkex.client.http.request_headers import name_requests
from tinkex.client.training_client import TrainingClient


@name_requests
@forwarding(TrainingClient)
class BackcompatTrainingClientFuture(BackcompatClientFuture[TrainingClient], TrainingClient):
    """The future of a TrainingClient: `await` it, or call `.result()`.

    It can still be used as if it were the client, with a warning.

    Example:
        >>> service.create_lora_training_client("tinkex/tiny").result()
        TrainingClient('...:train:0')
    """

    def __copy__(self) -> BackcompatTrainingClientFuture:
        return type(self)(self._future)
