"""What a training platform is: five calls that a training loop needs, whoever computes behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.record import Record
from tinkex.types.sampling import SampleResponse, SamplingParams
from tinkex.types.training import AdamParams, ForwardBackwardOutput, LoraConfig, OptimStepResponse

S = TypeVar("S")

DEFAULT_RANK = 32


class SessionConfig(Record, frozen=True, kw_only=True):
    """What to train.

    Attributes:
        base_model: The name of the model to adapt.
        lora: The shape of a fresh adapter, of rank 32 unless it is given.
        checkpoint: What `save_checkpoint` of the same platform gave, to start from its weights
            instead; the optimizer starts afresh.

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
        """The shape of a fresh adapter."""
        return self.lora if self.lora is not None else LoraConfig(rank=DEFAULT_RANK)


@runtime_checkable
class TrainingPlatform(Protocol[S]):
    """Trains LoRA adapters and samples from them; S is what a platform calls a session.

    A loop that is written against it runs on every platform. Calls wait for their result. Losses of
    data are summed, gradients of passes add up until a step applies and clears them, and a loss
    that there is not is a `ValueError`.

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
        """Start training a fresh adapter, or the weights of a checkpoint.

        Args:
            config: The base model, the adapter's shape, and a checkpoint to start from.

        Returns:
            What the other calls take; what it is, is the platform's own.

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
        """Compute the loss of data and add its gradient to what the next step applies.

        The log-probabilities of the targets are in `loss_fn_outputs`, the loss is
        `metrics["loss:sum"]`.

        Args:
            session: What `create_session` gave.
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
            session: What `create_session` gave.
            params: The hyper-parameters of this step.

        Returns:
            The step's metrics, as far as there are any.

        Example:
            >>> platform = MemoryPlatform()
            >>> session = platform.create_session(SessionConfig(base_model="any"))
            >>> passed = platform.forward_backward(session, data, "cross_entropy")
            >>> platform.optim_step(session, AdamParams(learning_rate=1e-3)).metrics
            {'grad_norm:mean': ..., 'learning_rate:mean': 0.001}
        """

    def save_checkpoint(self, session: S, name: str) -> str:
        """Keep the weights as they are under a name that is new; what it gives can be
        `SessionConfig.checkpoint`.

        Args:
            session: What `create_session` gave.
            name: The name.

        Returns:
            Where the checkpoint is, in the platform's own terms.

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
        """Sample from the weights as they are.

        Args:
            session: What `create_session` gave.
            prompt: What to continue.
            num_samples: How many samples to draw.
            sampling_params: How to draw them.

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
