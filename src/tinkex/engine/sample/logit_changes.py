"""Changes of logits that a request asks for: banned words, biases and penalties.

Banned tokens go first, then biases, then penalties: repetition, frequency, presence. The changed
logits decide which token is drawn; reported log-probabilities are those of the unchanged ones.

Tokens of a sample are kept on the device, because the next step begins before the host has read
them. Only samples whose request depends on earlier tokens take memory there.

Axes: B rows, V vocabulary, T tokens of a sample, W banned sequences, L tokens before the last of a
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.api import EngineError
from tinkex.engine.sample.token_choice import choose
from tinkex.engine.torch.device_copies import to_device
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensors import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROWS_BUDGET = 1 << 24
"""Logits changed at a time."""
FIRST_WIDTH = 256
FIRST_SLOTS = 8
ANY, NONE = -1, -2
"""A place before the beginning of a banned sequence, and one before the beginning of a sample."""


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """The changes that one request asks for."""

    repetition: float
    presence: float
    frequency: float
    prompt: Array
    """Distinct tokens of the prompt, if their repetition is penalised."""
    biased: Array
    biases: Array
    banned: Array
    """Tokens that are never drawn."""
    lasts_W: Array
    """The last tokens of banned sequences; the others must have been drawn just before."""
    befores_WL: Array
    """The other tokens of each, right-aligned."""

    @property
    def looks_back(self) -> bool:
        """Return whether the tokens drawn so far matter."""
        return bool(self.lasts_W.size or self.repetition != 1 or self.presence or self.frequency)

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: Array, vocab: int, tokenizer: Callable[[], Tokenizer]
    ) -> Shape | None:
        """Return the changes of a request, or None if it asks for none."""
        if not params.changes_logits:
            return None
        biases = params.logit_bias or {}
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        words = _sequences(params.bad_words or [], tokenizer)
        for name, tokens in (
            ("logit_bias", biases),
            ("bad_words", (token for word in words for token in word)),
        ):
            for token in tokens:
                if token >= vocab:
                    raise EngineError(
                        f"{name} holds token {token}, outside the vocabulary of {vocab}"
                    )
        if len({word[-1] for word in words}) >= vocab:
            raise EngineError(f"bad_words ban all {vocab} tokens; give fewer")
        banned = {word[0] for word in words if len(word) == 1}
        longer = [word for word in words if len(word) > 1]
        befores_WL = np.full(
            (len(longer), max((len(word) - 1 for word in longer), default=0)), ANY, np.int64
        )
        for row, word in zip(befores_WL, longer, strict=True):
            row[1 - len(word) :] = word[:-1]
        return cls(
            *penalties,
            np.unique(prompt).astype(np.int64)
            if params.repetition_penalty != 1
            else np.zeros(0, np.int64),
            np.array(list(biases), np.int64),
            np.array(list(biases.values()), np.float32),
            np.array(sorted(banned), np.int64),
            np.array([word[-1] for word in longer], np.int64),
            befores_WL,
        )


def _sequences(
    words: Sequence[str | list[int]], tokenizer: Callable[[], Tokenizer]
) -> set[tuple[int, ...]]:
    """Return banned sequences of tokens; a text is banned at the start of a word and within one."""
    found = {tuple(word) for word in words if not isinstance(word, str)}
    for word in words:
        if isinstance(word, str):
            inside, begins = (
                _encoded(f"{space}{word.lstrip()}", tokenizer()) for space in ("", " ")
            )
            found.add(inside)
            # otherwise a separate space comes first
            if len(begins) == len(inside) and begins[0] != inside[0]:
                found.add(begins)
    return found


def _encoded(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    if not ids:
        raise EngineError(f"bad_words: the tokenizer has no tokens for {text!r}")
    return ids


class Shaped(NamedTuple):
    """A row with changes: its sample, and the number of tokens that has."""

    sample: object
    shape: Shape
    tokens: Sequence[int]
    """The tokens that have been read."""
    length: int


class Shaper:
    """Chooses tokens for rows with changes, and keeps them while their samples run."""

    def __init__(self, device: torch.device, vocab: int) -> None:
        self._device, self._vocab = device, vocab
        self._slots: dict[object, int] = {}
        self._free: list[int] = []
        self._tokens = torch.zeros(0, FIRST_WIDTH, dtype=torch.int32, device=device)
        self._plan: _Plan | None = None

    def choose(
        self,
        logits_BV: Tensor,
        numbers_B: Array,
        params_B: Sequence[SamplingParams],
        rows: Sequence[Shaped],
    ) -> Tensor:
        """Return a token for each row, by its changed logits."""
        step = max(1, ROWS_BUDGET // self._vocab)
        if len(rows) > step:
            parts = [slice(start, start + step) for start in range(0, len(rows), step)]
            return torch.cat(
                [self.choose(logits_BV[p], numbers_B[p], params_B[p], rows[p]) for p in parts]
            )
        slots = np.array([self._slot(row) for row in rows])
        lengths = np.array([row.length for row in rows])
        changed_BV = self._changed(logits_BV, rows, slots, lengths)
        tokens_B = choose(changed_BV, numbers_B, params_B)[0]
        kept = np.flatnonzero(slots >= 0)
        if kept.size:
            self._widen(int(lengths[kept].max()) + 1)
            places = tuple(to_device(x[kept], self._device) for x in (slots, lengths))
            self._tokens[places] = tokens_B[to_device(kept, self._device)].to(torch.int32)
        return tokens_B

    def forget(self, sample: object) -> None:
        """Free the memory of a sample."""
        slot = self._slots.pop(sample, None)
        if slot is not None:
            self._free.append(slot)
        if not self._slots:
            self._tokens, self._free = self._tokens.new_zeros(0, FIRST_WIDTH), []
            self._plan = None

    def _changed(
        self, logits_BV: Tensor, rows: Sequence[Shaped], slots: Array, lengths: Array
    ) -> Tensor:
        shapes = [row.shape for row in rows]
        if self._plan is None or not self._plan.fits(shapes):
            self._plan = _Plan(shapes, self._vocab, self._device)
        told = None
        if (slots >= 0).any():
            longest = max(1, int(lengths.max()))
            self._widen(longest)
            slots_B = to_device(np.maximum(slots, 0), self._device)
            told = _Told(
                self._tokens[slots_B, :longest].long(), to_device(lengths, self._device)[:, None]
            )
        return self._plan.changed(logits_BV, told)

    def _slot(self, row: Shaped) -> int:
        """Return the slot of a sample's tokens; -1 if its request does not look back."""
        if not row.shape.looks_back:
            return -1
        slot = self._slots.get(row.sample)
        if slot is None:
            if not self._free:
                self._more_slots()
            slot = self._slots[row.sample] = self._free.pop()
            if row.tokens:  # it was put back, and its slot was freed
                self._widen(len(row.tokens))
                self._tokens[slot, : len(row.tokens)] = to_device(
                    row.tokens, self._device, torch.int32
                )
        return slot

    def _more_slots(self) -> None:
        count, width = self._tokens.shape
        grown = self._tokens.new_zeros(max(FIRST_SLOTS, 2 * count), width)
        grown[:count] = self._tokens
        self._tokens, self._free = grown, [*range(grown.shape[0] - 1, count - 1, -1)]

    def _widen(self, needed: int) -> None:
        count, width = self._tokens.shape
        if needed > width:
            grown = self._tokens.new_zeros(count, max(needed, 2 * width))
            grown[:, :width] = self._tokens
            self._tokens = grown


