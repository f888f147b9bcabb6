"""Inputs of a model, and the datums of a pass."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np

from tinkex.types.chunks import (
    EMPTY,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
    chunk_at,
    token_array,
)
from tinkex.types.record import Fixed, Wired, put
from tinkex.types.spans import ProvenanceSpans, check_tiling, span_wire, spans
from tinkex.types.tensors import Array, TensorData, TensorDtype


class ModelInput(Fixed):
    """A sequence of chunks; immutable, every change returns a new one.

    Example:
        >>> ModelInput.from_ints([1, 2, 3]).length
        3
    """

    __slots__ = ("chunks",)
    FIELDS = ("chunks",)
    FORM = ("chunks", list, "a model input must be an object with a list of chunks")

    chunks: list[ModelInputChunk]

    def __init__(self, *, chunks: Sequence[ModelInputChunk | Mapping[str, Any]] = ()) -> None:
        put(self, "chunks", [chunk_at(index, chunk) for index, chunk in enumerate(chunks)])

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | Array) -> Self:
        """From token ids: a list or an integer array.

        Args:
            tokens: The token ids.

        Returns:
            An input of one chunk.

        Example:
            >>> ModelInput.from_ints(np.array([464, 2068, 7586])).to_ints()
            [464, 2068, 7586]
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        tokenizer: Any = None,
        model_name: str | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> Self:
        """From text, as it is: no chat template is put around it.

        Args:
            text: What to tokenise.
            tokenizer: An object with `encode`, such as `TrainingClient.get_tokenizer()` returns.
            model_name: The model whose tokenizer to load, when none is given.
            add_special_tokens: Whether the tokenizer adds what it puts around a text.
            options: Passed to `tinkex.tokenizers.encode`, when a model is named.

        Returns:
            An input of one chunk.

        Raises:
            TokenizerError: Neither a tokenizer nor a model name was given, or the text is none; it
                is a ValueError.

        Example:
            >>> from tinkex.tokenizers import load_tokenizer
            >>> tokenizer = load_tokenizer(
            ...     "tinkex/tiny", backend="tokenizers"
            ... )  # or training.get_tokenizer()
            >>> tokenizer.decode(ModelInput.from_text("hello", tokenizer=tokenizer).to_ints())
            '<|bos|>hello'
        """
        if tokenizer is None or options:
            # By name and only here: types are the lowest layer and cost nothing to import.
            tokenizers: Any = importlib.import_module("tinkex.tokenizers")
            if tokenizer is not None:
                raise tokenizers.TokenizerError(
                    f"{min(options)} has no effect on a tokenizer that is given"
                )
            if not isinstance(model_name, str) or not model_name:
                raise tokenizers.TokenizerError("from_text needs a tokenizer or a model_name")
            if add_special_tokens:
                return cls.from_ints(tokenizers.encode(text, model_name, **options))
            tokenizer = tokenizers.get_or_load_tokenizer(
                tokenizers.get_tokenizer_id(model_name), **options
            )
        return cls.from_ints(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @classmethod
    def from_text_or_raise(cls, text: str, **options: Any) -> Self:
        """Like `from_text`, under the name that older programs know."""
        return cls.from_text(text, **options)

    @classmethod
    def empty(cls) -> Self:
        """With nothing in it.

        Example:
            >>> ModelInput.empty().append_int(464).to_ints()
            [464]
        """
        return cls()

    def append(self, chunk: ModelInputChunk) -> Self:
        """With a chunk added at the end.

        Args:
            chunk: The chunk.

        Returns:
            A new input; this one stays as it is.

        Example:
            >>> prompt = ModelInput.from_ints([464])
            >>> (
            ...     prompt.append(ImageChunk(data=b"...", format="png", expected_tokens=64)).length,
            ...     prompt.length,
            ... )
            (65, 1)
        """
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """With one token added at the end.

        Args:
            token: The token id.

        Returns:
            A new input; this one stays as it is.

        Example:
            >>> prompt = ModelInput.from_ints([464, 2068])
            >>> prompt.append_int(7586).to_ints(), prompt.to_ints()
            ([464, 2068, 7586], [464, 2068])
        """
        if self.chunks and isinstance(last := self.chunks[-1], EncodedTextChunk):
            joined = np.append(last.tokens_np, token_array([token]))
            return type(self)(chunks=[*self.chunks[:-1], EncodedTextChunk(tokens=joined)])
        return self.append(EncodedTextChunk(tokens=[token]))

    @property
    def length(self) -> int:
        """Number of tokens in the input."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def estimated_bytes(self) -> int:
        """Size as budgets of requests count it: ten bytes a token, and media as they are."""
        return self._size(per_token=10)

    def _size(self, per_token: int) -> int:
        size = 0
        for chunk in self.chunks:
            match chunk:
                case EncodedTextChunk():
                    size += per_token * chunk.length
                case ImageChunk():
                    size += len(chunk.data)
                case DmelChunk():
                    size += len(chunk.dmel)
                case ImageAssetPointerChunk():
                    size += len(chunk.location)
        return size

    @property
    def is_text(self) -> bool:
        """True if every chunk is text."""
        return all(isinstance(chunk, EncodedTextChunk) for chunk in self.chunks)

    def to_numpy(self) -> Array:
        """All tokens as one int32 array; `ValueError` when a chunk is not text.

        Raises:
            ValueError: A chunk is not text.

        Example:
            >>> ModelInput.from_ints([464, 2068]).to_numpy()
            array([ 464, 2068], dtype=int32)
        """
        arrays = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(f"cannot read a chunk of type {chunk.type!r} as tokens")
            arrays.append(chunk.tokens_np)
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else EMPTY

    def to_ints(self) -> list[int]:
        """All tokens as a list; `ValueError` when a chunk is not text.

        Example:
            >>> ModelInput(chunks=[{"tokens": [1, 2]}, {"tokens": [3]}]).to_ints()
            [1, 2, 3]
        """
        return cast("list[int]", self.to_numpy().tolist())

    def to_wire(self) -> dict[str, Any]:
        """JSON form.

        Example:
            >>> ModelInput.from_ints([1, 2]).to_wire()
            {'chunks': [{'tokens': [1, 2], 'type': 'encoded_text'}]}
        """
        return {"chunks": [chunk.to_wire() for chunk in self.chunks]}

    def _full(self) -> dict[str, Any]:
        return {"chunks": [chunk.model_dump() for chunk in self.chunks]}

    @classmethod
    def _read(cls, value: Any) -> Self:
        return cls(chunks=value["chunks"])

    def __hash__(self) -> int:
        return hash(tuple(self.chunks))

    def __repr__(self) -> str:
        return f"ModelInput(chunks={self.chunks!r})"

    def __reduce__(self) -> Any:
        return (_model_input, (self.chunks,))


def _model_input(chunks: list[ModelInputChunk]) -> ModelInput:
    return ModelInput(chunks=chunks)


LossFnInputs: TypeAlias = dict[str, TensorData]
"""The tensors that a loss needs, by name."""


LossFnOutput: TypeAlias = dict[str, TensorData]
"""Outputs of a loss for one datum, by name."""


INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}


SPARSE_INPUTS = frozenset({"target_tokens", "weights"})
"""Inputs that have one column per candidate and are mostly padding then."""


@dataclasses.dataclass(init=False, eq=False, repr=False, frozen=True, slots=True)
class Datum(Wired):
    """One training example: the tokens a model reads and the tensors its loss is computed from.

    Values of `loss_fn_inputs` may be lists, numpy arrays, torch tensors or TensorData.
    Two-dimensional torch tensors of target tokens or weights are stored sparsely when that is
    smaller. `with_provenance` adds where tokens came from.

    Example:
        >>> datum = Datum(
        ...     ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1.0]}
        ... )
        >>> datum.loss_fn_inputs["target_tokens"].dtype
        'int64'
    """

    FORM: ClassVar = (
        "model_input",
        object,
        "a datum must be an object with model_input and loss_fn_inputs",
    )

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = dataclasses.field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            model_input = read_input(model_input, "model_input")
        if loss_fn_inputs is not None and not isinstance(loss_fn_inputs, Mapping):
            raise TypeError(
                f"loss_fn_inputs must map names to tensors, got a {type(loss_fn_inputs).__name__}"
            )
        for name in loss_fn_inputs or ():
            if not isinstance(name, str):
                raise TypeError(f"loss_fn_inputs must map names to tensors, got the name {name!r}")
        tensors = {
            name: value if isinstance(value, TensorData) else _input_tensor(name, value)
            for name, value in (loss_fn_inputs or {}).items()
        }
        put(self, "model_input", model_input)
        put(self, "loss_fn_inputs", tensors)
        put(self, "model_input_spans", spans(model_input_spans, "model_input_spans"))
        put(self, "loss_fn_input_spans", spans(loss_fn_input_spans, "loss_fn_input_spans"))
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise ValueError(
                "provenance comes in pairs: give both model_input_spans and loss_fn_input_spans"
            )

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Self:
        """Return the datum with spans that say where its tokens came from.

        Args:
            model_input: Spans that cover the input's tokens, in order and without gaps.
            loss_fn_inputs: Spans that cover the target tokens in the same way.

        Returns:
            The datum with its spans.

        Raises:
            ValueError: The spans do not add up to the length of the tokens.

        Example:
            >>> datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
            >>> read = PromptProvenanceSpan(sequence_id="a", length=1)  # 2 and 3 were sampled
            >>> one, two = (SampledProvenanceSpan(sequence_id="a", length=n) for n in (1, 2))
            >>> datum = datum.with_provenance([read, one], [two])
            >>> datum.to_wire()["loss_fn_input_spans"]
            [{'sampled_tokens': {'sequence_id': 'a', 'offset': 0, 'length': 2}}]
        """
        check_tiling("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.shape is not None and len(targets.shape) == 1:
            check_tiling("loss_fn_inputs", loss_fn_inputs, targets.shape[0])
        return type(self)(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)

    @property
    def nbytes(self) -> int:
        """Size on the wire, as the protocol estimates it for cutting chunks."""
        size = self.model_input._size(per_token=4)
        for tensor in self.loss_fn_inputs.values():
            size += tensor.values.nbytes + sum(array.nbytes for array in tensor.csr or ())
        return size

    @property
    def estimated_bytes(self) -> int:
        """Size for request budgets: ten bytes per token and number; media count as they are."""
        numbers = sum(tensor.values.size for tensor in self.loss_fn_inputs.values())
        return self.model_input.estimated_bytes + 10 * numbers

    def to_wire(self) -> dict[str, Any]:
        """JSON form, as older dialects use it.

        Example:
            >>> Datum(ModelInput.from_ints([1]), {"target_tokens": [2]}).to_wire()["loss_fn_inputs"]
            {'target_tokens': {'data': [2], 'dtype': 'int64', 'shape': [1]}}
        """
        inputs = {name: tensor.to_wire() for name, tensor in self.loss_fn_inputs.items()}
        wire: dict[str, Any] = {"model_input": self.model_input.to_wire(), "loss_fn_inputs": inputs}
        if self.model_input_spans is not None and self.loss_fn_input_spans is not None:
            wire["model_input_spans"] = [span_wire(span) for span in self.model_input_spans]
            wire["loss_fn_input_spans"] = [span_wire(span) for span in self.loss_fn_input_spans]
        return wire

    @classmethod
    def _read(cls, value: Any) -> Self:
        inputs = value.get("loss_fn_inputs") or {}
        if not isinstance(inputs, Mapping):
            raise ValueError("loss_fn_inputs must be an object")
        tensors = {name: _wired_tensor(name, tensor) for name, tensor in inputs.items()}
        try:
            model_input = ModelInput.model_validate(value["model_input"])
        except ValueError as error:
            raise ValueError(f"model_input: {error}") from None
        try:
            return cls(
                model_input,
                tensors,
                value.get("model_input_spans"),
                value.get("loss_fn_input_spans"),
            )
        except TypeError as error:
            raise ValueError(f"bad provenance: {error}") from None

    def __hash__(self) -> int:
        return hash((self.model_input, *self.loss_fn_inputs))

    def __repr__(self) -> str:
        spans = "" if self.model_input_spans is None else ", with provenance"
        return (
            f"Datum(model_input={self.model_input!r}, "
            f"loss_fn_inputs={self.loss_fn_inputs!r}{spans})"
        )


def _wired_tensor(name: str, value: Any) -> TensorData:
    """A tensor in its JSON form, or bare numbers."""
    if not isinstance(value, Mapping):
        try:
            with np.errstate(over="raise", invalid="raise"):
                return _input_tensor(name, value)
        except FloatingPointError:
            raise ValueError(
                f"loss_fn_inputs[{name!r}]: holds a number that its dtype cannot hold"
            ) from None
    try:
        return TensorData.from_wire(value)
    except ValueError as error:
        raise ValueError(f"loss_fn_inputs[{name!r}]: {error}") from None


def read_input(value: Any, name: str) -> ModelInput:
    """A model input in its JSON form; anything else is refused with what to write instead."""
    if isinstance(value, Mapping):
        return ModelInput(**value)
    how = (
        "ModelInput.from_text(text, tokenizer=...)"
        if isinstance(value, str)
        else "ModelInput.from_ints(tokens)"
    )
    raise TypeError(f"{name} must be a ModelInput, got a {type(value).__name__}: use {how}")


def _input_tensor(name: str, value: Any) -> TensorData:
    try:
        if name in SPARSE_INPUTS and hasattr(value, "detach") and value.ndim == 2:
            return TensorData.from_torch_sparse(value)
        return TensorData.from_any(value, INPUT_DTYPES.get(name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss_fn_inputs[{name!r}]: {error}") from None
