"""Settings of a sampling request, and their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from tinkex.types.record import Int64, Record, number, settle, settle_each, whole

REPETITION = (0.01, 100.0)
"""The least and the largest repetition penalty."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
REALS = ("temperature", "top_p", "min_p", *PENALTIES)
PENALTY = 2.0
"""The largest presence and frequency penalty, of either sign."""
BIAS = 100.0
"""The largest bias of a token, of either sign."""
MOST_BIASES = 4096
MOST_BAD_WORDS = 1024
LONGEST_BAD_WORD = 256
"""Characters of a text, or tokens of a sequence."""


class SamplingParams(Record, frozen=True, kw_only=True):
    """Settings of a sampling request.

    Without `stop`, a sample ends at the end-of-text tokens; an empty list never stops early.

    `min_p` and the fields after it are tinkex's own. They are sent only when set; other servers may
    refuse or ignore them.

    Example:
        >>> SamplingParams(max_tokens=16, temperature=0.7).top_k
        -1
    """

    SENT_WHEN_SET: ClassVar[Mapping[str, Any]] = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "bad_words": None,
    }

    max_tokens: Int64 | None = None
    seed: Int64 | None = None
    stop: str | list[str | Int64] | None = None
    temperature: float = 1.0
    top_k: Int64 = -1
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest token are not drawn."""
    repetition_penalty: float = 1.0
    """Penalty on tokens of the prompt and the output: divides positive logits, multiplies negative.
    """
    presence_penalty: float = 0.0
    """Taken off the logit of each token of the output."""
    frequency_penalty: float = 0.0
    """Taken off the logit of each token of the output, once for each time it was drawn."""
    logit_bias: dict[Int64, float] | None = None
    """Added to the logits of these tokens."""
    bad_words: list[str | list[Int64]] | None = None
    """Texts and sequences of tokens that are not drawn."""

    def __post_init__(self) -> None:
        settle_each(self, number, REALS)
        settle_each(self, whole, ("top_k",), optional=("max_tokens", "seed"))
        if self.stop is not None and not isinstance(self.stop, str):
            if len({isinstance(item, str) for item in self.stop}) > 1:
                raise ValueError("stop must be all strings or all token ids")
            stop = [item if isinstance(item, str) else whole(item, "stop") for item in self.stop]
            settle(self, "stop", stop)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError("max_tokens must be >= 0")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError("temperature must be a number >= 0")
        if self.top_k < -1 or self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError("top_p must be in (0, 1]")
        self._check_penalties()
        settle(self, "logit_bias", _biases(self.logit_bias))
        settle(self, "bad_words", _bad_words(self.bad_words))

    @property
    def changes_logits(self) -> bool:
        """True if logits are changed before tokens are drawn.

        Example:
            >>> (
            ...     SamplingParams(min_p=0.1).changes_logits,
            ...     SamplingParams(bad_words=["no"]).changes_logits,
            ... )
            (False, True)
        """
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias or self.bad_words) or penalties != (1, 0, 0)

    def _check_penalties(self) -> None:
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        least, largest = REPETITION
        if not least <= self.repetition_penalty <= largest:
            raise ValueError(
                f"repetition_penalty must be between {least} and {largest:g} (1 is off), got "
                f"{self.repetition_penalty}"
            )
        for name in PENALTIES[1:]:
            if not -PENALTY <= getattr(self, name) <= PENALTY:
                raise ValueError(
                    f"{name} must be between -2 and 2 (0 is off), got {getattr(self, name)}"
                )


def _biases(given: Any) -> dict[int, float] | None:
    """Biases by token id; None if there are none."""
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {type(given).__name__}")
    if len(given) > MOST_BIASES:
        raise ValueError(f"logit_bias takes at most {MOST_BIASES} tokens, got {len(given)}")
    biases = {_token(key, "logit_bias"): number(bias, "logit_bias") for key, bias in given.items()}
    for token, bias in biases.items():
        if not abs(bias) <= BIAS or math.isnan(bias):
            raise ValueError(
                f"logit_bias of token {token} must be between -100 and 100, got {bias}"
            )
    return biases


def _bad_words(given: Any) -> list[str | list[int]] | None:
    """Texts and sequences of token ids; None if there are none."""
    if given is None:
        return None
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise ValueError(
            "bad_words must be a list of texts or of lists of token ids, got "
            f"{type(given).__name__}"
        )
    words = [word if isinstance(word, str) else _sequence(word) for word in given]
    if len(words) > MOST_BAD_WORDS:
        raise ValueError(f"bad_words takes at most {MOST_BAD_WORDS} entries, got {len(words)}")
    for word in words:
        if not word or (isinstance(word, str) and not word.strip()):
            raise ValueError("bad_words must not hold an empty entry")
        if len(word) > LONGEST_BAD_WORD:
            kind = "characters" if isinstance(word, str) else "tokens"
            raise ValueError(
                f"an entry of bad_words has {len(word)} {kind}; at most {LONGEST_BAD_WORD} are "
                "taken"
            )
    return words or None


def _sequence(word: Any) -> list[int]:
    if not hasattr(word, "__iter__"):
        raise ValueError(
            "an entry of bad_words must be a text or a list of token ids, got "
            f"{type(word).__name__}"
        )
    return [_token(token, "bad_words") for token in word]


def _token(token: Any, name: str) -> int:
    """A token id that is no negative number."""
    value = whole(token, name)
    if value < 0:
        raise ValueError(f"{name} holds the token id {value}, which is negative")
    return value
