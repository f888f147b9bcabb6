"""Sampling: all jobs on a base model advance together, whatever adapters they use.

A step decodes one token of every row and runs a chunk of prompts beside it; a new job joins at the
next step. Keys and values lie in a bounded number of blocks. Samples of one prompt share its
blocks, and so do jobs whose prompts begin alike under the same weights, also when they come later.
Jobs wait while there is no room; those of an owner are admitted in the order they came. Owners
share rows, blocks and the tokens of prompts (see `room`): one that comes gets its part in the next
step, if need be that of a sample of the owner that has most. A sample that gives way, or is the
youngest when the room ends in the middle, keeps its tokens, and is fed them again.

Where the device runs on its own, a step is begun before the tokens of the one before have been
read: rows whose end is seen only then have run for a token too many, which nobody looks at.

What a job gives depends on that job alone: random numbers are counted (see `choices`), and on a CPU
neighbours change no bit of a row (see `decoding`).

Axes: B rows, T tokens of a pass, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F

from tinkex.engine.api import EngineError, SampleDone
from tinkex.engine.fair_share import Shares
from tinkex.engine.native.c_passes import NativeDecoding, NativePrefill, NativeSteps
from tinkex.engine.native.weights import find as find_native
from tinkex.engine.sample.blocks import BLOCK, Pool, block_bytes, blocks_for
from tinkex.engine.sample.jobs import Job, Sample, Source
from tinkex.engine.sample.logit_changes import Shaped, Shaper
from tinkex.engine.sample.passes import (
    Decoding,
    Piece,
    Prefill,
    Prompts,
    Row,
    ShortPrompts,
    SlabDecoding,
    StaticDecoding,
    put,
)
from tinkex.engine.sample.recordings import Scores
from tinkex.engine.sample.room import Room, Running
from tinkex.engine.sample.row_adapters import Products, RowAdapters, padded
from tinkex.engine.sample.token_choice import GREEDY_BELOW, choose, uniforms
from tinkex.engine.torch.device_copies import mark, to_host
from tinkex.types.sampling import SampleRequest, TopkLogprobs

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from tinkex.engine.model.decoder import Decoder, Lora
    from tinkex.types.tensors import Array

PATIENCE = 200
"""After so many steps without any job taken in, an owner's next job comes before those of others.
"""
FIRST_TOKENS = 64
"""How many samples draw their first token at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What sampling on one base model may use; what is None is chosen for the device."""

    max_rows: int = 256
    """How many samples are decoded at a time."""
    prefill_tokens: int | None = None
    """How many tokens of prompts are run beside a step of decoding."""
    cache_bytes: int | None = None
    """Memory for keys and values in blocks."""
    packed_bytes: int = 4 << 30
    """Base weights up to this size are kept a second time on a CPU, in the layout that makes
    products quick."""
    share_prefixes: bool = True
    way: Literal["native", "slabs", "static"] | None = None
    """How rows are decoded: by C, by PyTorch, or by that with fixed shapes, as on a GPU (there
    under CUDA graphs)."""

    def prefill(self, device: torch.device) -> int:
        """The budget of a chunk."""
        return self.prefill_tokens or (512 if device.type == "cpu" else 4096)

    def blocks(self, model: Decoder) -> int:
        """How many blocks fit, and no more than the rows could ever fill twice."""
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


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Tokens that were chosen in one step, and have perhaps not arrived."""

    samples: Sequence[tuple[Sample, Row | None]]
    """With the row that each had then."""
    jobs: Sequence[tuple[Running, list[int], int | None]]
    """Each job's samples, and the version of in-flight weights that drew them."""
    topk: Sequence[tuple[torch.Tensor, torch.Tensor] | None]
    """The likeliest tokens, for jobs that ask for them."""
    scores: Mapping[int, tuple[Scores, slice]]
    """For jobs that are recorded, by their place in `jobs`, what is recorded of them and which rows
    of it."""
    both_2B: torch.Tensor
    """Tokens and log-probabilities."""
    done: torch.cuda.Event | None


