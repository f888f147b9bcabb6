"""The interface of engines: synchronous methods, without HTTP and SQL.

One worker thread owns an engine and makes every call. A call either succeeds and has its whole
effect, or raises and has none: `EngineError` with `category="user"` for a caller's mistake, any
other exception for an internal fault. This module imports neither torch nor the server, so that a
fake, a cluster or another server can take the engine's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, TypeAlias, TypeVar

from tinkex.types.inputs import Datum
from tinkex.types.optimizers import (
    AdamOptimizerConfig,
    DimuonOptimizerConfig,
    OptimizerConfigBase,
    OptimParams,
)
from tinkex.types.sampled import SampleResponse, StopReason
from tinkex.types.sampling import SampleRequest
from tinkex.types.sessions import CreateCustomLossRequest
from tinkex.types.tensors import Array
from tinkex.types.training import ForwardBackwardOutput, LoraConfig

if TYPE_CHECKING:
    from tinkex.text.json_tokenizer import Tokenizer


class Place(Protocol):
    """A place for the files of one object: a directory here, or storage elsewhere.

    Its owner makes the files durable once they are written.
    """

    def file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file of this name for writing."""


class Writer(Protocol):
    """The files of an object as it was when the writer was made."""

    def write(self, place: Place) -> None:
        """Write the files.

        It may be called later and on another thread, while the engine goes on.
        """


@dataclass(frozen=True, slots=True)
class Directory(Place):
    """A directory on this machine, which exists."""

    path: Path

    def file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file of this name for writing."""
        return (self.path / name).open("wb")


Optimizer: TypeAlias = OptimizerConfigBase
Item = TypeVar("Item")

ADAMW, DIMUON = AdamOptimizerConfig(), DimuonOptimizerConfig()
"""The optimizers there are; the first is an adapter's unless another is asked for."""
RECORDED_TOKENS = 20
"""The number of the likeliest tokens that a recording holds at each position."""


class EngineError(Exception):
    """An operation that cannot be done; nothing has changed."""

    def __init__(self, message: str, category: Literal["user", "server"] = "user") -> None:
        super().__init__(message)
        self.category = category


class EngineLost(EngineError):
    """The process of an engine is gone; an operation under way may or may not have taken place."""

    def __init__(self, why: str) -> None:
        super().__init__(why, "server")


def find(table: Mapping[str, Item], kind: str, name: str) -> Item:
    """Return the thing of this kind and name, which a caller asks for."""
    if name not in table:
        raise EngineError(f"there is no {kind} {name!r}")
    return table[name]


def check_optimizer(config: OptimizerConfigBase) -> None:
    """Refuse an optimizer, or a version or setting of one, that is not supported."""
    if not isinstance(config, AdamOptimizerConfig | DimuonOptimizerConfig):
        known = f"{ADAMW.to_wire()} and {DIMUON.to_wire()}"
        raise EngineError(f"optimizer {config.to_wire()} is not supported; supported are {known}")


def token_limit(request: SampleRequest, prompt: int, context: int) -> int:
    """Return the most tokens of a sample.

    One token beyond the window is allowed when only prompt scores are wanted.

    Raises:
        EngineError: The prompt and the sample do not fit the window.
    """
    asked = request.sampling_params.max_tokens
    if asked is None:
        return context - prompt
    scoring = asked == 1 and (request.prompt_logprobs or request.topk_prompt_logprobs)
    if prompt + asked > context and not scoring:
        raise EngineError(
            # by these words programs know that the prompt, and nothing else, is too long
            f"Prompt length plus max_tokens exceeds the context window: {prompt} prompt tokens + "
            f"{asked} max_tokens "
            f"> {context}; at most {max(0, context - prompt)} tokens can be sampled"
        )
    return asked


def no_tokenizer() -> Tokenizer:
    """Raise the error for a base model without a tokenizer."""
    raise EngineError("this base model has no tokenizer on the server", "server")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model an engine serves.

    Attributes:
        digest: Tells these weights from others of the same name; empty when that is not known.
        tokenizer: Returns its tokenizer, which has its chat template, and which is read once.
            Raises EngineError when there is none.
    """

    name: str
    context_length: int
    vocab_size: int
    arch: str
    directory: Path | None = None
    eos_tokens: frozenset[int] = field(default_factory=frozenset)
    digest: str = ""
    tokenizer: Callable[[], Tokenizer] = field(default=no_tokenizer, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Recording:
    """The distributions that a sample was drawn from.

    It has S tokens, and the K likeliest ones at each of them.

    Attributes:
        tokens: Its tokens `[S]`.
        logprobs: Their log-probabilities as they are reported, temperature applied.
        model_logprobs: Those under the model as it is, at temperature 1.
        top_tokens: The likeliest tokens `[S, K]`, each once.
        top_logprobs: Their log-probabilities at temperature 1.
    """

    tokens: Array
    logprobs: Array
    model_logprobs: Array
    top_tokens: Array
    top_logprobs: Array

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return sum(getattr(self, each.name).nbytes for each in fields(self))


@dataclass(frozen=True, slots=True)
class Recalled:
    """The recording behind a datum: a sampled target at each position, ascending."""

    positions: Array
    recording: Recording


@dataclass(frozen=True, slots=True)
class SampleDone:
    """A sampling job that ended: with its samples, or with the reason it failed."""

    job: str
    result: SampleResponse | Exception
    recordings: Sequence[Recording] = ()
    """The recordings of all its samples, if the request asked for them."""


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token that a sample got: final, and the same as in the job's result."""

    index: int
    """The number of its sample in the job."""
    token: int
    logprob: float
    stop_reason: StopReason | None = None
    """The reason why the sample ends, when this is its last token."""
    version: int | None = None
    """The version of an in-flight target's weights that drew it."""
    reused: int = 0
    """The number of tokens of the prompt that were found in the cache."""


