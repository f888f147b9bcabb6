"""The operations that a loss sent as a graph may use: tables of names, and checks of arguments
before a call.

To allow an operation, add its name to a table. It must be pure, must not need large intermediate
results, and must not turn values into sizes or Python numbers. The size of its result is bounded
before the call: by a bound that holds for its whole row, or on the meta device, which allocates
nothing. One that takes indices needs a check of their range, because a GPU does not survive one
that is out of it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What a graph may cost.

    Attributes:
        nodes: Most steps.
        values: Most values in its arguments, at any depth.
        depth: Deepest nesting of an argument.
        text: Longest text.
        metrics: Most metrics.
        pieces: Most tensors that one step may make, and most values in one list of an argument.
        elements: Most numbers in one step's result ...
        growth: ... or so many times those in the loss's inputs, if that is more.
        total_elements: Most numbers in the results of all steps of one datum ...
        total_growth: ... or so many times those in the loss's inputs, if that is more.
        work: Most multiplications in one matrix product.
        pass_work: Most multiplications for all data of a pass, with their gradients; a number that
            is read or made counts as `number_work` of them ...
        pass_growth: ... or so many times the numbers in the pass's inputs, if that is more. One
            datum may use half of the former, or so many times its own.
        number_work: How many multiplications a number counts as.
        seconds: Longest computation of the loss for all data of a pass; it is stopped between two
            steps ...
        seconds_growth: ... or so many seconds for each number in the pass's inputs, if that is
            more.
    """

    nodes: int = 1024
    values: int = 1 << 14
    depth: int = 8
    text: int = 256
    metrics: int = 64
    pieces: int = 1024
    elements: int = 1 << 24
    growth: int = 4
    total_elements: int = 1 << 26
    total_growth: int = 64
    work: int = 1 << 33
    pass_work: int = 1 << 36
    pass_growth: int = 1 << 22
    number_work: int = 32
    seconds: float = 10.0
    seconds_growth: float = 1e-3


class Refusal(Exception):
    """Why a step cannot be done; who catches it adds the step's name."""


def _no_check(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    pass


WORDS = re.compile(r"mean|sum|none|floor|constant|fro|linear|lower|higher|nearest|midpoint|tanh")
EQUATION = re.compile(r"[a-zA-Z ]{0,8}(,[a-zA-Z ]{0,8})?(->[a-zA-Z ]{0,8})?")
TENSOR_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "T", "mT")
RESULT_ATTRIBUTES = ("values", "indices")
ATTRIBUTES = re.compile("|".join((*TENSOR_ATTRIBUTES, *RESULT_ATTRIBUTES)))


@dataclass(frozen=True, slots=True)
class Operation:
    """An entry of the tables.

    Attributes:
        function: What is called.
        check: Refuses arguments before the call; gives the multiplications of a matrix product.
        texts: What its texts may be.
        makes: Whether it makes a tensor from none, and must be told the device.
        bound: Most numbers in a tensor of the result. None, or a bound of None, leaves that to the
            meta device: it knows every operation, but takes longer than most of them.
    """

    function: Callable[..., Any]
    check: Callable[[Arguments, Keywords, GraphLimits], int | None] = _no_check
    texts: re.Pattern[str] = WORDS
    makes: bool = False
    bound: Callable[[Arguments, Keywords], int | None] | None = None


