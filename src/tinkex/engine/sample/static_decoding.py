"""Decode with fixed shapes, which a GPU records as CUDA graphs.

Axes: T tokens of a pass, B rows, Q queries, R query heads of a group, S positions, N blocks of a
row, H query heads, G key/value heads, C channels of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model.attention import attend, trusted, visible
from tinkex.engine.model.decoder import BARE, Decoder, Lora, hidden_states
from tinkex.engine.model.mlp import Adaptation
from tinkex.engine.sample.blocks import BLOCK, NOTHING, RESERVED, SCRATCH
from tinkex.engine.sample.passes import Decoding, Piece, Pool, Prompts, Row, put
from tinkex.engine.sample.row_adapters import Bank, widest
from tinkex.engine.torch.device_copies import mark

PROMPT_ROWS = (16, 64, 256)
"""Numbers of tokens of prompts that are run as rows; more are run in chunks."""
LEAST_RANKS = 32
COLUMNS = 5
"""The numbers of a row before its blocks."""
KERNEL_WIDTH = 16
KERNEL_ERROR = 0.03
"""The largest distance of results for standard normal keys and values, in bfloat16."""


class StaticDecoding(Decoding):
    """Decoding with fixed shapes: numbers of rows and blocks are rounded up, and recorded once.

    A row of padding writes to a block of its own kind and reads zeros. The tokens of a pass stay on
    the device for the next one, which can begin before the host has read them.
    """

    ahead = True

    def __init__(self, model: Decoder, pool: Pool, most_rows: int) -> None:
        super().__init__(pool)
        self._model = model
        self._bank = Bank(model, 0)
        self._kernel = find_kernel(model, pool)
        self._drawn = torch.zeros(most_rows, dtype=torch.int64, device=pool.kv.device)
        self._shapes: dict[tuple[int, int, int], _Shape] = {}
        self._seated = 0
        self._decoded: dict[int, Lora] = {}
        """The adapters of the rows that were decoded last, while there are any."""
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    @property
    def _captures(self) -> bool:
        """Return whether passes are recorded; with experts the shapes are known too late."""
        return self._pool.kv.device.type == "cuda" and self._model.is_dense

    def join(self, row: Row, prompt: Sequence[int]) -> None:
        """Take in a row."""
        super().join(row, prompt)
        self._seated += 1

    def leave(self, row: Row) -> None:
        """Let a row go; the adapters of rows are kept as long as there is any row."""
        self._seated -= 1
        if not self._seated:
            self._decoded = {}

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Return rows as they are."""
        return rows

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Decode one token of each row."""
        self._decoded = {row.weights: row.lora for row in rows}
        logits_BV = self._run(rows, _rounded(len(rows)))[1]
        for row in rows:
            row.length += 1
        return logits_BV

    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Return the head's input for positions of prompts: rows that may share blocks."""
        size = next(size for size in PROMPT_ROWS if size >= len(rows))
        return self._run(rows, size)[0]

    def _run(self, rows: Sequence[Row], size: int) -> tuple[Tensor, Tensor]:
        adapters = self._place(rows)
        width = self._width(max(len(row.blocks) for row in rows))
        shape = self._shapes.get((size, width, adapters))
        if shape is None:
            bank = _banked(self._bank, adapters)
            numbers = (size, COLUMNS + width)
            shape = _Shape(self._model, self._pool, bank, self._kernel, self._drawn, numbers)
            self._shapes[size, width, adapters] = shape
            shape.fill(rows)
            if self._memory is not None:
                shape.record(self._memory)
        else:
            shape.fill(rows)
        hidden_BD, logits_BV = shape.run()
        return hidden_BD[: len(rows)], logits_BV[: len(rows)]

    def keep(self, tokens_B: Tensor) -> None:
        """Keep the tokens on the device."""
        self._drawn[: tokens_B.shape[0]] = tokens_B

    def _width(self, blocks: int) -> int:
        """Return the width of the tables: few for the kernel, which reads only what a row has.

        Plain attention reads it all.
        """
        if self._kernel is None:
            return _rounded(blocks)
        width = KERNEL_WIDTH
        while width < blocks:
            width *= 4
        return width

    def _place(self, rows: Sequence[Row]) -> int:
        """Put the adapters of these rows into the bank; return 0 for none, 1 for one, 2 for more.

        The adapters of the rows decoded last stay: prompts run in between.
        """
        own = {row.weights: row.lora for row in rows}
        if not any(lora.factors for lora in own.values()):
            return 0
        adapters = {number: lora for number, lora in (self._decoded | own).items() if lora.factors}
        if not self._bank.place(adapters):
            ranks = sum(map(widest, adapters.values()))
            self._shapes = {key: shape for key, shape in self._shapes.items() if not key[2]}
            if self._memory is not None:  # memory whose graphs are all gone cannot be used again
                self._memory = torch.cuda.graph_pool_handle()
            self._bank = Bank(self._model, max(LEAST_RANKS, 2 * self._bank.ranks, _rounded(ranks)))
            self._bank.place(adapters)
        return 1 if len(own) == len(adapters) == 1 else 2


