"""Losses that a server can run: functions of tensors, traced into a graph.

`trace` makes a handle of a function with torch.fx, and raises if the function cannot be a graph.
`create_request` makes the server's form of the handle. If a server takes no graphs, `per_datum`
makes a loss that the client computes, with the same result. Torch is imported when a loss is
traced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, TypeAlias, get_args

from tinkex.types.custom_losses import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossInputRank,
    CustomLossNode,
)
from tinkex.types.sessions import CreateCustomLossRequest

if TYPE_CHECKING:
    import torch

    from tinkex.client.losses.custom_passes import CustomLoss
    from tinkex.types.inputs import Datum

PerDatumLossFn: TypeAlias = (
    "Callable[Concatenate[torch.Tensor, ...], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]"
)
"""A loss of one datum, from its log-probabilities and inputs to the loss and its metrics."""

MAX_INPUTS = 16
"""The most parameters of a loss, `logprobs` included."""

INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

_LIBRARIES = ("torch", "math", "operator")
_LEAVING = {"item", "numpy", "tolist"}
_SHAPES = {0: "a single number", 1: "[T]", 2: "[T, K]"}


@dataclasses.dataclass(frozen=True)
class LossHandle:
    """A traced loss.

    Attributes:
        name: The function's name.
        inputs: Its parameters, `logprobs` first.
        session_id: The session that it belongs to.
        graph: The traced function.
        loss_id: Its id on the server; None if the client computes it.

    Example:
        >>> handle = trace(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}, "session-1")
        >>> handle.input_names, handle.loss_id is None
        (('logprobs',), True)
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: torch.fx.GraphModule = dataclasses.field(repr=False, compare=False)
    loss_id: str | None = None

    @property
    def key(self) -> str:
        """The digest of the function and its inputs; equal losses have equal keys."""
        return hashlib.sha256(f"{self.graph.code}{self.inputs!r}".encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of its parameters, `logprobs` first."""
        return tuple(each.name for each in self.inputs)


def trace(
    fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank], session_id: str
) -> LossHandle:
    """Trace a loss, and check that a server can rebuild it.

    Args:
        fn: A plain function of `logprobs` and further inputs, which uses only torch, math and
            operator.
        input_ranks: The rank of each parameter: 0 (a number), 1 (a value per token) or 2 (a value
            per candidate of a token).
        session_id: The session of the loss.

    Raises:
        ValueError: The function cannot be sent as a graph. The message has the reason and a remedy.
        ImportError: Torch is not installed.

    Example:
        >>> def reinforce(logprobs, advantages):
        ...     return -(logprobs * advantages).sum(), {"custom/mean:mean": logprobs.mean()}
        >>> trace(reinforce, {"logprobs": 1, "advantages": 1}, "session-1").input_names
        ('logprobs', 'advantages')
    """
    try:
        import torch.fx
    except ImportError as error:
        raise ImportError(
            "custom losses are traced with torch; install it: pip install 'tinkex[local]'"
        ) from error
    name = str(getattr(fn, "__name__", type(fn).__name__))
    where = f"custom loss {name!r}"
    if not isinstance(fn, types.FunctionType):
        raise ValueError(
            f"{where} is a {type(fn).__name__}; give a plain function made with def or lambda"
        )
    inputs = _inputs(where, fn, input_ranks)
    try:
        graph = torch.fx.symbolic_trace(fn)
    except Exception as error:  # it runs the user's code: anything may come out
        raise ValueError(
            f"{where} cannot be traced: {error}. Its tensors have no values yet: use torch.where "
            "instead of if, x.shape[0] instead of len(x), whole tensors instead of loops, and "
            "torch or math instead of other libraries"
        ) from error
    for node in graph.graph.nodes:
        _check_node(where, node)
    handle = LossHandle(name, inputs, session_id, graph)
    wire_graph(handle)  # refuses arguments that JSON cannot hold
    return handle


def _inputs(
    where: str, fn: types.FunctionType, ranks: Mapping[str, CustomLossInputRank]
) -> tuple[CustomLossInput, ...]:
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters or parameters[0].name != "logprobs":
        raise ValueError(
            f"{where} must take logprobs first, then the inputs it reads, such as def "
            "loss(logprobs, advantages)"
        )
    for parameter in parameters:
        _check_parameter(where, parameter)
    if len(parameters) > MAX_INPUTS:
        raise ValueError(
            f"{where} takes {len(parameters)} parameters; at most {MAX_INPUTS} are allowed, "
            "logprobs included"
        )
    names = [parameter.name for parameter in parameters]
    if set(ranks) != set(names):
        raise ValueError(
            f"{where}: input_ranks must give a rank for each parameter ({', '.join(names)}) and "
            f"for nothing else, it has {', '.join(map(str, ranks)) or 'none'}"
        )
    for name, rank in ranks.items():
        if isinstance(rank, bool) or rank not in get_args(CustomLossInputRank):
            raise ValueError(f"{where}: the rank of {name!r} must be 0, 1 or 2, got {rank!r}")
    if ranks["logprobs"] == 0:
        raise ValueError(
            f"{where}: logprobs has rank 1 ([T]) or 2 ([T, K] for several targets a token), not 0"
        )
    return tuple(CustomLossInput(name=name, rank=ranks[name]) for name in names)


def _check_parameter(where: str, parameter: inspect.Parameter) -> None:
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        raise ValueError(
            f"{where}: {parameter} must be a plain positional parameter; name each input instead "
            "of *args, **kwargs or keyword-only ones"
        )
    if parameter.default is not parameter.empty:
        raise ValueError(
            f"{where}: parameter {parameter.name!r} has a default, but every datum must hold each "
            "input; remove the default, or write a constant into the function"
        )
    if INPUT_NAME.fullmatch(parameter.name) is None:
        raise ValueError(
            f"{where}: parameter {parameter.name!r} must be at most 64 lowercase letters, digits "
            "and underscores"
        )


def _check_node(where: str, node: torch.fx.Node) -> None:
    if node.op == "get_attr":
        raise ValueError(
            f"{where} holds a tensor of its own ({node.target}); pass tensors as inputs of the "
            "data, write single "
            "values as numbers, and make others from an input, such as torch.zeros_like(logprobs)"
        )
    if node.op == "call_module":
        raise ValueError(f"{where} calls the module {node.target}; use functions of torch instead")
    if node.op == "call_function":
        target = _qualified(node.target)
        if target != "getattr" and target.split(".")[0] not in _LIBRARIES:
            raise ValueError(
                f"{where} calls {target}; only functions of torch, math and operator can be sent"
            )
    if node.op == "call_method":
        _check_method(where, str(node.target))
    if node.op == "output":
        _check_output(where, node.args[0])


def _check_method(where: str, method: str) -> None:
    import torch

    if method in _LEAVING:
        raise ValueError(
            f"{where} calls {method}(), which leaves torch; keep every value a tensor, metrics too"
        )
    if method == "backward":
        raise ValueError(
            f"{where} calls backward(); return the loss, its gradient is taken for you"
        )
    if not hasattr(torch.Tensor, method):
        raise ValueError(
            f"{where} calls {method}(), which tensors do not have; use a method of torch.Tensor"
        )


def _check_output(where: str, output: Any) -> None:
    import torch.fx

    if (
        not isinstance(output, tuple | list)
        or len(output) != 2
        or not isinstance(output[1], Mapping)
    ):
        raise ValueError(
            f"{where} must return (loss, metrics): a tensor and a dict of tensors, {{}} if there "
            "are none"
        )
    loss, metrics = output
    if not isinstance(loss, torch.fx.Node):
        raise ValueError(
            f"{where} must return a loss that is computed from its inputs, it returns {loss!r}"
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or METRIC_NAME.fullmatch(name) is None:
            raise ValueError(
                f"{where}: metric {name!r} must be named custom/NAME:sum or custom/NAME:mean with "
                "NAME in lowercase; the ending says how the values of several data are combined"
            )
        if not isinstance(value, torch.fx.Node):
            raise ValueError(
                f"{where}: metric {name!r} must be a tensor computed from its inputs, it is "
                f"{value!r}"
            )


def _qualified(function: Any) -> str:
    """Return the name under which a function is sent."""
    import torch

    if function is getattr:
        return "getattr"
    name = getattr(function, "__name__", type(function).__name__)
    module = getattr(function, "__module__", None)
    if module is None and getattr(torch, name, None) is function:
        module = "torch"
    return f"{module}.{name}".replace("_operator.", "operator.", 1).replace(
        "torch._ops.", "torch.ops.", 1
    )


def wire_graph(handle: LossHandle) -> CustomLossGraph:
    """Return the graph of a loss as data.

    Example:
        >>> handle = trace(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}, "session-1")
        >>> [node.target for node in wire_graph(handle).nodes]
        ['logprobs', 'sum', 'operator.neg', 'output']
    """
    nodes = []
    for node in handle.graph.graph.nodes:
        target = _qualified(node.target) if node.op == "call_function" else str(node.target)
        args = [_wire_value(handle, value) for value in node.args]
        kwargs = {name: _wire_value(handle, value) for name, value in node.kwargs.items()}
        nodes.append(
            CustomLossNode(op=node.op, name=node.name, target=target, args=args, kwargs=kwargs)
        )
    return CustomLossGraph(nodes=nodes)


def _wire_value(handle: LossHandle, value: Any) -> Any:
    """Return an argument as JSON: a plain value, or an object keyed by its kind."""
    import torch.fx

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(
                f"custom loss {handle.name!r} uses {value}, too large for an integer; write it as "
                "a float"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_wire_value(handle, item) for item in value]}
    if isinstance(value, list):
        return [_wire_value(handle, item) for item in value]
    if isinstance(value, slice):
        return {
            "slice": [_wire_value(handle, item) for item in (value.start, value.stop, value.step)]
        }
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _wire_value(handle, item) for key, item in value.items()}}
    for kind in ("dtype", "device", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    raise ValueError(
        f"custom loss {handle.name!r} passes a {type(value).__name__}, which cannot be sent; "
        "use numbers, texts, tuples, lists, slices and torch's dtypes"
    )


def create_request(handle: LossHandle, seq: int) -> CreateCustomLossRequest:
    """Return the request that stores a loss on a server.

    `seq` counts the losses of a session from 0.

    Example:
        >>> handle = trace(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}, "session-1")
        >>> create_request(handle, 0).inputs
        [CustomLossInput(name='logprobs', rank=1)]
    """
    return CreateCustomLossRequest(
        session_id=handle.session_id,
        custom_loss_seq_id=seq,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=wire_graph(handle),
    )


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Raise ValueError if a datum lacks an input of a loss, or its rank is wrong.

    Example:
        >>> handle = trace(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}, "session-1")
        >>> try:
        ...     check_inputs(handle, [Datum(ModelInput.from_ints([1, 2]), {"weights": [1, 1]})])
        ... except ValueError as error:
        ...     print(error)
        datum 0 has no 'target_tokens', which loss '<lambda>' takes; add it
    """
    for index, datum in enumerate(data):
        for each in handle.inputs:
            # every target has a log-probability
            name = "target_tokens" if each.name == "logprobs" else each.name
            tensor = datum.loss_fn_inputs.get(name)
            if tensor is None:
                raise ValueError(
                    f"datum {index} has no {name!r}, which loss {handle.name!r} takes; add it"
                )
            rank = 1 if tensor.shape is None else len(tensor.shape)
            if rank != each.rank:
                raise ValueError(
                    f"datum {index}: {name!r} has rank {rank}, but loss {handle.name!r} declares "
                    f"{each.name!r} with rank {each.rank} ({_SHAPES[each.rank]})"
                )