class _Told(NamedTuple):
    """The tokens of samples `[B, T]`, and their lengths `[B, 1]`."""

    tokens_BT: Tensor
    lengths_B1: Tensor


class _Plan:
    """The changes of some rows, on the device; steps with the same rows reuse it."""

    def __init__(self, shapes: Sequence[Shape], vocab: int, device: torch.device) -> None:
        self._shapes = list(shapes)

        def flat(tokens: Sequence[Array]) -> Tensor:
            return to_device(
                np.concatenate([row * vocab + ids for row, ids in enumerate(tokens)]), device
            )

        def column(values: Sequence[float]) -> Tensor:
            return to_device(values, device, torch.float32)[:, None]

        self._banned = flat([shape.banned for shape in shapes])
        self._biased = flat([shape.biased for shape in shapes])
        self._biases = to_device(
            np.concatenate([shape.biases for shape in shapes]), device, torch.float32
        )
        self._prompt = flat([shape.prompt for shape in shapes])
        self._lasts = flat([shape.lasts_W for shape in shapes])
        counts = [shape.lasts_W.size for shape in shapes]
        self._rows_W = to_device(np.repeat(np.arange(len(shapes)), counts), device)
        self._befores_WL = to_device(_side_by_side([shape.befores_WL for shape in shapes]), device)
        self._repetition_B1 = column([shape.repetition for shape in shapes])
        self._frequency_B1 = column([shape.frequency for shape in shapes])
        self._presence_B1 = column([shape.presence for shape in shapes])
        self._repeats = any(shape.repetition != 1 for shape in shapes)
        self._counts = any(shape.frequency or shape.presence for shape in shapes)

    def fits(self, shapes: Sequence[Shape]) -> bool:
        """Return whether it was made for these rows."""
        return len(shapes) == len(self._shapes) and all(
            a is b for a, b in zip(shapes, self._shapes, strict=True)
        )

    def changed(self, logits_BV: Tensor, told: _Told | None) -> Tensor:
        """Return the changed logits, in float32 at least."""
        changed_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32), copy=True)
        flat = changed_BV.view(-1)
        if self._banned.numel():
            flat.index_fill_(0, self._banned, -torch.inf)
        if self._lasts.numel() and told is not None:
            self._ban_sequences(flat, told)
        if self._biased.numel():
            flat.index_add_(0, self._biased, self._biases.to(flat.dtype))
        if told is None or not (self._repeats or self._counts):
            return changed_BV
        counts_BV = self._count(changed_BV, told)
        if self._repeats:
            seen_BV = counts_BV > 0
            seen_BV.view(-1).index_fill_(0, self._prompt, True)
            factors_BV = torch.where(seen_BV, self._repetition_B1.to(flat.dtype), 1)
            changed_BV = torch.where(
                changed_BV > 0, changed_BV / factors_BV, changed_BV * factors_BV
            )
        if self._counts:
            changed_BV = (
                changed_BV - counts_BV * self._frequency_B1 - (counts_BV > 0) * self._presence_B1
            )
        return changed_BV

    def _count(self, like_BV: Tensor, told: _Told) -> Tensor:
        """Count each token, by sums of ones, whose order does not matter."""
        places_T = torch.arange(told.tokens_BT.shape[1], device=like_BV.device)
        said_BT = (places_T < told.lengths_B1).to(like_BV.dtype)
        return torch.zeros_like(like_BV).scatter_add_(1, told.tokens_BT, said_BT)

    def _ban_sequences(self, flat: Tensor, told: _Told) -> None:
        """Ban the last tokens of sequences whose other tokens were drawn just before."""
        size = self._befores_WL.shape[1]
        places_BL = told.lengths_B1 - size + torch.arange(size, device=flat.device)
        tails_BL = told.tokens_BT.gather(1, places_BL.clamp(0, told.tokens_BT.shape[1] - 1))
        tails_BL = torch.where(places_BL >= 0, tails_BL, NONE)
        alike_WL = (tails_BL[self._rows_W] == self._befores_WL) | (self._befores_WL == ANY)
        # added: a token may end several sequences, and their order must not matter
        flat.index_add_(0, self._lasts, torch.where(alike_WL.all(-1), -torch.inf, 0).to(flat.dtype))


def _side_by_side(tables: Sequence[Array]) -> Array:
    """Return tables of banned sequences as one, padded at the left."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate(
        [np.pad(t, ((0, 0), (width - t.shape[1], 0)), constant_values=ANY) for t in tables]
    )
