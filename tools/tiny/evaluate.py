"""Measures the bundled model: bits per byte against n-gram models, samples, and held-out addition.

Run ``PYTHONPATH=src python -m tools.tiny.evaluate --model src/tinkex/models/tiny`` to measure the
stored model again; the text is generated anew from the seeds of `train.Settings`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from tools.tiny import corpus
from transformers import AutoModelForCausalLM

from tinkex.models import addition

Tokens = npt.NDArray[np.int64]
_LOG2 = math.log(2.0)


def load(folder: Path, device: str) -> Any:
    """Load a stored model for computing in float32, from its bfloat16 weights."""
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the number of a token that the tokenizer must have."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise KeyError(token)
    return number


def _as_bytes(text: str) -> bytes:
    """Write a document as bytes, each special token as one control character, which the text never
    has.
    """
    for i, token in enumerate(corpus.SPECIAL_TOKENS, start=1):
        text = text.replace(token, chr(i))
    return text.encode()


def byte_length(text: str) -> int:
    """Count a document's bytes, each special token as one."""
    return len(_as_bytes(text))


def byte_tokens(text: str) -> Tokens:
    """Write a document and the end token as the tokens of a byte-level model."""
    return np.frombuffer(_as_bytes(text + corpus.EOS), dtype=np.uint8).astype(np.int64)


@dataclass
class _Order:
    """Counts of one order: sorted n-grams, and sums per context."""

    grams: Tokens
    counts: Tokens
    contexts: Tokens
    totals: Tokens
    kinds: Tokens
    discounts: npt.NDArray[np.float64]
    discount_sums: npt.NDArray[np.float64]


class NGram:
    """An interpolated n-gram model with modified Kneser-Ney smoothing.

    Discounts come from the counts of counts, as Chen and Goodman set them; the lowest order falls
    back on a uniform distribution, so every token has some probability.
    """

    def __init__(
        self, documents: Sequence[Sequence[int] | Tokens], vocabulary: int, order: int
    ) -> None:
        """Count the n-grams of documents, each of which starts after an empty context and has its
        own end token.
        """
        self.order, self.base = order, vocabulary + 1
        if order * math.log2(self.base) >= 63:
            raise ValueError(f"{order}-grams over {vocabulary} tokens do not fit into 64 bits")
        columns, keep = self._windows(documents)
        grams = self._join(columns)[keep]
        self.orders: list[_Order] = []
        unique, counts = np.unique(grams, return_counts=True)
        for n in range(order, 0, -1):
            self.orders.insert(0, self._count(unique, counts))
            if n > 1:
                # A lower order counts in how many different contexts its n-gram was seen.
                unique, counts = np.unique(unique % self.base ** (n - 1), return_counts=True)
        self.uniform = 1.0 / vocabulary

    def _windows(
        self, documents: Sequence[Sequence[int] | Tokens]
    ) -> tuple[list[Tokens], npt.NDArray[np.bool_]]:
        pad = np.zeros(self.order - 1, np.int64)
        flat = np.concatenate(
            [part for document in documents for part in (pad, np.asarray(document) + 1)]
        )
        keep = flat != 0
        columns = [
            np.concatenate([np.zeros(shift, np.int64), flat[: len(flat) - shift]])
            for shift in range(self.order)
        ]
        return columns[::-1], keep

    def _join(self, columns: Sequence[Tokens]) -> Tokens:
        joined = np.zeros_like(columns[0])
        for column in columns:
            joined = joined * self.base + column
        return joined

    def _count(self, grams: Tokens, counts: Tokens) -> _Order:
        ones = [max(int((counts == k).sum()), 1) for k in (1, 2, 3, 4)]
        share = ones[0] / (ones[0] + 2 * ones[1])
        discounts = np.clip(
            [k - (k + 1) * share * ones[k] / ones[k - 1] for k in (1, 2, 3)],
            0.05,
            [0.95, 1.9, 2.85],
        )
        contexts, start = np.unique(grams // self.base, return_index=True)
        kind = np.minimum(counts, 3)
        removed = np.add.reduceat(discounts[kind - 1], start)
        totals = np.add.reduceat(counts, start)
        return _Order(grams, counts, contexts, totals, kind, discounts, removed)

    def bits(self, documents: Sequence[Sequence[int] | Tokens]) -> float:
        """Return the bits that the model needs for documents, all their tokens counted."""
        columns, keep = self._windows(documents)
        columns = [column[keep] for column in columns]
        probability = np.full(len(columns[0]), self.uniform)
        for n, level in enumerate(self.orders, start=1):
            grams = self._join(columns[self.order - n :])
            at = np.minimum(np.searchsorted(level.grams, grams), len(level.grams) - 1)
            seen = level.grams[at] == grams
            context = grams // self.base
            where = np.minimum(np.searchsorted(level.contexts, context), len(level.contexts) - 1)
            known = level.contexts[where] == context
            total = np.where(known, level.totals[where], 1)
            kept = (
                np.where(seen, level.counts[at] - level.discounts[level.kinds[at] - 1], 0.0) / total
            )
            rest = np.where(known, level.discount_sums[where] / total, 1.0)
            probability = kept + rest * probability
        return float(-np.log2(probability).sum())


def model_bits(
    model: Any, documents: Sequence[Sequence[int]], bos: int, device: str, batch: int = 64
) -> float:
    """Return the bits that a causal model needs for documents, each read after the begin token."""
    nats = 0.0
    ordered = sorted(documents, key=len)
    for i in range(0, len(ordered), batch):
        rows = ordered[i : i + batch]
        width = max(map(len, rows)) + 1
        inputs = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full((len(rows), width), -100)
        for j, row in enumerate(rows):
            inputs[j, 0] = bos
            inputs[j, 1 : len(row) + 1] = torch.tensor(row)
            targets[j, : len(row)] = torch.tensor(row)
        with torch.no_grad():
            logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=-100, reduction="sum"
        )
        nats += float(loss)
    return nats / _LOG2


