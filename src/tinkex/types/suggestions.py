"""Suggestions for unknown keyword arguments: computed only after a constructor has failed."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

UNKNOWN = re.compile(r"[Uu]nexpected keyword argument '([^']*)'")
SYNONYMS = {
    "alpha": ("learning_rate",),
    "betas": ("beta1", "beta2"),
    "clip_norm": ("grad_clip_norm",),
    "epsilon": ("eps",),
    "gradient_clipping": ("grad_clip_norm",),
    "input": ("model_input", "prompt"),
    "input_ids": ("tokens", "model_input", "prompt"),
    "lora_rank": ("rank",),
    "lr": ("learning_rate",),
    "max_completion_tokens": ("max_tokens",),
    "max_grad_norm": ("grad_clip_norm",),
    "max_length": ("max_tokens",),
    "max_new_tokens": ("max_tokens",),
    "max_output_tokens": ("max_tokens",),
    "model": ("base_model", "model_name"),
    "n": ("num_samples",),
    "num_return_sequences": ("num_samples",),
    "r": ("rank",),
    "random_state": ("seed",),
    "rep_penalty": ("repetition_penalty",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "stop_token_ids": ("stop",),
    "target": ("loss_fn_inputs",),
    "targets": ("loss_fn_inputs",),
    "temp": ("temperature",),
    "wd": ("weight_decay",),
}
"""Names that other libraries use, and the fields that may be meant."""
MOST_LISTED = 12


def suggestion(kind: str, name: str, fields: Iterable[str]) -> str:
    """Tell that a type has no such field, and which one may be meant.

    Example:
        >>> suggestion("AdamParams", "lr", ["learning_rate", "beta1"])
        "AdamParams: unexpected keyword argument 'lr'; did you mean learning_rate?"
    """
    known = list(fields)
    meant = [field for field in SYNONYMS.get(name, ()) if field in known]
    meant = meant or difflib.get_close_matches(name, known, n=1)
    told = f"{kind}: unexpected keyword argument {name!r}"
    if meant:
        return f"{told}; did you mean {' and '.join(meant)}?"
    listed = ", ".join(known[:MOST_LISTED]) + (", …" if len(known) > MOST_LISTED else "")
    return f"{told}; it takes {listed}" if known else f"{told}; it takes none"


def unknown_argument(kind: type[Any], error: TypeError, given: Iterable[str]) -> str | None:
    """Return a suggestion for an error about an unknown argument of a constructor, else None."""
    found = UNKNOWN.search(str(error))
    fields = [name for name in inspect.signature(kind).parameters if not name.startswith("_")]
    if found is None or found[1] not in given or found[1] in fields:
        return None
    return suggestion(kind.__name__, found[1], fields)


if TYPE_CHECKING:
    # Type checkers read constructors from the classes themselves.
    RecordMeta = msgspec.StructMeta
    WiredMeta = type
else:

    class Suggesting(type):
        """A type whose constructor suggests names for unknown arguments."""

        def __call__(cls, *args, **fields):
            """Construct an instance."""
            try:
                return super().__call__(*args, **fields)
            except TypeError as error:
                told = unknown_argument(cls, error, fields)
                if told is None:
                    raise
                raise TypeError(told) from None

    class RecordMeta(Suggesting, type(msgspec.Struct)):
        """The type of records."""

    class WiredMeta(Suggesting):
        """The type of wired classes."""

        @property
        def __signature__(cls):
            """The constructor's own signature; else the one of `__call__` would be shown."""
            own = inspect.signature(cls.__init__)
            return own.replace(parameters=list(own.parameters.values())[1:])