class Runner:
    """The jobs on one base model."""

    def __init__(self, model: Decoder, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._chunk = limits.prefill(model.embed_VD.device)
        self._pool = Pool(model, limits.blocks(model))
        self._blocks = self._pool.blocks
        self._native = (
            find_native(model, limits.packed_bytes) if limits.way in (None, "native") else None
        )
        self._products = Products(model, limits.packed_bytes, self._native)
        self._prefill, self._decoding = self._choose_way()
        self._shaper = Shaper(model.embed_VD.device, model.config.vocab)
        self._queues: dict[str, deque[tuple[str, Job]]] = {}
        """By owner, the jobs that wait; those that were put back come first."""
        self._shares = Shares()
        self._refused = Counter[str]()
        """By owner, for how many steps none of its jobs has been taken in."""
        self._running: list[Running] = []
        self._room = Room(self._running, self._queues, self._blocks, limits.max_rows)
        self._unread: _Drawn | None = None
        self._done: list[SampleDone] = []
        """What ended in this step."""

    def _choose_way(self) -> tuple[Prompts, Decoding]:
        model, pool, way = self._model, self._pool, self._limits.way
        if self._native is not None and model.is_dense:
            steps = NativeSteps(self._native, pool)
            return NativePrefill(steps), NativeDecoding(steps, pool)
        prefill = Prefill(model, pool, self._products)
        if way == "static" or (way is None and model.embed_VD.device.type != "cpu"):
            decoding = StaticDecoding(model, pool, self._limits.max_rows)
            return (ShortPrompts(prefill, decoding) if model.is_dense else prefill), decoding
        return prefill, SlabDecoding(model, pool, self._products)

    def busy(self) -> bool:
        """Whether any job is unfinished."""
        return bool(self._queues or self._running or self._done)

    def start(self, name: str, job: Job, owner: str) -> None:
        """Queue a job; one that would not fit if it were alone is refused."""
        end = job.prompt.size + max(0, job.limit - 1)
        needed = blocks_for(job.prompt.size) + blocks_for(end) - job.prompt.size // BLOCK
        if needed > self._blocks.count:
            raise EngineError(
                f"a prompt of {job.prompt.size} tokens and {job.limit} more need {needed} blocks "
                f"of {BLOCK} positions; "
                f"the cache of this server has {self._blocks.count}"
            )
        self._queues.setdefault(owner, deque()).append((name, job))

    def step(self) -> list[SampleDone]:
        """Decode a token of every row, then run a chunk of prompts."""
        self._seat()
        drawn = self._decode()
        if self._decoding.ahead:
            drawn, self._unread = self._unread, drawn
        self._read(drawn)
        self._run_prompts()
        self._take_out()
        done, self._done = self._done, []
        return done

    def move(self, target: str, source: Source) -> None:
        """Have the jobs of an in-flight target go on with other weights; what is in the cache stays
        there.
        """
        for job in [job for queue in self._queues.values() for _, job in queue]:
            if job.target == target:
                job.source = source
        for running in self._running:
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
        for owner, queue in list(self._queues.items()):
            if any(waiting == name for waiting, _ in queue):
                self._queues[owner] = deque(item for item in queue if item[0] != name)
                self._forget_empty(owner)
        for running in [running for running in self._running if running.name == name]:
            self._remove(running)
        self._done = [done for done in self._done if done.job != name]

    # --- Room ---

    def _seat(self) -> None:
        """Give rows to samples that wait for one, in turn by owner, and to every row the block its
        next token needs.
        """
        seating = self._room.seating()
        while (running := seating.next()) is not None:
            seating.note(running, is_seated=running in self._running and self._seat_next(running))
        for running in list(self._running):
            for sample in list(running.rows):
                row = sample.row
                if row is None or row.length < len(row.blocks) * BLOCK or running.job.full(sample):
                    continue
                if self._make_room(sample, running.owner):
                    row.blocks += self._blocks.take(1)

    def _seat_next(self, running: Running) -> bool:
        """Give a row to the first of a job's samples that wait, if there is room."""
        sample, prompt = running.waiting[0], running.job.prompt.size
        shared = running.blocks[: prompt // BLOCK]
        needed = blocks_for(prompt + len(sample.tokens)) - len(shared)
        if self._room.seated >= self._limits.max_rows:
            if (given := self._room.row_for(running.owner)) is None:
                return False
            self._unseat(*given)
        while not self._clear(running.owner, needed):
            if self._room.seated or running is not self._running[0] or self._running[-1] is running:
                return False
            self._put_back(self._running[-1])
        self._blocks.hold(shared)
        source = running.job.source
        blocks = [*shared, *self._blocks.take(blocks_for(prompt) - len(shared))]
        row = Row(source.lora, source.weights, blocks, prompt)
        try:
            self._decoding.join(row, running.blocks)
        except Exception as error:  # for want of memory
            self._blocks.release(blocks)
            _fail([running], error)
            return False
        sample.row, sample.fed = row, 0
        running.rows.append(running.waiting.pop(0))
        return True

    def _clear(self, owner: str, needed: int, keep: Container[Running] = ()) -> bool:
        """See that so many blocks are free besides one for each row to grow; others give theirs if
        they have most.
        """
        while self._blocks.free < needed + self._room.seated:
            given = self._room.blocks_for(owner, needed, keep)
            if given is None:
                return False
            self._displace(given)
        return True

    def _displace(self, given: Running | tuple[Running, Sample]) -> None:
        if isinstance(given, Running):
            self._put_back(given)
        else:
            self._unseat(*given)

    def _make_room(self, sample: Sample, owner: str) -> bool:
        """See that a block is free: by the owner who has most, else by whatever of this owner is
        younger or this.
        """
        # who is put back keeps all its tokens, and who has ended makes room
        if not self._blocks.free:
            self._read(self._unread)
            self._unread = None
            self._take_out()
        while sample.row is not None and not self._blocks.free:
            self._displace(self._room.growing(owner))
        return sample.row is not None

    def _put_back(self, running: Running) -> None:
        """Back to the head of the queue: its tokens are kept, its prompt will be run again."""
        self._remove(running)
        self._queues.setdefault(running.owner, deque()).appendleft((running.name, running.job))

    def _unseat(self, running: Running, sample: Sample, *, again: bool = True) -> None:
        assert sample.row is not None
        self._decoding.leave(sample.row)
        # nobody will look whether the last position is finite, and who gets the block counts on it
        if sample.drawn:
            self._pool.clear([sample.row.blocks[(sample.row.length - 1) // BLOCK]])
        self._blocks.release(sample.row.blocks)
        running.rows.remove(sample)
        sample.row, sample.drawn = None, 0
        if again:
            running.waiting.insert(0, sample)

    def _remove(self, running: Running) -> None:
        for sample in list(running.rows):
            self._unseat(running, sample, again=False)
        for sample in running.job.samples:
            self._shaper.forget(id(sample))
        self._blocks.release(running.blocks)
        self._running.remove(running)
        if not self._running:  # nobody will read it, and it holds jobs and their weights
            self._unread = None

    def _take_out(self) -> None:
        """Finish the jobs that have ended or failed."""
        ended = [running for running in self._running if running.error or _ended(running)]
        self._done += [self._finish(running) for running in ended]

    def _finish(self, running: Running) -> SampleDone:
        held = [
            *running.blocks,
            *(block for s in running.rows if s.row is not None for block in s.row.blocks),
        ]
        self._remove(running)
        if running.error is None:
            return running.job.done(running.name)
        self._blocks.withdraw(held)
        self._pool.clear([block for block in set(held) if not self._blocks.held(block)])
        return SampleDone(running.name, running.error)

    # --- Decoding ---

    def _decode(self) -> _Drawn | None:
        """Run a token of every row that may have another, and draw the next."""
        owners = {
            id(sample.row): (running, sample)
            for running in self._running
            for sample in running.rows
            if sample.row is not None and not running.job.full(sample)
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
            return self._draw(logits_BV, pairs, later=True) if fresh else None
        except Exception as error:
            _fail([running for running, _ in pairs], error)
            return None

    def _draw(
        self, logits_BV: torch.Tensor, pairs: Sequence[tuple[Running, Sample]], *, later: bool
    ) -> _Drawn:
        """Choose a token for every sample, on the device; `later` ones are the next that their rows
        are fed.
        """
        tokens_B, chosen_B, known = self._choose(logits_BV, pairs)
        if later:
            self._decoding.keep(tokens_B)
        rows_of: dict[int, list[int]] = {}
        for at, (running, sample) in enumerate(pairs):
            rows_of.setdefault(id(running), []).append(at)
            sample.drawn += 1
            if sample.row is not None:
                sample.row.drawn = at
        firsts = [(pairs[at_b[0]][0], at_b) for at_b in rows_of.values()]
        jobs = [(running, at_b, running.job.source.version) for running, at_b in firsts]
        topk = [
            _likeliest(known, at_b, running.job.request.topk_sample_logprobs)
            for running, at_b, _ in jobs
        ]
        scores = _scores(logits_BV, tokens_B, firsts)
        both_2B = to_host(torch.stack([tokens_B.double(), chosen_B.double()]))  # one copy
        samples = [(sample, sample.row) for _, sample in pairs]
        return _Drawn(samples, jobs, topk, scores, both_2B, mark(logits_BV.device))

    def _choose(
        self, logits_BV: torch.Tensor, pairs: Sequence[tuple[Running, Sample]]
    ) -> tuple[torch.Tensor, torch.Tensor, _Logprobs]:
        """A token for every sample, its log-probability, and those of all tokens where more than
        that is asked for.

        Which way a sample goes depends on its own request: by C if there is nothing to truncate and
        nothing to list.
        """
        requests, numbers_B = [running.job.request for running, _ in pairs], _numbers(pairs)
        params_B = [request.sampling_params for request in requests]
        if self._native is None:
            tokens_B, logprobs_BV = self._chosen(logits_BV, numbers_B, pairs)
            return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0], _Logprobs(logprobs_BV)
        temperatures = np.array([params.temperature for params in params_B])
        drawn_B, chosen_B = self._native.draw(
            logits_BV, numbers_B, np.where(temperatures < GREEDY_BELOW, 0, temperatures)
        )
        rest = [at for at, request in enumerate(requests) if not _is_plain(request)]
        known = _Logprobs(logits_BV[:0])
        if rest:
            some_b, logprobs_bV = self._chosen(
                logits_BV[put(rest, logits_BV)], numbers_B[rest], [pairs[at] for at in rest]
            )
            drawn_B[rest] = some_b.numpy()
            chosen_B[rest] = logprobs_bV.gather(1, some_b[:, None])[:, 0].numpy()
            known = _Logprobs(logprobs_bV, {at: index for index, at in enumerate(rest)})
        return torch.from_numpy(drawn_B), torch.from_numpy(chosen_B), known

    def _chosen(
        self, logits_BV: torch.Tensor, numbers_B: Array, pairs: Sequence[tuple[Running, Sample]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `choose`, for samples; those whose logits are to be changed are chosen again, of the
        changed ones.
        """
        params_B = [running.job.request.sampling_params for running, _ in pairs]
        tokens_B, logprobs_BV = choose(logits_BV, numbers_B, params_B)
        changes = {
            at: Shaped(
                id(sample), running.job.shape, sample.tokens, len(sample.tokens) + sample.drawn
            )
            for at, (running, sample) in enumerate(pairs)
            if running.job.shape is not None
        }
        if changes:
            rows = list(changes)
            rows_b = put(rows, logits_BV)
            tokens_B[rows_b] = self._shaper.choose(
                logits_BV[rows_b],
                numbers_B[rows],
                [params_B[at] for at in rows],
                list(changes.values()),
            )
        return tokens_B, logprobs_BV

    def _read(self, drawn: _Drawn | None) -> None:
        """Give samples the tokens that were drawn for them; those that have ended or gone meanwhile
        need none.
        """
        if drawn is None:
            return
        try:
            if drawn.done is not None:
                drawn.done.synchronize()
            both_2B = drawn.both_2B.numpy()
        except Exception as error:
            _fail([running for running, *_ in drawn.jobs], error)
            return
        tokens, logprobs = both_2B[0].astype(np.int64), both_2B[1].astype(np.float32)
        for number, ((running, at_b, version), topk) in enumerate(
            zip(drawn.jobs, drawn.topk, strict=True)
        ):
            kept = [at for at in at_b if drawn.samples[at][0].row is drawn.samples[at][1]]
            samples = [drawn.samples[at][0] for at in kept]
            for sample in samples:
                sample.drawn -= 1
            if not kept or running.error is not None:
                continue
            try:
                scores = None
                if (recorded := drawn.scores.get(number)) is not None:
                    scores = recorded[0].rows(recorded[1], np.isin(at_b, kept))
                running.job.commit(
                    samples, tokens[kept], logprobs[kept], _table(topk, at_b, kept), scores, version
                )
            except Exception as error:
                running.error = error
                continue
            for sample in samples:
                if sample.stop_reason is not None and sample.row is not None:
                    self._unseat(running, sample, again=False)

    # --- Prompts ---

    def _run_prompts(self) -> None:
        """Run a chunk, in parts by owner: of jobs whose prompts have begun, then of those in the
        queue.
        """
        parts = self._allot()
        if not parts:
            return
        chunk = [(running, self._piece(running, count)) for running, count in parts.items()]
        chunk.sort(key=lambda item: item[1].weights)
        try:
            self._run_chunk(chunk)
        except Exception as error:
            _fail([running for running, _ in chunk], error)

    def _allot(self) -> dict[Running, int]:
        """Return the tokens of each prompt to run now: each owner's part, then the rest."""
        begun = [running.owner for running in self._running if not running.ready]
        # of two who had the same, the one who came first
        owners = list(dict.fromkeys([*begun, *self._queues]))
        self._shares.note(owners)
        order = sorted(owners, key=lambda owner: self._shares.had(owner))
        parts: dict[Running, int] = {}
        budget = self._chunk
        for most in (max(BLOCK, budget // max(1, len(owners))), budget):
            for owner in order:
                first = self._patient(order)
                admits = first in (None, owner)
                budget -= self._allot_to(owner, min(most, budget), parts, admits=admits)
        self._refused = Counter(
            {owner: self._refused[owner] + 1 for owner in owners if self._room.has_nothing(owner)}
        )
        return parts

    def _patient(self, order: Sequence[str]) -> str | None:
        """An owner that has waited for blocks so long that nobody else is taken in before."""
        return next((owner for owner in order if self._refused[owner] >= PATIENCE), None)

    def _allot_to(self, owner: str, budget: int, parts: dict[Running, int], *, admits: bool) -> int:
        left = budget
        for running in self._running:
            if left and running.owner == owner and not running.ready and running.error is None:
                left -= self._extend(running, left, parts)
        while (
            admits
            and left
            and owner in self._queues
            and (admitted := self._admit(owner, parts)) is not None
        ):
            left -= self._extend(admitted, left, parts)
        return budget - left

    def _extend(self, running: Running, most: int, parts: dict[Running, int]) -> int:
        """Allot more of a prompt. Full blocks are shared at once: who finds them attends after they
        are written.
        """
        start = running.done + parts.get(running, 0)
        stop = min(running.job.prompt.size, start + most)
        if stop == start:
            return 0
        if self._limits.share_prefixes:
            for index in range(start // BLOCK, stop // BLOCK):
                self._blocks.publish(running.blocks[index], running.job.keys[index])
        parts[running] = stop - running.done
        return stop - start

    def _admit(self, owner: str, parts: Container[Running]) -> Running | None:
        """Take an owner's next job in, if there is room for its prompt and for each row to grow by
        a block.
        """
        name, job = self._queues[owner][0]
        if not self._room.admits(owner):
            return None
        known = job.keys[: job.first_scored // BLOCK] if self._limits.share_prefixes else []
        blocks = self._blocks.find(known)
        needed = blocks_for(job.prompt.size) - len(blocks)
        if not self._clear(owner, needed, parts):
            self._blocks.release(blocks)
            return None
        self._queues[owner].popleft()
        self._forget_empty(owner)
        if job.reused is None:  # not when it comes back
            self._shares.charge(owner, job.prompt.size + len(job.samples) * job.limit)
            job.reused = len(blocks) * BLOCK
        waiting = [sample for sample in job.samples if sample.stop_reason is None]
        running = Running(
            name, job, owner, blocks + self._blocks.take(needed), len(blocks) * BLOCK, waiting
        )
        self._running.append(running)
        return running

    def _forget_empty(self, owner: str) -> None:
        if not self._queues[owner]:
            del self._queues[owner]

    def _piece(self, running: Running, count: int) -> Piece:
        """The next part of a prompt."""
        source, start = running.job.source, running.done
        return Piece(
            source.lora, source.weights, running.job.prompt, running.blocks, start, start + count
        )

    def _run_chunk(self, chunk: Sequence[tuple[Running, Piece]]) -> None:
        hidden_TD = self._prefill.hidden([piece for _, piece in chunk])
        at, ends, complete = 0, [], []
        for running, piece in chunk:
            for rows in running.job.score_rows(piece.start, piece.stop):
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

    def _logits(self, hidden_BD: torch.Tensor, lora_B: Sequence[Lora]) -> torch.Tensor:
        rows = hidden_BD.shape[0]
        total = padded(rows)
        return self._model.logits(
            F.pad(hidden_BD, (0, 0, 0, total - rows)), RowAdapters.of(self._products, lora_B, total)
        )[:rows]

    def _begin(self, runnings: Sequence[Running], logits_BV: torch.Tensor) -> None:
        """The prompts of these have been run: draw the first tokens of their samples."""
        finite_B = torch.isfinite(logits_BV).all(-1).cpu().numpy()
        pairs: list[tuple[Running, Sample]] = []
        rows: list[int] = []
        for at, running in enumerate(runnings):
            running.ready = True
            if not finite_B[at]:
                running.error = EngineError(
                    "the model's logits are not finite: its weights are broken", "server"
                )
            elif running.job.limit == 0:
                running.waiting.clear()
            else:
                fresh = [sample for sample in running.waiting if not sample.tokens]
                pairs += [(running, sample) for sample in fresh]
                rows += [at] * len(fresh)
        for first in range(0, len(pairs), FIRST_TOKENS):
            some = slice(first, first + FIRST_TOKENS)
            self._read(self._draw(logits_BV[put(rows[some], logits_BV)], pairs[some], later=False))
        for running in runnings:
            running.waiting = [sample for sample in running.waiting if sample.stop_reason is None]
            if running.moved is not None:
                self._go_on(running, running.moved)


def _ended(running: Running) -> bool:
    return running.ready and not running.waiting and not running.rows


def _fail(runnings: Sequence[Running], error: Exception) -> None:
    for running in runnings:
        running.error = running.error or error


def _numbers(pairs: Sequence[tuple[Running, Sample]]) -> Array:
    seeds = [running.job.seed for running, _ in pairs]
    indices = np.array([sample.index for _, sample in pairs])
    return uniforms(
        seeds, indices, np.array([len(sample.tokens) + sample.drawn for _, sample in pairs])
    )


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities of all tokens, of every sample of a step or of some."""

    logprobs_BV: torch.Tensor
    rows: Mapping[int, int] | None = None
    """Which row is which sample's, if not every sample has one."""

    def of(self, at_b: Sequence[int]) -> torch.Tensor:
        rows = at_b if self.rows is None else [self.rows[at] for at in at_b]
        return self.logprobs_BV[put(rows, self.logprobs_BV)]


def _is_plain(request: SampleRequest) -> bool:
    """Whether a sample is drawn among all tokens, and no others are listed beside it."""
    params = request.sampling_params
    is_whole = (
        params.top_k == -1 and params.top_p == 1 and not params.min_p
    ) or params.temperature < GREEDY_BELOW
    return is_whole and not request.topk_sample_logprobs and not params.changes_logits


def _likeliest(
    known: _Logprobs, at_b: Sequence[int], k: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens and log-probabilities of the k likeliest, for some samples."""
    if not k:
        return None
    values, ids = known.of(at_b).topk(k, dim=-1)
    return to_host(ids), to_host(values)


def _scores(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, jobs: Sequence[tuple[Running, list[int]]]
) -> dict[int, tuple[Scores, slice]]:
    """Record a step for all jobs that ask for it, at once."""
    places: dict[int, slice] = {}
    rows: list[int] = []
    for number, (running, at_b) in enumerate(jobs):
        if running.job.recorder is not None:
            places[number] = slice(len(rows), len(rows) + len(at_b))
            rows += at_b
    if not rows:
        return {}
    scores = Scores.of(logits_BV, tokens_B, rows)
    return {number: (scores, place) for number, place in places.items()}


def _table(
    topk: tuple[torch.Tensor, torch.Tensor] | None, at_b: Sequence[int], kept: Sequence[int]
) -> TopkLogprobs | None:
    """Of the rows that were kept of those it was made for."""
    if topk is None:
        return None
    chosen = np.isin(at_b, kept)
    ids, values = topk
    return TopkLogprobs(ids.numpy()[chosen], values.numpy()[chosen])


class Sampler:
    """The jobs of an engine, on whichever base models they are."""

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
        self._runners[id(model)].start(name, job, owner)
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
        """Have the jobs of an in-flight target go on with other weights."""
        if (runner := self._runners.get(id(source.model))) is not None:
            runner.move(target, source)

    def cancel(self, name: str) -> None:
        """Drop a job; unknown names are ignored."""
        if name in self._names:
            self._names.remove(name)
            with torch.inference_mode():  # as in a step: a row that leaves is written over
                for runner in self._runners.values():
                    runner.cancel(name)

    def busy(self) -> bool:
        """Whether any job is unfinished."""
        return any(runner.busy() for runner in self._runners.values())
