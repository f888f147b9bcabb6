"""The protocol of a training platform, and the platform over the clients of tinkex.

The protocol has the five calls that a training loop needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.record import Record
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SamplingParams
from tinkex.types.training import ForwardBackwardOutput, LoraConfig, OptimStepResponse

if TYPE_CHECKING:
    from tinkex.client.sampling_client import SamplingClient
    from tinkex.client.service import ServiceClient
    from tinkex.client.training_client import TrainingClient

S = TypeVar("S")

DEFAULT_RANK = 32


class SessionConfig(Record, frozen=True, kw_only=True):
    """The base model and the adapter of a session.

    Attributes:
        base_model: The name of the model to adapt.
        lora: The shape of a new adapter; of rank 32 by default.
        checkpoint: The result of `save_checkpoint` of the same platform, to start from its weights.
            The optimizer starts from zero.

    Example:
        >>> SessionConfig(base_model="tinkex/tiny", lora=LoraConfig(rank=8)).shape.rank
        8
    """

    base_model: str
    lora: LoraConfig | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.lora is not None and self.checkpoint is not None:
            raise ValueError("give lora or checkpoint, not both: a checkpoint has its own shape")

    @property
    def shape(self) -> LoraConfig:
        """The shape of a new adapter."""
        return self.lora if self.lora is not None else LoraConfig(rank=DEFAULT_RANK)


@runtime_checkable
class TrainingPlatform(Protocol[S]):
    """A platform that trains LoRA adapters and samples from them.

    S is the type of its sessions. A loop that is written for it runs on every platform. Calls wait
    for their result. Losses of data are summed. Gradients of passes add up until a step applies and
    clears them. An unknown loss is a `ValueError`.

    Example:
        >>> def train(platform: TrainingPlatform, data: list[Datum]) -> float:
        ...     session = platform.create_session(SessionConfig(base_model="tinkex/tiny"))
        ...     for _ in range(3):
        ...         loss = platform.forward_backward(session, data, "cross_entropy").metrics[
        ...             "loss:sum"
        ...         ]
        ...         platform.optim_step(session, AdamParams(learning_rate=1e-3))
        ...     return loss
        >>> train(TinkexPlatform(service), data) < 10
        True
        >>> train(MemoryPlatform(), data)
        46.0...
    """

    def create_session(self, config: SessionConfig) -> S:
        """Start to train a new adapter, or the weights of a checkpoint.

        Args:
            config: The base model, the adapter's shape, and a checkpoint to start from.

        Returns:
            The session, which the other calls take. Its type depends on the platform.

        Example:
            >>> platform = TinkexPlatform(service)
            >>> session = platform.create_session(SessionConfig(base_model="tinkex/tiny"))
        """

    def forward_backward(
        self,
        session: S,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> ForwardBackwardOutput:
        """Compute the loss of data and add its gradient for the next step.

        The log-probabilities of the targets are in `loss_fn_outputs`, the loss is
        `metrics["loss:sum"]`.

        Args:
            session: The session that `create_session` returned.
            data: The examples; their losses are summed.
            loss_fn: The name of a loss.
            loss_fn_config: Settings of that loss.

        Returns:
            One record per datum, and metrics.

        Example:
            >>> platform = TinkexPlatform(service)
            >>> session = platform.create_session(SessionConfig(base_model="tinkex/tiny"))
            >>> platform.forward_backward(session, data, "cross_entropy").metrics["loss:sum"]
            10.6...
        """

    def optim_step(self, session: S, params: AdamParams) -> OptimStepResponse:
        """Apply the gradient with AdamW and clear it; without one, nothing changes.

        Args:
            session: The session that `create_session` returned.
            params: The hyper-parameters of this step.

        Returns:
            The metrics of the step, if there are any.

        Example:
            >>> platform = MemoryPlatform()
            >>> session = platform.create_session(SessionConfig(base_model="any"))
            >>> passed = platform.forward_backward(session, data, "cross_entropy")
            >>> platform.optim_step(session, AdamParams(learning_rate=1e-3)).metrics
            {'grad_norm:mean': ..., 'learning_rate:mean': 0.001}
        """

    def save_checkpoint(self, session: S, name: str) -> str:
        """Save the weights under a new name, for `SessionConfig.checkpoint`.

        Args:
            session: The session that `create_session` returned.
            name: The name.

        Returns:
            The place of the checkpoint, in a form that depends on the platform.

        Example:
            >>> platform = TinkexPlatform(service)
            >>> session = platform.create_session(SessionConfig(base_model="tinkex/tiny"))
            >>> platform.save_checkpoint(session, "step-100")
            'tinker://.../weights/step-100'
        """

    def sample(
        self,
        session: S,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
    ) -> SampleResponse:
        """Sample from the present weights.

        Args:
            session: The session that `create_session` returned.
            prompt: The tokens to continue.
            num_samples: The number of samples.
            sampling_params: Temperature, stop and the other settings.

        Returns:
            The samples.

        Example:
            >>> platform = TinkexPlatform(service)
            >>> session = platform.create_session(SessionConfig(base_model="tinkex/tiny"))
            >>> platform.sample(
            ...     session, prompt, num_samples=2, sampling_params=SamplingParams(max_tokens=8)
            ... )
            SampleResponse([SampledSequence(...), SampledSequence(...)])
        """


@dataclass(slots=True)
class TinkexSession:
    """A training run, and the sampler of its weights until they change."""

    client: TrainingClient
    sampler: SamplingClient | None = None


class Sampling(Generic[S]):
    """The sampling of a platform; it fills in the usual settings."""

    def sample(
        self,
        session: S,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
    ) -> SampleResponse:
        """Sample from the present weights."""
        return self._sample(session, prompt, num_samples, sampling_params or SamplingParams())

    def _sample(
        self, session: S, prompt: ModelInput, count: int, params: SamplingParams
    ) -> SampleResponse:
        raise NotImplementedError


class TinkexPlatform(Sampling[TinkexSession]):
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

    def _sample(
        self, session: TinkexSession, prompt: ModelInput, count: int, params: SamplingParams
    ) -> SampleResponse:
        if session.sampler is None:
            session.sampler = session.client.save_weights_and_get_sampling_client().result()
        return session.sampler.sample(prompt, count, params).result()
