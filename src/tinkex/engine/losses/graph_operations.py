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
from typing import Any

import torch
import torch.nn.functional as F

from tinkex.engine.losses.graph_checks import (
    ATTRIBUTES,
    EQUATION,
    Operation,
    broadcast_bound,
    check_chunk,
    check_classes,
    check_differences,
    check_division,
    check_equation,
    check_getattr,
    check_getitem,
    check_mask,
    check_named,
    check_numbers,
    check_operands,
    check_places,
    check_power,
    check_product,
    check_quotient,
    check_repeats,
    check_same_shapes,
    check_sizes,
    check_split,
    check_sum,
    check_take,
    check_unbind,
    check_view,
    check_where,
    getitem_bound,
    nothing,
    sum_bound,
)


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
    digamma entr erf erfc exp2 expit expm1 gammaln log1p log_ndtr log_softmax logit logsumexp ndtr
    softmax xlog1py xlogy
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
