"""Arguments of a training client's calls, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, get_args

import numpy as np

from tinkex.client.futures.queue_states import Observer
from tinkex.types.inputs import Datum
from tinkex.types.optimizers import AdamParams, DimuonParams, OptimParams, OptimParamsBase
from tinkex.types.training import OWN_LOSSES, LossFnConfig, LossFnType, OptimStepRequest

LOSS_FNS: tuple[str, ...] = (*get_args(LossFnType), *OWN_LOSSES)
TEXTS = frozenset({"loss_id"})
"""Settings of losses that stay text, even if the text is a number."""


class CallOptions(TypedDict, total=False):
    """Options of a call: how to wait for its result.

    Example:
        >>> options: CallOptions = {"timeout": 60.0}
        >>> client.forward(data, "cross_entropy", **options).result().metrics["loss:sum"]
        10.6...
    """

    timeout: float | None
    """Seconds to wait before the call fails with APITimeoutError. The server still executes it."""
    queue_state_observer: Observer
    """Called when the server's queue pauses or goes on, in addition to the log."""


def check_options(options: CallOptions) -> None:
    """Raise on unknown options, and on timeouts that are not positive numbers."""
    if unknown := set(options) - CallOptions.__annotations__.keys():
        raise TypeError(
            f"unknown option {min(unknown)!r}; known are {', '.join(CallOptions.__annotations__)}"
        )
    timeout = options.get("timeout")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0
    ):
        raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")


def checked_data(data: Sequence[Datum]) -> list[Datum]:
    """Return the data of a call as a list; raise if it is empty or wrong."""
    if isinstance(data, Datum):
        raise TypeError("data must be a list of Datum, not a single one")
    items = list(data)
    if not items:
        raise ValueError("data is empty: there is nothing to compute")
    for index, item in enumerate(items):
        if not isinstance(item, Datum):
            raise TypeError(
                f"data must be a list of Datum; item {index} is a {type(item).__name__}"
            )
    return items


def checked_config(loss_fn: str, config: LossFnConfig | None) -> LossFnConfig | None:
    """Return the settings of a loss with numbers as floats, also those given as text.

    Raise if there is no such loss, or if a setting is neither a number nor text.
    """
    if not isinstance(loss_fn, str):
        raise TypeError(f"loss_fn must be the name of a loss, got {type(loss_fn).__name__}")
    if loss_fn not in LOSS_FNS:
        raise ValueError(
            f"there is no loss {loss_fn!r}; loss_fn must be one of {', '.join(LOSS_FNS)}"
        )
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(f"loss_fn_config must be a mapping, got {type(config).__name__}")
    return {str(name): _setting(str(name), value) for name, value in config.items()}


def _setting(name: str, value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | np.number):
        raise ValueError(f"loss_fn_config[{name!r}] must be a number or text, got {value!r}")
    if isinstance(value, str):
        return value if name in TEXTS else _number_in(value)
    if not math.isfinite(value):
        raise ValueError(f"loss_fn_config[{name!r}] must be a finite number, got {value!r}")
    return float(value)


def _number_in(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def step_request(
    model_id: str, optim_params: OptimParams | None, adam_params: AdamParams | None
) -> OptimStepRequest:
    """Return the request of an optimizer step; raise unless it has one set of params."""
    if optim_params is not None and adam_params is not None:
        raise ValueError("give optim_params or adam_params, not both")
    params = optim_params if optim_params is not None else adam_params
    if isinstance(params, AdamParams):
        return OptimStepRequest(model_id=model_id, adam_params=params)
    if isinstance(params, DimuonParams | OptimParamsBase):
        return OptimStepRequest(model_id=model_id, optimizer_params=params.model_dump())
    raise TypeError(f"optim_step needs AdamParams or DimuonParams, got {type(params).__name__}")
