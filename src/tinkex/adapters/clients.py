"""The platform over the clients of tinkex, with any server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.adapters.platforms import SessionConfig
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SamplingParams
from tinkex.types.training import ForwardBackwardOutput, OptimStepResponse

if TYPE_CHECKING:
    from tinkex.client.sampling_client import SamplingClient
    from tinkex.client.service import ServiceClient
    from tinkex.client.training_client import TrainingClient


@dataclass(slots=True)
class TinkexSession:
    """A training run, and the sampler of its weights until they change."""

    client: TrainingClient
    sampler: SamplingClient | None = None


class TinkexPlatform:
    """The platform over a `ServiceClient`, which its owner closes.

    Example:
        >>> with ServiceClient(base_url="local") as service:
        ...     platform = TinkexPlatform(service)
        ...     session = platform.create_session(SessionConfig(base_model="tinkex/tiny"))
        ...     platform.forward_backward(session, data, "cross_entropy").metrics["loss:sum"]
        10.6...
    """

    def __init__(self, service: ServiceClient) -> None:
        self._service = service

    def create_session(self, config: SessionConfig) -> TinkexSession:
        """Start a training run."""
        if config.checkpoint is not None:
            client = self._service.create_training_client_from_state(
                config.checkpoint, config.base_model
            ).result()
        else:
            shape = config.shape
            client = self._service.create_lora_training_client(
                config.base_model,
                rank=shape.rank,
                seed=shape.seed,
                train_mlp=shape.train_mlp,
                train_attn=shape.train_attn,
                train_unembed=shape.train_unembed,
            ).result()
        return TinkexSession(client)

    def forward_backward(
        self,
        session: TinkexSession,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> ForwardBackwardOutput:
        """Compute any loss of the server and add its gradient."""
        return session.client.forward_backward(data, loss_fn, loss_fn_config).result()

    def optim_step(self, session: TinkexSession, params: AdamParams) -> OptimStepResponse:
        """Apply the gradient and clear it."""
        session.sampler = None
        return session.client.optim_step(params).result()

    def save_checkpoint(self, session: TinkexSession, name: str) -> str:
        """Save a training state; return its `tinker://` path."""
        return session.client.save_state(name).result().path

    def sample(
        self,
        session: TinkexSession,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
    ) -> SampleResponse:
        """Sample from the present weights."""
        if session.sampler is None:
            session.sampler = session.client.save_weights_and_get_sampling_client().result()
        return session.sampler.sample(
            prompt=prompt,
            num_samples=num_samples,
            sampling_params=sampling_params or SamplingParams(),
        ).result()
