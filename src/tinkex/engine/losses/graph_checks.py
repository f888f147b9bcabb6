"""Operations of losses sent as graphs, with the checks and bounds before a call.

Sizes must not depend on values, and no result may be larger than its bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The most that a graph may cost.

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
    """The reason for which a step is refused; the name of the step is added later."""


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
    """Yield the values in an argument, containers taken apart."""
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
    """Return an argument with its leaves changed."""
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


def _tensors(args: Arguments, kwargs: Keywords) -> list[Tensor]:
    return [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def broadcast_bound(args: Arguments, kwargs: Keywords) -> int:
    """Return the size of the shape that the tensors make together."""
    sizes: list[int] = []
    for tensor in _tensors(args, kwargs):
        shape = tensor.shape
        sizes = [1] * (len(shape) - len(sizes)) + sizes
        for place in range(1, len(shape) + 1):
            sizes[-place] = (
                max(sizes[-place], shape[-place]) if sizes[-place] != 1 else shape[-place]
            )
    return math.prod(sizes)


def sum_bound(args: Arguments, kwargs: Keywords) -> int:
    """Return the size of the tensors, for parts, other orders and other dtypes of them."""
    return sum(tensor.numel() for tensor in _tensors(args, kwargs))


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
