"""The weights that samplers sample from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from tinkex.engine.model.decoder import Decoder, Lora

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BARE_WEIGHTS = 0
_NUMBERS = count(BARE_WEIGHTS + 1)


@dataclass(frozen=True)
class Source:
    """Frozen weights to sample from, and the stop tokens and tokenizer of their model."""

    model: Decoder
    lora: Lora
    eos_tokens: frozenset[int]
    tokenizer: Callable[[], Tokenizer]
    version: int | None = None
    """The version of an in-flight target's weights."""

    def as_version(self, version: int) -> Source:
        """Return the same weights as a version of an in-flight target."""
        return replace(self, version=version)

    @cached_property
    def weights(self) -> int:
        """A number of these weights alone; samplers of the bare model share theirs."""
        return next(_NUMBERS) if self.lora.factors else BARE_WEIGHTS
