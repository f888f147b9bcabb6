"""Run sampling: all jobs on a base model advance together, with any adapters.

A step decodes one token of every row and runs a chunk of prompts beside it; a new job joins at the
next step. Keys and values lie in a bounded number of blocks. Samples of one prompt share its
blocks, and so do jobs whose prompts begin alike under the same weights, also later ones. The
`step_scheduler` decides what a step runs; the runner executes it with tensors.

A device that runs on its own begins a step before the tokens of the previous one have been read. A
row whose end is seen only then has decoded one extra token, which is discarded.

The result of a job depends on that job alone: random numbers are counted (see `token_choice`), and
on a CPU neighbours change no bit of a row (see `passes`).

Axes: B rows, T tokens of a pass, D hidden, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.api import EngineError, SampleDone
from tinkex.engine.model.decoder import Decoder, Lora
from tinkex.engine.native.c_passes import (
    Native,
    NativeDecoding,
    NativePrefill,
    NativeSteps,
    find as find_native,
)
from tinkex.engine.sample.blocks import BLOCK, blocks_for
from tinkex.engine.sample.draw import Drawer, Drawn
from tinkex.engine.sample.jobs import NOT_FINITE, Job, Sample
from tinkex.engine.sample.passes import (
    Decoding,
    Piece,
    Pool,
    Prompts,
    Row,
    Source,
    block_bytes,
    put,
)
from tinkex.engine.sample.prefill import Prefill
from tinkex.engine.sample.row_adapters import Products, RowAdapters, padded
from tinkex.engine.sample.slab_decoding import SlabDecoding
from tinkex.engine.sample.static_decoding import ShortPrompts, StaticDecoding
from tinkex.engine.sample.step_scheduler import Running, Scheduler

FIRST_TOKENS = 64
"""Samples that draw their first token at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of sampling on one base model; None is chosen for the device."""

    max_rows: int = 256
    """Samples decoded at a time."""
    prefill_tokens: int | None = None
    """Tokens of prompts run beside a step of decoding."""
    cache_bytes: int | None = None
    """Memory for keys and values in blocks."""
    packed_bytes: int = 4 << 30
    """Base weights up to this size are kept a second time on a CPU, in a faster layout."""
    share_prefixes: bool = True
    way: Literal["native", "slabs", "static"] | None = None
    """The way rows are decoded: by C, by PyTorch, or by PyTorch with fixed shapes (on a GPU under
    CUDA graphs)."""

    def prefill(self, device: torch.device) -> int:
        """Return the tokens of a chunk of prompts."""
        return self.prefill_tokens or (512 if device.type == "cpu" else 4096)

    def blocks(self, model: Decoder) -> int:
        """Return the number of blocks that fit, at most twice as many as the rows could fill."""
        device = model.embed_VD.device
        if self.cache_bytes is not None:
            room = self.cache_bytes
        elif device.type == "cuda":
            room = int(0.4 * torch.cuda.mem_get_info(device)[0])
        else:
            room = 2 << 30
        return min(
            room // block_bytes(model), 2 * self.max_rows * (blocks_for(model.config.context) + 1)
        )


class Runner:
    """The jobs on one base model: runs what the scheduler decides."""

    def __init__(self, model: Decoder, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._pool = Pool(model, limits.blocks(model))
        native = find_native(model, limits.packed_bytes) if limits.way in (None, "native") else None
        self._products = Products(model, limits.packed_bytes, native)
        self._prefill, self._decoding = self._choose_way(native)
        self._drawer = Drawer(model, native)
        self.scheduler = Scheduler(
            weakref.proxy(self),  # a cycle would keep the cache until the garbage collector runs
            self._pool.blocks,
            max_rows=limits.max_rows,
            chunk=limits.prefill(model.embed_VD.device),
            share_prefixes=limits.share_prefixes,
        )
        self._unread: Drawn | None = None
        self._done: list[SampleDone] = []
        """The results of jobs that ended in this step."""

    def _choose_way(self, native: Native | None) -> tuple[Prompts, Decoding]:
        model, pool, way = self._model, self._pool, self._limits.way
        if native is not None and model.is_dense:
            steps = NativeSteps(native, pool)
            return NativePrefill(steps), NativeDecoding(steps, pool)
        prefill = Prefill(model, pool, self._products)
        if way == "static" or (way is None and model.embed_VD.device.type != "cpu"):
            decoding = StaticDecoding(model, pool, self._limits.max_rows)
            return (ShortPrompts(prefill, decoding) if model.is_dense else prefill), decoding
        return prefill, SlabDecoding(model, pool, self._products)

    def busy(self) -> bool:
        """Return whether any job is unfinished."""
        return bool(self.scheduler.queues or self.scheduler.running or self._done)

    def step(self) -> list[SampleDone]:
        """Decode a token of every row, then run a chunk of prompts."""
        self.scheduler.seat()
        drawn = self._decode()
        if self._decoding.ahead:
            drawn, self._unread = self._unread, drawn
        self._read(drawn)
        self._run_prompts()
        self._take_out()
        done, self._done = self._done, []
        return done

    def move(self, target: str, source: Source) -> None:
        """Give the jobs of an in-flight target other weights; their cached keys and values stay."""
        for job in [job for queue in self.scheduler.queues.values() for _, job in queue]:
            if job.target == target:
                job.source = source
        for running in self.scheduler.running:
            if running.job.target == target and not running.ready and running.job.is_scored:
                running.moved = source  # one version scores the whole prompt
            elif running.job.target == target:
                self._go_on(running, source)

    def _go_on(self, running: Running, source: Source) -> None:
        before, running.job.source, running.moved = running.job.source, source, None
        rows = [sample.row for sample in running.rows if sample.row is not None]
        for row in rows:
            row.lora, row.weights = source.lora, source.weights
        self._decoding.forget(before.weights)

    def cancel(self, name: str) -> None:
        """Drop a job."""
        self.scheduler.cancel(name)
        self._done = [done for done in self._done if done.job != name]

    # ── what the scheduler asks for (see `Device`) ────────────────────────────────────────────────

    def join(self, running: Running, blocks: list[int]) -> Row:
        """Make a row in these blocks that follows the job's prompt."""
        source = running.job.source
        row = Row(source.lora, source.weights, blocks, running.job.prompt.size)
        self._decoding.join(row, running.blocks)
        return row

    def leave(self, sample: Sample) -> None:
        """Free what a sample's row has besides its blocks."""
        assert sample.row is not None
        self._decoding.leave(sample.row)
        # the last position is not checked to be finite, and the block's next user relies on that
        if sample.drawn:
            self._pool.clear([sample.row.blocks[(sample.row.length - 1) // BLOCK]])

    def settle(self) -> None:
        """Read the tokens drawn so far, and finish the jobs that have ended."""
        self._read(self._unread)
        self._unread = None
        self._take_out()

    def removed(self, running: Running) -> None:
        """Free what is kept for a job that no longer runs."""
        self._drawer.forget(running)
        if not self.scheduler.running:  # it will not be read, and it holds jobs and their weights
            self._unread = None

    def _take_out(self) -> None:
        """Finish the jobs that have ended or failed."""
        for running in self.scheduler.ended():
            broken = self.scheduler.finish(running)
            if running.error is None:
                self._done.append(running.job.done(running.name))
            else:
                self._pool.clear(broken)
                self._done.append(SampleDone(running.name, running.error))

    # ── decoding ──────────────────────────────────────────────────────────────────────────────────

    def _decode(self) -> Drawn | None:
        """Run a token of every row that may have another, and draw the next."""
        owners = {
            id(sample.row): (running, sample) for running, sample in self.scheduler.next_rows()
        }
        if not owners:
            return None
        rows = self._decoding.arrange(
            [sample.row for _, sample in owners.values() if sample.row is not None]
        )
        pairs = [owners[id(row)] for row in rows]
        for row, (_, sample) in zip(rows, pairs, strict=True):
            if sample.fed < len(sample.tokens):
                row.token, row.drawn = sample.tokens[sample.fed], -1
            sample.fed += 1
        try:
            logits_BV = self._decoding.logits(rows)
            fresh = [at for at, (_, s) in enumerate(pairs) if s.fed == len(s.tokens) + s.drawn]
            if len(fresh) < len(pairs):  # the logits of tokens that are fed again are known
                logits_BV, pairs = logits_BV[put(fresh, logits_BV)], [pairs[at] for at in fresh]
            if not fresh:
                return None
            drawn, tokens_B = self._drawer.draw(logits_BV, pairs)
            self._decoding.keep(tokens_B)
        except Exception as error:
            for running, _ in pairs:
                running.fail(error)
            return None
        return drawn

    def _read(self, drawn: Drawn | None) -> None:
        """Give samples the tokens drawn for them, and take the rows of those that have ended."""
        for running, sample in drawn.read() if drawn is not None else ():
            if sample.row is not None:
                self.scheduler.unseat(running, sample, again=False)

    # ── prompts ───────────────────────────────────────────────────────────────────────────────────

    def _run_prompts(self) -> None:
        """Run a chunk of prompts, equal weights side by side."""
        chunk = []
        for running, count in self.scheduler.allot().items():
            source, prompt, start = running.job.source, running.job.prompt, running.done
            span = (start, start + count)
            piece = Piece(source.lora, source.weights, prompt, running.blocks, *span)
            chunk.append((running, piece))
        chunk.sort(key=lambda item: item[1].weights)
        try:
            if chunk:
                self._run_chunk(chunk)
        except Exception as error:
            for running, _ in chunk:
                running.fail(error)

    def _run_chunk(self, chunk: Sequence[tuple[Running, Piece]]) -> None:
        hidden_TD = self._prefill.hidden([piece for _, piece in chunk])
        at, ends, complete = 0, [], []
        for running, piece in chunk:
            for rows in running.job.scores.portions(piece.start, piece.stop):
                first = at + rows.start - piece.start
                logits_TV = self._logits(
                    hidden_TD[first : first + len(rows)], [piece.lora] * len(rows)
                )
                running.job.scores.add(rows, logits_TV)
            at += piece.stop - piece.start
            running.done = piece.stop
            if piece.stop == running.job.prompt.size:
                ends.append(at - 1)
                complete.append(running)
        if complete:
            lora_B = [running.job.source.lora for running in complete]
            self._begin(complete, self._logits(hidden_TD[put(ends, hidden_TD)], lora_B))

    def _logits(self, hidden_BD: Tensor, lora_B: Sequence[Lora]) -> Tensor:
        rows = hidden_BD.shape[0]
        total = padded(rows)
        return self._model.logits(
            F.pad(hidden_BD, (0, 0, 0, total - rows)), RowAdapters.of(self._products, lora_B, total)
        )[:rows]

    def _begin(self, runnings: Sequence[Running], logits_BV: Tensor) -> None:
        """Draw the first tokens of samples whose prompts have been run."""
        finite_B = torch.isfinite(logits_BV).all(-1).cpu().numpy()
        pairs: list[tuple[Running, Sample]] = []
        rows: list[int] = []
        for at, running in enumerate(runnings):
            running.ready = True
            if not finite_B[at]:
                running.error = EngineError(NOT_FINITE, "server")
            elif running.job.limit == 0:
                running.waiting.clear()
            else:
                fresh = [sample for sample in running.waiting if not sample.tokens]
                pairs += [(running, sample) for sample in fresh]
                rows += [at] * len(fresh)
        for first in range(0, len(pairs), FIRST_TOKENS):
            some = slice(first, first + FIRST_TOKENS)
            drawn, _ = self._drawer.draw(logits_BV[put(rows[some], logits_BV)], pairs[some])
            self._read(drawn)
        for running in runnings:
            running.waiting = [sample for sample in running.waiting if sample.stop_reason is None]
            if running.moved is not None:
                self._go_on(running, running.moved)


class Sampler:
    """The jobs of an engine, on all its base models."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._runners: dict[int, Runner] = {}
        self._names: set[str] = set()

    def start(self, name: str, job: Job, owner: str = "") -> None:
        """Admit a job."""
        if name in self._names:
            raise EngineError(f"there is a sampling job {name!r} already")
        model = job.source.model
        if id(model) not in self._runners:
            self._runners[id(model)] = Runner(model, self._limits)
        self._runners[id(model)].scheduler.start(name, job, owner)
        self._names.add(name)

    def step(self) -> list[SampleDone]:
        """Advance every job by a step; one that fails does not disturb the others."""
        with torch.inference_mode():
            ended = [
                done for runner in self._runners.values() if runner.busy() for done in runner.step()
            ]
        self._names -= {done.job for done in ended}
        return ended

    def move(self, target: str, source: Source) -> None:
        """Give the jobs of an in-flight target other weights."""
        if (runner := self._runners.get(id(source.model))) is not None:
            runner.move(target, source)

    def cancel(self, name: str) -> None:
        """Drop a job; unknown names are ignored."""
        if name in self._names:
            self._names.remove(name)
            with torch.inference_mode():  # as in a step: the row that leaves is overwritten
                for runner in self._runners.values():
                    runner.cancel(name)

    def busy(self) -> bool:
        """Return whether any job is unfinished."""
        return any(runner.busy() for runner in self._runners.values())