Banked: TypeAlias = Callable[[Tensor], Adaptation]
"""The adaptation of rows that belong to the adapters of these numbers."""


def _banked(bank: Bank, adapters: int) -> Banked:
    """Return the adaptation with no adapter, one for all rows, or several."""
    if adapters == 0:
        return lambda _: BARE
    return (lambda _: bank.whole()) if adapters == 1 else bank.share


@dataclass(eq=False, slots=True)
class _Host:
    """Inputs of a pass, from where the device copies them."""

    values: Tensor
    copied: torch.cuda.Event | None = None
    """The end of the last copy."""


@dataclass(eq=False)
class _Shape:
    """A pass over fixed numbers of rows and blocks: its inputs and its graph."""

    _model: Decoder
    _pool: Pool
    _bank: Banked
    _kernel: Kernel | None
    _drawn: Tensor
    _size: tuple[int, int]
    """Rows and numbers of a row."""
    _graph: torch.cuda.CUDAGraph | None = None
    _outputs: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        device = self._pool.kv.device
        made = partial(torch.zeros, *self._size, dtype=torch.int64)
        # two, in turn: the device may still have to copy the other
        self._hosts = [_Host(made(pin_memory=device.type == "cuda")) for _ in range(2)]
        self._inputs = made(device=device)

    def fill(self, rows: Sequence[Row]) -> None:
        """Put tokens, positions, places, adapters and tables into the inputs of the pass."""
        self._hosts.reverse()
        # nothing else waits for passes that draw nothing
        if (copied := self._hosts[0].copied) is not None:
            copied.synchronize()
        host = self._hosts[0].values.numpy()
        host[:] = 0
        host[:, 2], host[:, 4] = SCRATCH * BLOCK, -1
        for at, row in enumerate(rows):
            place = row.blocks[row.length // BLOCK] * BLOCK + row.length % BLOCK
            numbers = (row.token, row.length, place, row.weights, row.drawn)
            host[at, : COLUMNS + len(row.blocks)] = (*numbers, *row.blocks)
        self._inputs.copy_(self._hosts[0].values, non_blocking=True)
        self._hosts[0].copied = mark(self._inputs.device)

    def record(self, memory: Any) -> None:
        """Record the pass as a CUDA graph, after two runs, which libraries need."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._pass()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # another thread may be copying weights to the host (device_copies.to_host_beside)
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._outputs = self._pass()

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the head's input and its logits `[B, V]`; the next run may overwrite them."""
        if self._graph is None or self._outputs is None:
            return self._pass()
        self._graph.replay()
        return self._outputs

    def _pass(self) -> tuple[Tensor, Tensor]:
        tokens_B, positions_B, places_B, weights_B, drawn_B = self._inputs[:, :COLUMNS].unbind(1)
        tokens_B = torch.where(drawn_B < 0, tokens_B, self._drawn[drawn_B.clamp_min(0)])
        tables_BN = self._inputs[:, COLUMNS:].contiguous()
        rows = (tables_BN, positions_B.contiguous(), places_B.contiguous())
        attention = _BlockAttention(self._model.attention, self._pool, self._kernel, *rows)
        lora = self._bank(weights_B)
        hidden_BD = hidden_states(self._model, tokens_B, positions_B, attention, lora)
        return hidden_BD, self._model.logits(hidden_BD, lora)


class ShortPrompts:
    """Prompts where decoding has fixed shapes: a few tokens run as rows of a recorded pass.

    The host takes longer to start a pass of prefill, kernel after kernel, than the device to run a
    short one.
    """

    def __init__(self, prefill: Prompts, decoding: StaticDecoding) -> None:
        self._prefill, self._decoding = prefill, decoding

    def hidden(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the hidden states as `Prompts` says."""
        if sum(piece.stop - piece.start for piece in pieces) > PROMPT_ROWS[-1]:
            return self._prefill.hidden(pieces)
        rows = [
            Row(piece.lora, piece.weights, list(piece.blocks), position, token)
            for piece in pieces
            for position, token in enumerate(
                piece.tokens[piece.start : piece.stop].tolist(), piece.start
            )
        ]
        return self._decoding.hidden(rows)


@dataclass(frozen=True, slots=True)
class _BlockAttention:
    """Attention of one new position of each row to the blocks of its table."""

    _rules: Sequence[AttentionRule]
    _pool: Pool
    _kernel: Kernel | None
    _tables_BN: Tensor
    _positions_B: Tensor
    _places_B: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, q_BHC: Tensor, k_BGC: Tensor, v_BGC: Tensor) -> Tensor:
        """Keep the keys and values, then attend."""
        self._pool.write(layer, self._places_B, k_BGC, v_BGC)
        rule = self._rules[layer]
        if self._kernel is None:
            return self._gathered(layer, q_BHC, rule)
        kv_2NSGC, softcap = self._pool.kv[layer], rule.softcap
        return self._kernel(
            q_BHC, kv_2NSGC, self._tables_BN, self._positions_B, rule.scale, rule.window, softcap
        )

    def _gathered(self, layer: int, q_BHC: Tensor, rule: AttentionRule) -> Tensor:
        """Attend to a copy of the blocks: the heads of a group are queries of one sequence."""
        k_BSGC, v_BSGC = self._pool.read(layer, self._tables_BN)
        count, _, groups, channels = k_BSGC.shape
        q_BRGC = q_BHC.view(count, groups, -1, channels).transpose(1, 2)
        seen = self._seen(rule).expand(-1, q_BRGC.shape[1], -1)
        mixed = attend(q_BRGC, k_BSGC, v_BSGC, seen, rule)
        return mixed.view(count, -1, groups, channels).transpose(1, 2).reshape(count, -1)

    def _seen(self, rule: AttentionRule) -> Tensor:
        if rule.window not in self._masks:
            keys_S = torch.arange(self._tables_BN.shape[1] * BLOCK, device=self._tables_BN.device)
            self._masks[rule.window] = visible(self._positions_B[:, None], keys_S, rule)
        return self._masks[rule.window]


Kernel: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, float, int | None, float | None],
    Tensor,
]
"""Attention from blocks, as `paged.paged_attention` does it."""


def find_kernel(model: Decoder, pool: Pool) -> Kernel | None:
    """Return the kernel, if Triton is here and it agrees with plain attention on this model."""
    config = model.config
    if (
        pool.kv.device.type != "cuda"
        or config.head_dim & (config.head_dim - 1)
        or config.head_dim < 16
    ):
        return None

    def measured() -> tuple[Kernel, float]:
        from tinkex.engine.kernels.paged import paged_attention

        return paged_attention, _kernel_error(paged_attention, model)

    kernel: Kernel | None = trusted("decoding", measured, KERNEL_ERROR)
    return kernel


def _kernel_error(kernel: Kernel, model: Decoder) -> float:
    """Return the distance of the kernel from plain attention, for rows of different lengths."""
    pool, config = Pool(model, 6), model.config
    generator = torch.Generator(pool.kv.device).manual_seed(0)
    for block in range(RESERVED, RESERVED + 6):
        pool.kv[:, :, block].normal_(generator=generator)
    tables_BN = put([[2, 3, 4], [5, 6, NOTHING], [7, NOTHING, NOTHING]], pool.kv)
    positions_B = put([3 * BLOCK - 2, BLOCK, 5], pool.kv)
    q_BHC = pool.kv.new_empty(3, config.heads, config.head_dim).normal_(generator=generator)
    worst = 0.0
    for layer in range(config.layers):
        rule = model.attention[layer]
        plain = _BlockAttention(model.attention, pool, None, tables_BN, positions_B, positions_B)
        expected = plain._gathered(layer, q_BHC, rule)
        got = kernel(
            q_BHC, pool.kv[layer], tables_BN, positions_B, rule.scale, rule.window, rule.softcap
        )
        worst = max(worst, float((got - expected).abs().max()))
    return worst


def _rounded(number: int) -> int:
    """Round up to a power of two or the middle between two."""
    power = 1
    while power < number:
        if power >= 8 and power * 3 // 2 >= number:
            return power * 3 // 2
        power *= 2
    return power
