"""The operations that a loss sent as a graph may use, as tables of names.

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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.losses.graph_loss import (
    Arguments,
    GraphLimits,
    Keywords,
    Operation,
    Refusal,
    broadcast_bound,
    leaves,
    sum_bound,
)

EQUATION = re.compile(r"[a-zA-Z ]{0,8}(,[a-zA-Z ]{0,8})?(->[a-zA-Z ]{0,8})?")
TENSOR_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "T", "mT")
RESULT_ATTRIBUTES = ("values", "indices")
ATTRIBUTES = re.compile("|".join((*TENSOR_ATTRIBUTES, *RESULT_ATTRIBUTES)))


def _bind(args: Arguments, kwargs: Keywords, *names: str) -> list[Any]:
    """Return arguments by name: positional ones, then keywords; None if not given."""
    return [
        args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(names)
    ]


def check_numbers(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse all but plain numbers."""
    if kwargs or not all(isinstance(value, int | float) for value in args):
        raise Refusal("takes plain numbers only; use torch for tensors")


def check_operands(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse all but tensors and numbers."""
    if kwargs or not all(isinstance(value, int | float | Tensor) for value in args):
        raise Refusal("takes tensors and numbers only")


def check_sum(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse all but operands, or shapes to be joined."""
    if not args or not all(isinstance(value, tuple) for value in args):
        return check_operands(args, kwargs, limits)
    # Shapes are tuples: x.shape[:-1] + (1,). Tuples of tuples could grow without end.
    if (
        kwargs
        or sum(map(len, args)) > limits.pieces
        or not all(type(item) is int for value in args for item in value)
    ):
        raise Refusal(f"joins shapes of at most {limits.pieces} integers")


def check_power(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse powers of whole numbers that are too large."""
    check_operands(args, kwargs, limits)
    if (
        len(args) == 2
        and all(isinstance(value, int) for value in args)
        and abs(args[0]) > 1
        and args[1] > 64
    ):
        raise Refusal("makes an integer that is too large")


def check_division(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse to divide whole numbers by -1."""
    # The least integer divided by -1 does not fit: some of torch's kernels end the process over it.
    dividend, divisor = _bind(args, kwargs, "input", "other")
    whole = all(isinstance(value, int) or _is_whole(value) for value in (dividend, divisor))
    if whole and _is_whole(divisor) and not divisor.is_meta and bool((divisor == -1).any()):
        raise Refusal("cannot divide whole numbers by -1; use .float()")
    if whole and isinstance(divisor, int) and divisor == -1:
        raise Refusal("cannot divide whole numbers by -1; use .float()")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


def check_quotient(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse all but operands, and whole numbers divided by -1."""
    check_operands(args, kwargs, limits)
    check_division(args, kwargs, limits)


def check_product(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> int:
    """Refuse all but two matrices or vectors; return the multiplications."""
    # Products of more dimensions copy what they broadcast, which may be larger than what they give.
    if (
        kwargs
        or len(args) != 2
        or not all(isinstance(value, Tensor) and value.ndim <= 2 for value in args)
    ):
        raise Refusal("takes two tensors of at most two dimensions")
    columns = args[1].shape[1] if args[1].ndim == 2 else 1
    return _check_work(args[0].numel() * columns, limits)


def _check_work(multiplications: int, limits: GraphLimits) -> int:
    if multiplications > limits.work:
        raise Refusal(f"needs {multiplications} multiplications; at most {limits.work} are allowed")
    return multiplications


def check_equation(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> int:
    """Refuse all but one tensor a term; return the multiplications."""
    if kwargs or not args or not isinstance(args[0], str):
        raise Refusal("takes an equation, then one or two tensors")
    terms = args[0].replace(" ", "").split("->")[0].split(",")
    tensors = args[1:]
    fits = len(terms) == len(tensors) and all(
        isinstance(tensor, Tensor) and tensor.ndim == len(term) <= 2
        for term, tensor in zip(terms, tensors, strict=True)
    )
    if not fits:
        raise Refusal("takes one tensor of at most two dimensions for each term of the equation")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, size in zip(term, tensor.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return _check_work(math.prod(sizes.values()), limits)


def check_named(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse settings by place."""
    # By place, these take `inplace` or `out`; torch.fx writes what follows the tensor by name.
    if len(args) != 1 or not isinstance(args[0], Tensor):
        raise Refusal("takes a tensor, and everything else by name")


def check_same_shapes(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse tensors of different shapes."""
    # These broadcast inside and give a single number: a small result would hide a large allocation.
    shapes = {value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
    if len(shapes) > 1:
        raise Refusal(
            "takes tensors of one shape, got "
            f"{', '.join(sorted(str(list(shape)) for shape in shapes))}"
        )


def _check_pieces(tensor: Any, dim: Any, size: Any, limits: GraphLimits) -> None:
    """Refuse to cut a tensor into too many pieces of a size.

    A list of sizes is short already.
    """
    dim = 0 if dim is None else dim
    if not isinstance(tensor, Tensor) or type(dim) is not int:
        raise Refusal("takes a tensor, and a dimension that is an integer")
    if isinstance(size, int) and dim_size(tensor, dim) > limits.pieces * max(size, 1):
        raise Refusal(f"makes more than {limits.pieces} tensors")


def check_split(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse to split into too many pieces."""
    name = "split_size" if "split_size" in kwargs else "split_size_or_sections"
    tensor, size, dim = _bind(args, kwargs, "tensor", name, "dim")
    _check_pieces(tensor, dim, size, limits)


def check_chunk(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse to cut into too many chunks."""
    tensor, chunks, dim = _bind(args, kwargs, "input", "chunks", "dim")
    _check_pieces(tensor, dim, None, limits)
    if not isinstance(chunks, int) or chunks > limits.pieces:
        raise Refusal(f"makes at most {limits.pieces} tensors")


def check_unbind(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse to take apart a long dimension."""
    tensor, dim = _bind(args, kwargs, "input", "dim")
    _check_pieces(tensor, dim, 1, limits)


def check_repeats(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse to repeat by a tensor."""
    if type(_bind(args, kwargs, "input", "repeats")[1]) is not int:
        raise Refusal("repeats by an integer only: the size of a result cannot depend on values")


def check_differences(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse differences of a high order."""
    order = _bind(args, kwargs, "input", "n")[1]
    # one round of the computation each
    if order is not None and not (type(order) is int and 0 <= order <= 8):
        raise Refusal("takes an order n of at most 8")


def check_where(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse a condition without two values."""
    if len(args) + len(kwargs) != 3:
        raise Refusal(
            "takes a condition and two values: the size of a result cannot depend on values"
        )


def check_sizes(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse sizes that are tensors."""
    if any(isinstance(value, Tensor) for value in leaves((args, kwargs))):
        raise Refusal("takes numbers, such as x.shape[0], not tensors")


def check_view(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse sizes that are no integers."""
    if kwargs or not all(type(value) is int for value in leaves(args[1:])):
        raise Refusal("takes sizes that are integers")


def dim_size(tensor: Tensor, dim: int) -> int:
    """Return the size of a dimension; a single number has one of size 1."""
    if not -max(tensor.ndim, 1) <= dim < max(tensor.ndim, 1):
        raise Refusal(f"there is no dimension {dim} in a tensor of shape {list(tensor.shape)}")
    return tensor.shape[dim] if tensor.ndim else 1


def _check_range(index: Tensor, low: int, high: int) -> None:
    if index.is_meta or index.numel() == 0:
        return
    if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise Refusal(
            f"takes an index of integers, got {str(index.dtype).removeprefix('torch.')}; use "
            ".long()"
        )
    if int(index.min()) < low or int(index.max()) >= high:
        raise Refusal(f"has an index outside {low} to {high - 1}")


def check_places(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse an index out of range."""
    tensor, dim, index = _bind(args, kwargs, "input", "dim", "index")
    if not isinstance(tensor, Tensor) or type(dim) is not int or not isinstance(index, Tensor):
        raise Refusal("takes a tensor, a dimension and an index")
    _check_range(index, 0, dim_size(tensor, dim))


def check_take(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse an index out of range, for `take_along_dim`."""
    tensor, index, dim = _bind(args, kwargs, "input", "indices", "dim")
    check_places((tensor, dim, index), {}, limits)


def check_classes(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse classes out of range, or their number left open."""
    tensor, classes = _bind(args, kwargs, "input", "num_classes")
    if not isinstance(tensor, Tensor) or type(classes) is not int or classes < 1:
        raise Refusal(
            "takes a tensor and num_classes: the size of a result cannot depend on values"
        )
    _check_range(tensor, 0, classes)


def check_getattr(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse attributes that are not listed."""
    if kwargs or len(args) != 2:
        raise Refusal("takes a value and the name of an attribute")
    owner, name = args
    known: Sequence[str] = ()
    if isinstance(owner, Tensor):
        known = TENSOR_ATTRIBUTES
    elif type(owner).__module__ == "torch.return_types":
        known = RESULT_ATTRIBUTES
    if name not in known:
        raise Refusal(
            f"cannot read {name!r} of a {type(owner).__name__}; allowed are "
            f"{', '.join(known) or 'none'}"
        )


def check_getitem(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse to index other things than tensors and tuples, or out of range."""
    if kwargs or len(args) != 2:
        raise Refusal("takes a value and an index")
    owner, index = args
    if isinstance(owner, tuple):
        if type(index) is not int and not _is_plain_slice(index):
            raise Refusal("takes an integer or a slice here")
        return
    if not isinstance(owner, Tensor):
        raise Refusal("indexes tensors and tuples only")
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        _check_item(item)
    for item, dim in _placed(items, owner.ndim):
        if not _is_mask(item):
            size = dim_size(owner, dim)
            _check_range(item, -size, size)
        elif sum(isinstance(other, Tensor | list) for other in items) > 1:
            raise Refusal("takes a mask alone, not with other tensors or lists")


def _is_plain_slice(value: Any) -> bool:
    return isinstance(value, slice) and all(
        part is None or type(part) is int for part in (value.start, value.stop, value.step)
    )


def _check_item(item: Any) -> None:
    plain = item is None or item is Ellipsis or type(item) is int or _is_plain_slice(item)
    listed = isinstance(item, list) and all(type(value) is int for value in item)
    if not (plain or listed or isinstance(item, Tensor)):
        raise Refusal(
            f"cannot index with a {type(item).__name__}; use integers, slices of integers, and "
            "tensors"
        )


def _placed(items: Arguments, rank: int) -> Iterator[tuple[Tensor, int]]:
    """Yield the tensors and lists in an index, each with the dimension that it applies to."""
    widths = [_width(item) for item in items]
    dim = 0
    for item, width in zip(items, widths, strict=True):
        if isinstance(item, Tensor):
            yield item, dim
        elif isinstance(item, list):
            yield torch.tensor(item, dtype=torch.int64), dim
        dim += rank - sum(widths) if item is Ellipsis else width


def _width(item: Any) -> int:
    """Return the dimensions that an item of an index takes; an ellipsis takes the rest."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype == torch.bool


def getitem_bound(args: Arguments, kwargs: Keywords) -> int | None:
    """Return the size of the whole; None for an index of integers, which can repeat."""
    if isinstance(args[0], tuple):
        return 0
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    repeats = any(isinstance(item, list | Tensor) and not _is_mask(item) for item in items)
    return None if repeats else int(args[0].numel())


def check_mask(args: Arguments, kwargs: Keywords, limits: GraphLimits) -> None:
    """Refuse all but a tensor and a mask."""
    if not all(isinstance(value, Tensor) for value in _bind(args, kwargs, "input", "mask")):
        raise Refusal("takes a tensor and a mask")


def nothing(args: Arguments, kwargs: Keywords) -> int:
    """Return the size of a result without tensors."""
    return 0


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _table(prefix: str, source: Any, names: str, **how: Any) -> dict[str, Operation]:
    """Operations by the names that torch.fx gives them."""
    return {prefix + name: Operation(getattr(source, name), **how) for name in names.split()}


_MEASURED = "broadcast_to diag quantile tile"
_SHARED = """
    abs acos acosh asin asinh atan atanh ceil clamp clamp_max clamp_min clip cos cosh digamma
    erf erfc erfinv exp exp2 expm1 floor frac isfinite isinf isnan lgamma log log10 log1p log2
    logit nan_to_num neg negative positive reciprocal relu round rsqrt sigmoid sgn sign signbit
    sin sinc sinh sqrt square tan tanh trunc add addcdiv addcmul atan2 copysign eq float_power
    fmax fmin ge greater greater_equal gt heaviside hypot isclose le lerp less less_equal
    logaddexp logaddexp2 lt maximum minimum mul multiply ne not_equal pow sub subtract
    true_divide xlogy bitwise_and bitwise_not bitwise_or bitwise_xor logical_and logical_not
    logical_or logical_xor all amax amin any argmax argmin argsort count_nonzero cummax cummin
    cumprod cumsum kthvalue log_softmax logcumsumexp logsumexp max mean median min nanmean
    nanmedian nansum prod softmax sort std sum topk var clone detach diagonal flatten flip
    masked_fill movedim narrow numel permute ravel reshape roll select squeeze swapaxes t
    transpose tril triu unflatten unsqueeze
"""
_DIVISIONS = "div divide floor_divide fmod remainder"
_CHECKED: dict[str, Operation] = {
    **_table("", torch, _DIVISIONS, check=check_division, bound=broadcast_bound),
    **_table("", torch, "dot matmul mm mv outer", check=check_product),
    **_table("", torch, "gather index_add scatter_add", check=check_places, bound=sum_bound),
    **_table("", torch, "index_select", check=check_places),
    **_table("", torch, _MEASURED),
    "chunk": Operation(torch.chunk, check_chunk, bound=sum_bound),
    "diff": Operation(torch.diff, check_differences, bound=sum_bound),
    "masked_select": Operation(torch.masked_select, check_mask, bound=broadcast_bound),
    "repeat_interleave": Operation(torch.repeat_interleave, check_repeats),
    "take_along_dim": Operation(torch.take_along_dim, check_take),
    "unbind": Operation(torch.unbind, check_unbind, bound=sum_bound),
}

_ACTIVATIONS = """
    celu elu hardtanh leaky_relu log_softmax normalize relu relu6 selu silu softmax softmin
    softsign threshold
"""
_DISTANCES = "binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss"
_SPECIAL = """
    digamma entr erf erfc exp2 expit expm1 gammaln log1p log_ndtr log_softmax logit logsumexp
    ndtr softmax xlog1py xlogy
"""
_OPERATORS = "abs and_ eq ge gt invert le lt mul ne neg or_ pos sub truediv xor"
_MATH = "ceil cos erf exp expm1 fabs floor log log10 log1p log2 pow sin sqrt tan tanh trunc"

FUNCTIONS: dict[str, Operation] = {
    **_table("torch.", torch, _SHARED, bound=broadcast_bound),
    **{f"torch.{name}": operation for name, operation in _CHECKED.items()},
    **_table("torch.", torch, "cat concat hstack stack vstack", bound=sum_bound),
    **_table("torch.", torch, "full_like ones_like zeros_like", bound=broadcast_bound),
    **_table("torch.", torch, "arange eye full linspace ones zeros", check=check_sizes, makes=True),
    "torch.where": Operation(torch.where, check_where, bound=broadcast_bound),
    **_table("torch.functional.", torch, "norm", check=check_named, bound=broadcast_bound),
    **_table("torch.functional.", torch, "split", check=check_split, bound=sum_bound),
    **_table("torch.functional.", torch, "einsum", check=check_equation, texts=EQUATION),
    **_table("torch.nn.functional.", F, _ACTIVATIONS, check=check_named, bound=broadcast_bound),
    **_table("torch.nn.functional.", F, _DISTANCES, check=check_same_shapes, bound=broadcast_bound),
    **_table("torch.nn.functional.", F, "pad"),
    **_table("torch._C._nn.", torch._C._nn, "gelu log_sigmoid softplus", bound=broadcast_bound),
    **_table("torch._C._nn.", torch._C._nn, "one_hot", check=check_classes),
    **_table("torch._C._linalg.linalg_", torch.linalg, "norm vector_norm", bound=broadcast_bound),
    **_table("torch._C._special.special_", torch.special, _SPECIAL, bound=broadcast_bound),
    **_table("operator.", operator, _OPERATORS, check=check_operands, bound=broadcast_bound),
    **_table("operator.", operator, "floordiv mod", check=check_quotient, bound=broadcast_bound),
    "operator.add": Operation(operator.add, check_sum, bound=broadcast_bound),
    "operator.pow": Operation(operator.pow, check_power, bound=broadcast_bound),
    "operator.matmul": Operation(operator.matmul, check_product),
    "operator.getitem": Operation(operator.getitem, check_getitem, bound=getitem_bound),
    "getattr": Operation(getattr, check_getattr, texts=ATTRIBUTES, bound=nothing),
    **_table("math.", math, _MATH, check=check_numbers, bound=nothing),
}
"""Functions, as torch.fx names them: some by where torch keeps them rather than by where programs
find them."""

_CONVERSIONS = """
    bfloat16 bool contiguous dim double float half int long ndimension nelement norm reshape_as
    short size to type_as view_as
"""

METHODS: dict[str, Operation] = {
    **_table("", torch.Tensor, _SHARED, bound=broadcast_bound),
    **_CHECKED,
    **_table("", torch.Tensor, _CONVERSIONS, bound=sum_bound),
    **_table("", torch.Tensor, "expand expand_as new_full new_ones new_zeros repeat unfold"),
    **_table("", torch.Tensor, "split", check=check_split, bound=sum_bound),
    **_table("", torch.Tensor, "view", check=check_view, bound=sum_bound),
    **_table("", torch.Tensor, "where", check=check_where, bound=broadcast_bound),
    "cpu": Operation(_identity, bound=nothing),
    "cuda": Operation(_identity, bound=nothing),
}
"""Methods of tensors. Moving to another device does nothing: a loss is computed where the model is.
"""

_KEYWORD_NAMES = """
    alpha approximate atol axis beta chunks condition copy correction decimals delta descending
    destination device diagonal dim dim0 dim1 dimension dims dtype end eps equal_nan exponent
    fill_value index indices input interpolation k keepdim largest layout log_target mask max
    max_val memory_format min min_val mode n nan neginf negative_slope non_blocking num_classes
    offset ord other p pad pos_weight posinf q reduction repeats rounding_mode rtol shifts size
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