@dataclass(frozen=True, slots=True)
class PassDone:
    """A pass that ended: with its output, or with the reason why nothing was added."""

    job: str
    result: ForwardBackwardOutput | Exception


Listener: TypeAlias = Callable[[Sequence[DrawnToken]], object]
"""Takes the tokens that a job got in a step; called on the thread that makes the step, and must be
quick."""


@dataclass(frozen=True, slots=True)
class PassJob:
    """A pass to be run.

    Attributes:
        backward: Adds the gradient of the summed loss to the adapter's buffer.
        recalled: The recording behind each datum, for the loss `stable_reinforce`.
    """

    job: str
    adapter: str
    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    backward: bool = True
    owner: str = ""
    recalled: Sequence[Recalled] | None = None


@dataclass(frozen=True, slots=True)
class SampleJob:
    """A sampling job to be run.

    Attributes:
        sampler: The name of a sampler, or of an in-flight target.
        seed: The seed that was drawn, if the request has none.
        listener: Gets the job's tokens as they are drawn; without one nothing is gathered.
        cache: Jobs of the same one share the keys and values of prompts, whichever weights made
            them; without one, jobs of equal weights do.
    """

    job: str
    sampler: str
    request: SampleRequest
    seed: int
    listener: Listener | None = None
    owner: str = ""
    cache: str = ""


class Engine(Protocol):
    """An engine. The server names adapters and snapshots with strings of its choice."""

    def models(self) -> Sequence[BaseModel]:
        """Return the base models on offer."""

    def create(
        self, adapter: str, base_model: str, lora: LoraConfig, optimizer: Optimizer = ADAMW
    ) -> None:
        """Make a fresh adapter: A seeded, B zero, no gradient, no optimizer state.

        Its optimizer never changes.
        """

    def drop(self, adapter: str) -> None:
        """Forget an adapter; unknown names are ignored. Its passes fail with the next step."""

    def pass_start(self, work: PassJob) -> None:
        """Validate and admit a pass.

        Passes advance with each `pass_step`, those of several adapters together, fairly by owner;
        those of one adapter end in the order in which they were admitted. Its weights must not
        change before they have ended.
        """

    def pass_step(self) -> Sequence[PassDone]:
        """Advance the passes by a step, and return those that ended.

        A step should not take much longer than a second.
        """

    def passing(self) -> bool:
        """Return True if any pass is unfinished."""

    def create_loss(self, loss_id: str, request: CreateCustomLossRequest) -> None:
        """Take a loss that was sent as a graph.

        Passes use it as loss `custom`, with its id in the configuration.
        """

    def drop_losses(self, prefix: str) -> None:
        """Forget the losses whose ids begin with this."""

    def drop_gradients(self, adapter: str) -> None:
        """Clear the gradient buffer without a step."""

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        """Apply and clear the gradient buffer; returns metrics named `name:reduction`.

        The hyper-parameters must be those of the optimizer that the adapter was created with.
        """

    def writer(self, adapter: str, *, optimizer: bool) -> Writer:
        """Return the writer of an adapter as it is now: PEFT files, and optimizer state."""

    def load(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        """Replace an adapter's weights, and its optimizer state, by saved ones.

        Pending gradients are dropped.
        """

    def snapshot(self, adapter: str, sampler: str) -> None:
        """Freeze an adapter's present weights as a sampler."""

    def sampler_writer(self, sampler: str) -> Writer:
        """Return the writer of a snapshot's weights as PEFT files."""

    def load_sampler(self, sampler: str, base_model: str, directory: Path | None) -> None:
        """Make a sampler of saved weights; of the bare base model without a directory."""

    def point(self, target: str, sampler: str, version: int) -> None:
        """Give an in-flight target the weights of a sampler, as this version of its own.

        Running samples of the target draw their next token with them. They keep their keys and
        values; a prompt that is being scored keeps its weights to its end. A version that is not
        above the present one changes nothing.
        """

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler once its jobs have ended, and the target with its weights.

        Unknown names are ignored.
        """

    def sample_start(self, work: SampleJob) -> None:
        """Validate and admit a sampling job; it advances with each `sample_step`.

        Where there is no room for all, owners take turns.
        """

    def sample_step(self) -> Sequence[SampleDone]:
        """Advance the jobs by one step, and return those that ended.

        A step is one token of each, or one prefill.
        """

    def sample_cancel(self, job: str) -> None:
        """Drop a job without a result; unknown names are ignored."""

    def sampling(self) -> bool:
        """Return True if any job is unfinished."""


def run_pass(
    engine: Engine,
    adapter: str,
    data: Sequence[Datum],
    loss_fn: str,
    config: Mapping[str, float | str],
    *,
    backward: bool = True,
    recalled: Sequence[Recalled] | None = None,
) -> ForwardBackwardOutput:
    """Run a pass to its end, on an engine without other passes."""
    given = (adapter, data, loss_fn, config)
    engine.pass_start(PassJob("the only one", *given, backward=backward, recalled=recalled))
    while engine.passing():
        for done in engine.pass_step():
            if isinstance(done.result, Exception):
                raise done.result
            return done.result
    raise AssertionError("the pass did not end")