def leaves(value: Any) -> Iterator[Any]:
    """The values in an argument, containers taken apart."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


def replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument with its leaves changed."""
    if isinstance(value, list):
        return [replace(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(replace(item, change) for item in value)
    if isinstance(value, dict):
        return {key: replace(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(replace(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def _bind(args: Arguments, kwargs: Keywords, *names: str) -> list[Any]:
    """Arguments by name: positional ones in order, then keywords; None for those not given."""
    return [
        args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(names)
    ]


def _check_numbers(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if kwargs or not all(isinstance(value, int | float) for value in args):
        raise Refusal("takes plain numbers only; use torch for tensors")


def _check_operands(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if kwargs or not all(isinstance(value, int | float | torch.Tensor) for value in args):
        raise Refusal("takes tensors and numbers only")


def _check_sum(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if not args or not all(isinstance(value, tuple) for value in args):
        return _check_operands(args, kwargs, limits)
    # Shapes are tuples: x.shape[:-1] + (1,). Tuples of tuples could grow without end.
    if (
        kwargs
        or sum(map(len, args)) > limits.pieces
        or not all(type(item) is int for value in args for item in value)
    ):
        raise Refusal(f"joins shapes of at most {limits.pieces} integers")


def _check_power(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    _check_operands(args, kwargs, limits)
    if (
        len(args) == 2
        and all(isinstance(value, int) for value in args)
        and abs(args[0]) > 1
        and args[1] > 64
    ):
        raise Refusal("makes an integer that is too large")


def _check_division(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    # The least integer divided by -1 does not fit: some of torch's kernels end the process over it.
    dividend, divisor = _bind(args, kwargs, "input", "other")
    whole = all(isinstance(value, int) or _is_whole(value) for value in (dividend, divisor))
    if whole and _is_whole(divisor) and not divisor.is_meta and bool((divisor == -1).any()):
        raise Refusal("cannot divide whole numbers by -1; use .float()")
    if whole and isinstance(divisor, int) and divisor == -1:
        raise Refusal("cannot divide whole numbers by -1; use .float()")


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _check_quotient(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    _check_operands(args, kwargs, limits)
    _check_division(args, kwargs, limits)


def _check_product(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> int:
    # Products of more dimensions copy what they broadcast, which may be larger than what they give.
    if (
        kwargs
        or len(args) != 2
        or not all(isinstance(value, torch.Tensor) and value.ndim <= 2 for value in args)
    ):
        raise Refusal("takes two tensors of at most two dimensions")
    columns = args[1].shape[1] if args[1].ndim == 2 else 1
    return _check_work(args[0].numel() * columns, limits)


def _check_work(multiplications: int, limits: GraphLimits) -> int:
    if multiplications > limits.work:
        raise Refusal(f"needs {multiplications} multiplications; at most {limits.work} are allowed")
    return multiplications


def _check_equation(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> int:
    if kwargs or not args or not isinstance(args[0], str):
        raise Refusal("takes an equation, then one or two tensors")
    terms = args[0].replace(" ", "").split("->")[0].split(",")
    tensors = args[1:]
    fits = len(terms) == len(tensors) and all(
        isinstance(tensor, torch.Tensor) and tensor.ndim == len(term) <= 2
        for term, tensor in zip(terms, tensors, strict=True)
    )
    if not fits:
        raise Refusal("takes one tensor of at most two dimensions for each term of the equation")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, size in zip(term, tensor.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return _check_work(math.prod(sizes.values()), limits)


def _check_named(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    # By place, these take `inplace` or `out`; torch.fx writes what follows the tensor by name.
    if len(args) != 1 or not isinstance(args[0], torch.Tensor):
        raise Refusal("takes a tensor, and everything else by name")


def _check_same_shapes(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    # These broadcast inside and give a single number: a small result would hide a large allocation.
    shapes = {value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
    if len(shapes) > 1:
        raise Refusal(
            "takes tensors of one shape, got "
            f"{', '.join(sorted(str(list(shape)) for shape in shapes))}"
        )


def _check_pieces(tensor: Any, dim: Any, size: Any, limits: GraphLimits) -> None:
    """Refuse to cut a tensor into too many pieces of a size; a list of sizes is short already."""
    dim = 0 if dim is None else dim
    if not isinstance(tensor, torch.Tensor) or type(dim) is not int:
        raise Refusal("takes a tensor, and a dimension that is an integer")
    if isinstance(size, int) and dim_size(tensor, dim) > limits.pieces * max(size, 1):
        raise Refusal(f"makes more than {limits.pieces} tensors")


def _check_split(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    name = "split_size" if "split_size" in kwargs else "split_size_or_sections"
    tensor, size, dim = _bind(args, kwargs, "tensor", name, "dim")
    _check_pieces(tensor, dim, size, limits)


def _check_chunk(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    tensor, chunks, dim = _bind(args, kwargs, "input", "chunks", "dim")
    _check_pieces(tensor, dim, None, limits)
    if not isinstance(chunks, int) or chunks > limits.pieces:
        raise Refusal(f"makes at most {limits.pieces} tensors")


def _check_unbind(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    tensor, dim = _bind(args, kwargs, "input", "dim")
    _check_pieces(tensor, dim, 1, limits)


def _check_repeats(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if type(_bind(args, kwargs, "input", "repeats")[1]) is not int:
        raise Refusal("repeats by an integer only: the size of a result cannot depend on values")


def _check_differences(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    order = _bind(args, kwargs, "input", "n")[1]
    # one round of the computation each
    if order is not None and not (type(order) is int and 0 <= order <= 8):
        raise Refusal("takes an order n of at most 8")


def _check_where(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if len(args) + len(kwargs) != 3:
        raise Refusal(
            "takes a condition and two values: the size of a result cannot depend on values"
        )


def _check_sizes(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if any(isinstance(value, torch.Tensor) for value in leaves((args, kwargs))):
        raise Refusal("takes numbers, such as x.shape[0], not tensors")


def _check_view(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if kwargs or not all(type(value) is int for value in leaves(args[1:])):
        raise Refusal("takes sizes that are integers")


def dim_size(tensor: torch.Tensor, dim: int) -> int:
    """The size of a dimension; a single number has one of size 1."""
    if not -max(tensor.ndim, 1) <= dim < max(tensor.ndim, 1):
        raise Refusal(f"there is no dimension {dim} in a tensor of shape {list(tensor.shape)}")
    return tensor.shape[dim] if tensor.ndim else 1


def _check_range(index: torch.Tensor, low: int, high: int) -> None:
    if index.is_meta or index.numel() == 0:
        return
    if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise Refusal(
            f"takes an index of integers, got {str(index.dtype).removeprefix('torch.')}; use "
            ".long()"
        )
    if int(index.min()) < low or int(index.max()) >= high:
        raise Refusal(f"has an index outside {low} to {high - 1}")


def _check_places(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    tensor, dim, index = _bind(args, kwargs, "input", "dim", "index")
    if (
        not isinstance(tensor, torch.Tensor)
        or type(dim) is not int
        or not isinstance(index, torch.Tensor)
    ):
        raise Refusal("takes a tensor, a dimension and an index")
    _check_range(index, 0, dim_size(tensor, dim))


def _check_take(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    tensor, index, dim = _bind(args, kwargs, "input", "indices", "dim")
    _check_places((tensor, dim, index), {}, limits)


def _check_classes(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    tensor, classes = _bind(args, kwargs, "input", "num_classes")
    if not isinstance(tensor, torch.Tensor) or type(classes) is not int or classes < 1:
        raise Refusal(
            "takes a tensor and num_classes: the size of a result cannot depend on values"
        )
    _check_range(tensor, 0, classes)


def _check_getattr(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if kwargs or len(args) != 2:
        raise Refusal("takes a value and the name of an attribute")
    owner, name = args
    known: Sequence[str] = ()
    if isinstance(owner, torch.Tensor):
        known = TENSOR_ATTRIBUTES
    elif type(owner).__module__ == "torch.return_types":
        known = RESULT_ATTRIBUTES
    if name not in known:
        raise Refusal(
            f"cannot read {name!r} of a {type(owner).__name__}; allowed are "
            f"{', '.join(known) or 'none'}"
        )


def _check_getitem(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if kwargs or len(args) != 2:
        raise Refusal("takes a value and an index")
    owner, index = args
    if isinstance(owner, tuple):
        if type(index) is not int and not _is_plain_slice(index):
            raise Refusal("takes an integer or a slice here")
        return
    if not isinstance(owner, torch.Tensor):
        raise Refusal("indexes tensors and tuples only")
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        _check_item(item)
    for item, dim in _placed(items, owner.ndim):
        if not _is_mask(item):
            size = dim_size(owner, dim)
            _check_range(item, -size, size)
        elif sum(isinstance(other, torch.Tensor | list) for other in items) > 1:
            raise Refusal("takes a mask alone, not with other tensors or lists")


def _is_plain_slice(value: Any) -> bool:
    return isinstance(value, slice) and all(
        part is None or type(part) is int for part in (value.start, value.stop, value.step)
    )


def _check_item(item: Any) -> None:
    plain = item is None or item is Ellipsis or type(item) is int or _is_plain_slice(item)
    listed = isinstance(item, list) and all(type(value) is int for value in item)
    if not (plain or listed or isinstance(item, torch.Tensor)):
        raise Refusal(
            f"cannot index with a {type(item).__name__}; use integers, slices of integers, and "
            "tensors"
        )


def _placed(items: Arguments, rank: int) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensors and lists in an index, each with the dimension it applies to."""
    widths = [_width(item) for item in items]
    dim = 0
    for item, width in zip(items, widths, strict=True):
        if isinstance(item, torch.Tensor):
            yield item, dim
        elif isinstance(item, list):
            yield torch.tensor(item, dtype=torch.int64), dim
        dim += rank - sum(widths) if item is Ellipsis else width


def _width(item: Any) -> int:
    """How many dimensions an item of an index takes up; an ellipsis takes what the others leave."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype == torch.bool


def _tensors(args: Arguments, kwargs: Keywords) -> list[torch.Tensor]:
    return [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _broadcast_bound(args: Arguments, kwargs: Keywords) -> int:
    """The shape that the tensors make together."""
    sizes: list[int] = []
    for tensor in _tensors(args, kwargs):
        shape = tensor.shape
        sizes = [1] * (len(shape) - len(sizes)) + sizes
        for place in range(1, len(shape) + 1):
            sizes[-place] = (
                max(sizes[-place], shape[-place]) if sizes[-place] != 1 else shape[-place]
            )
    return math.prod(sizes)


def _sum_bound(args: Arguments, kwargs: Keywords) -> int:
    """What the tensors hold: for parts, other orders and other dtypes of them."""
    return sum(tensor.numel() for tensor in _tensors(args, kwargs))


def _getitem_bound(args: Arguments, kwargs: Keywords) -> int | None:
    """Parts hold no more than the whole; only an index of integers can repeat, and is left to the
    meta device.
    """
    if isinstance(args[0], tuple):
        return 0
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    repeats = any(isinstance(item, list | torch.Tensor) and not _is_mask(item) for item in items)
    return None if repeats else int(args[0].numel())


def _check_mask(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    if not all(isinstance(value, torch.Tensor) for value in _bind(args, kwargs, "input", "mask")):
        raise Refusal("takes a tensor and a mask")


def _nothing(args: Arguments, kwargs: Keywords) -> int:
    return 0


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _table(prefix: str, source: Any, names: str, **how: Any) -> dict[str, Operation]:
    """Operations by the names that torch.fx gives them."""
    return {prefix + name: Operation(getattr(source, name), **how) for name in names.split()}


_MEASURED = "broadcast_to diag quantile tile"
_SHARED = """
    abs acos acosh asin asinh atan atanh ceil clamp clamp_max clamp_min clip cos cosh digamma erf
    erfc erfinv exp exp2
    expm1 floor frac isfinite isinf isnan lgamma log log10 log1p log2 logit nan_to_num neg
    negative positive reciprocal
    relu round rsqrt sigmoid sgn sign signbit sin sinc sinh sqrt square tan tanh trunc
    add addcdiv addcmul atan2 copysign eq float_power fmax fmin ge greater greater_equal gt
    heaviside hypot isclose le
    lerp less less_equal logaddexp logaddexp2 lt maximum minimum mul multiply ne not_equal pow sub
    subtract true_divide xlogy
    bitwise_and bitwise_not bitwise_or bitwise_xor logical_and logical_not logical_or logical_xor
    all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum kthvalue
    log_softmax logcumsumexp
    logsumexp max mean median min nanmean nanmedian nansum prod softmax sort std sum topk var
    clone detach diagonal flatten flip masked_fill movedim narrow numel permute ravel reshape roll
    select squeeze swapaxes t transpose tril triu unflatten unsqueeze
"""
_DIVISIONS = "div divide floor_divide fmod remainder"
_CHECKED: dict[str, Operation] = {
    **_table("", torch, _DIVISIONS, check=_check_division, bound=_broadcast_bound),
    **_table("", torch, "dot matmul mm mv outer", check=_check_product),
    **_table("", torch, "gather index_add scatter_add", check=_check_places, bound=_sum_bound),
    **_table("", torch, "index_select", check=_check_places),
    **_table("", torch, _MEASURED),
    "chunk": Operation(torch.chunk, _check_chunk, bound=_sum_bound),
    "diff": Operation(torch.diff, _check_differences, bound=_sum_bound),
    "masked_select": Operation(torch.masked_select, _check_mask, bound=_broadcast_bound),
    "repeat_interleave": Operation(torch.repeat_interleave, _check_repeats),
    "take_along_dim": Operation(torch.take_along_dim, _check_take),
    "unbind": Operation(torch.unbind, _check_unbind, bound=_sum_bound),
}

_ACTIVATIONS = """
    celu elu hardtanh leaky_relu log_softmax normalize relu relu6 selu silu softmax softmin
    softsign threshold
"""
_DISTANCES = "binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss"
_SPECIAL = """
    digamma entr erf erfc exp2 expit expm1 gammaln log1p log_ndtr log_softmax logit logsumexp ndtr
    softmax xlog1py xlogy
"""
_OPERATORS = "abs and_ eq ge gt invert le lt mul ne neg or_ pos sub truediv xor"
_MATH = "ceil cos erf exp expm1 fabs floor log log10 log1p log2 pow sin sqrt tan tanh trunc"

FUNCTIONS: dict[str, Operation] = {
    **_table("torch.", torch, _SHARED, bound=_broadcast_bound),
    **{f"torch.{name}": operation for name, operation in _CHECKED.items()},
    **_table("torch.", torch, "cat concat hstack stack vstack", bound=_sum_bound),
    **_table("torch.", torch, "full_like ones_like zeros_like", bound=_broadcast_bound),
    **_table(
        "torch.", torch, "arange eye full linspace ones zeros", check=_check_sizes, makes=True
    ),
    "torch.where": Operation(torch.where, _check_where, bound=_broadcast_bound),
    **_table("torch.functional.", torch, "norm", check=_check_named, bound=_broadcast_bound),
    **_table("torch.functional.", torch, "split", check=_check_split, bound=_sum_bound),
    **_table("torch.functional.", torch, "einsum", check=_check_equation, texts=EQUATION),
    **_table("torch.nn.functional.", F, _ACTIVATIONS, check=_check_named, bound=_broadcast_bound),
    **_table(
        "torch.nn.functional.", F, _DISTANCES, check=_check_same_shapes, bound=_broadcast_bound
    ),
    **_table("torch.nn.functional.", F, "pad"),
    **_table("torch._C._nn.", torch._C._nn, "gelu log_sigmoid softplus", bound=_broadcast_bound),
    **_table("torch._C._nn.", torch._C._nn, "one_hot", check=_check_classes),
    **_table("torch._C._linalg.linalg_", torch.linalg, "norm vector_norm", bound=_broadcast_bound),
    **_table("torch._C._special.special_", torch.special, _SPECIAL, bound=_broadcast_bound),
    **_table("operator.", operator, _OPERATORS, check=_check_operands, bound=_broadcast_bound),
    **_table("operator.", operator, "floordiv mod", check=_check_quotient, bound=_broadcast_bound),
    "operator.add": Operation(operator.add, _check_sum, bound=_broadcast_bound),
    "operator.pow": Operation(operator.pow, _check_power, bound=_broadcast_bound),
    "operator.matmul": Operation(operator.matmul, _check_product),
    "operator.getitem": Operation(operator.getitem, _check_getitem, bound=_getitem_bound),
    "getattr": Operation(getattr, _check_getattr, texts=ATTRIBUTES, bound=_nothing),
    **_table("math.", math, _MATH, check=_check_numbers, bound=_nothing),
}
"""Functions, as torch.fx names them: some by where torch keeps them rather than by where programs
find them."""

_CONVERSIONS = """
    bfloat16 bool contiguous dim double float half int long ndimension nelement norm reshape_as
    short size to type_as view_as
"""

METHODS: dict[str, Operation] = {
    **_table("", torch.Tensor, _SHARED, bound=_broadcast_bound),
    **_CHECKED,
    **_table("", torch.Tensor, _CONVERSIONS, bound=_sum_bound),
    **_table("", torch.Tensor, "expand expand_as new_full new_ones new_zeros repeat unfold"),
    **_table("", torch.Tensor, "split", check=_check_split, bound=_sum_bound),
    **_table("", torch.Tensor, "view", check=_check_view, bound=_sum_bound),
    **_table("", torch.Tensor, "where", check=_check_where, bound=_broadcast_bound),
    "cpu": Operation(_identity, bound=_nothing),
    "cuda": Operation(_identity, bound=_nothing),
}
"""Methods of tensors. Moving to another device does nothing: a loss is computed where the model is.
"""

_KEYWORD_NAMES = """
    alpha approximate atol axis beta chunks condition copy correction decimals delta descending
    destination device
    diagonal dim dim0 dim1 dimension dims dtype end eps equal_nan exponent fill_value index
    indices input interpolation
    k keepdim largest layout log_target mask max max_val memory_format min min_val mode n nan
    neginf negative_slope
    non_blocking num_classes offset ord other p pad pos_weight posinf q reduction repeats
    rounding_mode rtol shifts size
    sizes sorted source split_size split_size_or_sections src stable start step steps target
    tensor1 tensor2 threshold unbiased value weight
"""
KEYWORDS = frozenset(_KEYWORD_NAMES.split())
INERT: dict[str, tuple[Any, ...]] = {
    "out": (None,),
    "inplace": (False,),
    "requires_grad": (False, None),
    "pin_memory": (False, None),
    "size_average": (None,),
    "reduce": (None,),
    "_stacklevel": (3,),
}
"""Keywords that torch.fx writes out with the value that means nothing; they are left out of the
call."""

_DTYPE_NAMES = "bfloat16 bool float16 float32 float64 int16 int32 int64 int8 uint8"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES.split()}
LAYOUTS = {"strided": torch.strided}
MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
}
FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