def generate(
    model: Any,
    prompts: torch.Tensor,
    length: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue prompts of equal length; temperature 0 takes the likeliest token."""
    tokens, cache, written = prompts, None, []
    for _ in range(length):
        with torch.no_grad():
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[:, -1].float(), output.past_key_values
        if temperature == 0.0:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        written.append(tokens)
    return torch.cat(written, dim=1)


def addition_accuracy(
    model: Any,
    tokenizer: Tokenizer,
    problems: Sequence[tuple[int, int]],
    device: str,
    begin: Sequence[int],
) -> float:
    """Return the share of additions that the model's likeliest tokens solve."""
    rows = [
        [*begin, *tokenizer.encode(addition.prompt(a, b), add_special_tokens=False).ids]
        for a, b in problems
    ]
    right = 0.0
    for i in range(0, len(rows), 512):
        prompts = torch.tensor(rows[i : i + 512], device=device)
        answers = generate(model, prompts, addition.MAX_ANSWER_TOKENS, 0.0).tolist()
        for (a, b), answer in zip(problems[i : i + 512], answers, strict=True):
            right += addition.reward(tokenizer.decode(answer), a, b)
    return right / len(problems)


def worded_accuracy(
    model: Any, tokenizer: Tokenizer, problems: Sequence[tuple[int, int]], device: str, bos: int
) -> float:
    """Return the accuracy on the same problems asked in words."""
    right = 0
    for i in range(0, len(problems), 512):
        part = problems[i : i + 512]
        texts = [f"What is {a} plus {b}? {a} plus {b} is " for a, b in part]
        prompts = torch.tensor(
            [[bos, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
        )
        for (a, b), row in zip(
            part, generate(model, prompts.to(device), 4, 0.0).tolist(), strict=True
        ):
            right += tokenizer.decode(row).partition(".")[0].strip() == str(a + b)
    return right / len(problems)


SAMPLE_PROMPTS = (
    "",
    "One sunny day,",
    "The Lost Kite\n",
    f"{corpus.USER}Tell me a story about a fox.{corpus.END}{corpus.ASSISTANT}",
    f"{corpus.USER}Who is the mayor of Talmere?{corpus.END}{corpus.ASSISTANT}",
    "Question: What is 23 plus 45?\nAnswer:",
)


def samples(
    model: Any, tokenizer: Tokenizer, device: str, seed: int, temperature: float = 0.7
) -> list[tuple[str, str]]:
    """Continue the sample prompts until an end token."""
    generator = torch.Generator(device=device).manual_seed(seed)
    ends = {token_id(tokenizer, corpus.EOS), token_id(tokenizer, corpus.END)}
    written = []
    for text in SAMPLE_PROMPTS:
        ids = [
            token_id(tokenizer, corpus.BOS),
            *tokenizer.encode(text, add_special_tokens=False).ids,
        ]
        row = generate(model, torch.tensor([ids], device=device), 260, temperature, generator)[
            0
        ].tolist()
        stop = next((i for i, token in enumerate(row) if token in ends), len(row))
        written.append((text, tokenizer.decode(row[:stop], skip_special_tokens=False)))
    return written


def longest_copies(texts: Sequence[Sequence[int]], training: Tokens) -> list[int]:
    """Return, for each text, a lower bound on the longest run of tokens that the training text has
    verbatim.

    The bound is the largest of a few run lengths of which the training text has one, found by
    rolling hashes.
    """
    factor = np.uint64(0x9E3779B97F4A7C15)
    best = [0] * len(texts)
    hashes = np.zeros(len(training), np.uint64)
    runs = [
        run for run in (8, 16, 24, 32, 48, 64, 96, 128) if any(len(text) >= run for text in texts)
    ]
    length = 0
    for run in runs:
        for shift in range(length, run):
            hashes[: len(training) - shift] *= factor
            hashes[: len(training) - shift] += training[shift:].astype(np.uint64)
        length = run
        owners = {
            _hash(text[j : j + run], int(factor)): i
            for i, text in enumerate(texts)
            for j in range(len(text) - run + 1)
        }
        wanted = np.array(sorted(owners), dtype=np.uint64)
        seen = hashes[: len(training) - run + 1]
        at = np.minimum(np.searchsorted(wanted, seen), len(wanted) - 1)
        for value in np.unique(wanted[at][wanted[at] == seen]):
            best[owners[int(value)]] = run
    return best


def _hash(window: Sequence[int], factor: int) -> int:
    value = 0
    for token in window:
        value = (value * factor + token) % 2**64
    return value


def main() -> None:
    """Measure a stored model and print the figures."""
    from tools.tiny import train

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("src/tinkex/models/tiny"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--documents", type=int, default=None, help="training documents of the n-gram models"
    )
    options = parser.parse_args()
    settings = train.Settings()
    print(
        json.dumps(
            train.measure(options.model, settings, options.device, options.documents), indent=2
        )
    )


if __name__ == "__main__":
    main()