def per_datum(handle: LossHandle) -> CustomLoss:
    """Return a loss that the client computes, for servers that take no graphs.

    The losses of the data are summed. Their metrics are summed or averaged, by the ending of their
    names.

    Example:
        >>> import torch
        >>> handle = trace(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}, "session-1")
        >>> data = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
        >>> per_datum(handle)(data, [torch.tensor([-0.5, -0.25])])
        (tensor(0.7500), {})
    """

    def loss_fn(
        data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        import torch

        check_inputs(handle, data)
        if not data:
            raise ValueError(f"loss {handle.name!r} needs at least one datum")
        losses = []
        totals: dict[str, float] = {}
        for index, (datum, row) in enumerate(zip(data, logprobs, strict=True)):
            loss, metrics = _run(handle, index, datum, row)
            losses.append(loss)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
        means = {
            name: total / len(data) for name, total in totals.items() if name.endswith(":mean")
        }
        return torch.stack(losses).sum(), totals | means

    return loss_fn


def _run(
    handle: LossHandle, index: int, datum: Datum, logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    where = f"datum {index}: loss {handle.name!r}"
    if logprobs.ndim != handle.inputs[0].rank:
        raise ValueError(
            f"{where} takes logprobs of rank {handle.inputs[0].rank}, they have "
            f"{list(logprobs.shape)}"
        )
    inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names[1:]]
    try:
        # Not a plain call of the graph: that prints what went wrong to stderr before it raises.
        loss, metrics = handle.graph.forward(logprobs, *inputs)
    except Exception as error:
        raise ValueError(f"{where} failed: {error}") from error
    for name, value in {"the loss": loss, **metrics}.items():
        if tuple(getattr(value, "shape", (None,))) != ():
            raise ValueError(
                f"{where}: {name} must be a tensor of a single number, such as x.sum(); it is "
                f"{value!r}"
            )
    return loss, {name: float(value.detach()) for name, value in metrics.items()}
