"""What the benchmarks of the engine begin with: they are programs, and nobody runs them on every
change."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "engine"
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def test_engine_with_random_weights_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    shapes, decode = importlib.import_module("shapes"), importlib.import_module("decode")
    monkeypatch.setitem(
        shapes.SHAPES, "135m", shapes.SHAPES["135m"] | SMALL | {"num_attention_heads": 4}
    )
    monkeypatch.setitem(shapes.SHAPES["135m"], "num_key_value_heads", 2)
    monkeypatch.setattr(decode.np.random, "default_rng", lambda *_: FirstTokens())
    rate, _, _ = decode.ours(decode.engine_of("135m", "cpu", 2), 2, 1, 8, 4, 2)
    assert rate > 0


class FirstTokens:
    """Random tokens of a vocabulary as small as the model's."""

    def integers(self, low: int, high: int, count: int) -> list[int]:
        return [(7 * index) % 300 for index in range(count)]
