"""Sampling: jobs that each keep their own cache and advance one token per step.

What a job computes depends on that job alone: its prompt is run once, its samples are decoded together, and rows leave
as they finish. Random numbers are counted, not drawn from a stream: the one that decides a token is a hash of the
seed, the sample's index and the position. Sample i is therefore the same whatever else is asked for, save that another
number of rows may round the last bits of a log-probability differently.

Log-probabilities of sampled tokens are those of the temperature-scaled distribution before top-k and top-p cut it (at
temperature 0, of the unscaled one); those of prompts are at temperature 1.

Axes: B rows (samples still going), P prompt tokens, S cached positions, D hidden, V vocabulary, H query heads,
G key/value heads, C channels of a head, K likeliest tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine import DrawnToken, EngineError, Listener, SampleDone
from tinkex.engine.attention import causal, soft_cap
from tinkex.engine.decoder import Decoder, Lora, hidden_states
from tinkex.engine.losses import read_tokens
from tinkex.engine.trainer import LOGITS_BUDGET, log_softmax
from tinkex.types.sampling import (
    EMPTY_CELL,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    StopReason,
    TopkLogprobs,
)
from tinkex.types.tensors import Array, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenizers import Tokenizer

MAX_RUNNING = 16
MAX_SAMPLES = 1024
MAX_TOPK = 1024
GREEDY_BELOW = 1e-30
"""Temperatures under this are taken for 0: float32 has no room for the quotient."""
MARGIN = 8
ALTERNATIVES = 1 << 32
"""Alternative tokens of prompts draw from streams beyond those of any sample."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a sampler samples from: frozen weights, and what the model's files say about ending."""

    model: Decoder
    lora: Lora
    eos_tokens: frozenset[int]
    tokenizer: Callable[[], Tokenizer]


# --- Choosing tokens ---------------------------------------------------------------------------------------------


def uniforms(seed: int, samples: Array | int, positions: Array | int) -> Array:
    """One number in [0, 1) for each (seed, sample, position)."""
    state = _mix(np.array([seed % 2**64], dtype=np.uint64))
    for counter in (samples, positions):
        state = _mix(state ^ _mix(np.atleast_1d(counter).astype(np.uint64) + np.uint64(1)))
    return (state >> np.uint64(12)) * 2.0**-52


def _mix(x: Array) -> Array:
    """The splitmix64 finaliser, after its odd increment: every input bit reaches every output bit."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


def choose(logits_BV: torch.Tensor, uniforms_B: Array, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, and the log-probabilities `[B, V]` they are reported from."""
    if params.temperature < GREEDY_BELOW:
        return logits_BV.argmax(-1), log_softmax(logits_BV)
    # The largest logit is subtracted first, so that no temperature is too small to divide by.
    shifted_BV = logits_BV.float() - logits_BV.amax(-1, keepdim=True)
    logprobs_BV = log_softmax(shifted_BV / params.temperature)
    numbers_B1 = torch.from_numpy(uniforms_B).to(logits_BV.device)[:, None]
    probs_BV = logprobs_BV.exp()
    if params.top_k == -1 and params.top_p == 1:
        return _invert(probs_BV, numbers_B1), logprobs_BV
    return _draw_truncated(probs_BV, numbers_B1, params), logprobs_BV


def _invert(weights_BV: torch.Tensor, numbers_B1: torch.Tensor) -> torch.Tensor:
    """The first index at which the cumulated weight exceeds the number's share of the whole."""
    cumulated = weights_BV.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, numbers_B1 * cumulated[:, -1:], right=True)[:, 0]


def _draw_truncated(probs_BV: torch.Tensor, numbers_B1: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Draw among the top_k likeliest, then among the fewest of those whose share reaches top_p."""
    vocab = probs_BV.shape[-1]
    if 0 < params.top_k < vocab:
        values, order = probs_BV.topk(params.top_k, dim=-1)
    else:
        values, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1, dtype=torch.float64) - values
    values = values.masked_fill(before >= params.top_p * values.sum(-1, keepdim=True, dtype=torch.float64), 0)
    return order.gather(1, _invert(values, numbers_B1)[:, None])[:, 0]


# --- Stopping ----------------------------------------------------------------------------------------------------


class StopRule:
    """Says which rows end with the token they have just got."""

    def __init__(self, source: Source, stop: str | Sequence[str | int] | None, rows: int) -> None:
        items = [stop] if isinstance(stop, str) else sorted(source.eos_tokens) if stop is None else list(stop)
        ids = [item for item in items if not isinstance(item, str)]
        if any(not 0 <= item < source.model.config.vocab for item in ids):
            raise EngineError(f"stop holds a token outside the vocabulary of {source.model.config.vocab}")
        self._tokens = np.array(ids, dtype=np.int64)
        self._strings = [item for item in items if isinstance(item, str)]
        if "" in self._strings:
            raise EngineError("a stop string must not be empty")
        self._texts = [_Text(source.tokenizer()) for _ in range(rows)] if self._strings else []

    def __call__(self, rows: Array, tokens: Array) -> Array:
        """Whether each row, having got its token, is at its end."""
        if self._strings:
            return np.array([self._said(row, token) for row, token in zip(rows, tokens.tolist(), strict=True)])
        return np.isin(tokens, self._tokens)

    def _said(self, row: int, token: int) -> bool:
        text = self._texts[row].add(token, keep=max(map(len, self._strings)))
        return any(string in text for string in self._strings)


class _Text:
    """The end of a row's decoded text, from as few tokens as a stop string can reach back over.

    Decoding a suffix of the tokens can spoil its first characters (half a character, a stripped space): the margin.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []

    def add(self, token: int, keep: int) -> str:
        """The text after one more token: its part, and at least the `keep` characters before it."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        while len(self._decode(self._tokens[1:])) >= keep + MARGIN:
            del self._tokens[0]
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


# --- The cache ---------------------------------------------------------------------------------------------------


class Cache:
    """Keys and values of one job, `[layers, 2, B, G, S, C]` with room to grow."""

    def __init__(self, model: Decoder, length: int) -> None:
        config = model.config
        shape = (config.layers, 2, 1, config.kv_heads, length, config.head_dim)
        self._kv = torch.empty(shape, dtype=model.embed_VD.dtype, device=model.embed_VD.device)
        self._rules = model.attention
        self._length = 0

    def prefill(self, layer: int, q_PHC: torch.Tensor, k_PGC: torch.Tensor, v_PGC: torch.Tensor) -> torch.Tensor:
        """Attention of a whole prompt, which is kept."""
        self._length = k_PGC.shape[0]
        self._kv[layer, 0, 0, :, : self._length] = k_PGC.transpose(0, 1)
        self._kv[layer, 1, 0, :, : self._length] = v_PGC.transpose(0, 1)
        return causal(q_PHC[None], k_PGC[None], v_PGC[None], self._rules[layer])

    def extend(self) -> int:
        """Make room for one more position and return it."""
        if self._length == self._kv.shape[4]:
            *outer, _, channels = self._kv.shape
            room = self._kv.new_empty(*outer, max(32, self._length // 2), channels)
            self._kv = torch.cat([self._kv, room], dim=4)
        self._length += 1
        return self._length - 1

    def decode(self, layer: int, q_BHC: torch.Tensor, k_BGC: torch.Tensor, v_BGC: torch.Tensor) -> torch.Tensor:
        """Attention of one new position per row; query heads of a group read its keys where they lie."""
        keys_BGSC, values_BGSC = self._kv[layer, :, :, :, : self._length]
        keys_BGSC[:, :, -1], values_BGSC[:, :, -1] = k_BGC, v_BGC
        q = q_BHC.reshape(*k_BGC.shape[:2], -1, k_BGC.shape[2])
        rule = self._rules[layer]
        seen = slice(None if rule.window is None else -rule.window, None)
        scores = soft_cap((q * rule.scale) @ keys_BGSC[:, :, seen].transpose(2, 3), rule.softcap).softmax(-1)
        mixed: torch.Tensor = (scores @ values_BGSC[:, :, seen]).reshape(q_BHC.shape[0], -1)
        return mixed

    def repeat(self, rows: int) -> None:
        """Give each of several samples its copy of the prompt."""
        self._kv = self._kv.expand(-1, -1, rows, -1, -1, -1).clone()

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows."""
        self._kv = self._kv.index_select(2, rows)


# --- Prompts -----------------------------------------------------------------------------------------------------


class PromptScores:
    """What a request wants to know about its prompt, gathered as chunks of logits pass by."""

    def __init__(self, prompt: Array, request: SampleRequest, seed: int, vocab: int) -> None:
        self._prompt, self._request, self._seed = prompt, request, seed
        self._k, self._alternatives = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
        self._wanted = bool(request.prompt_logprobs) or self._k > 0
        self._first = max(1, prompt.size - (request.prompt_logprobs_last_n or prompt.size))
        self._targets = _Targets.of(request.target_prompt_logprobs, prompt.size, vocab)
        self.logprobs_P = np.full(prompt.size, np.nan, dtype=np.float32)
        self._topk = _empty_topk(prompt.size, self._k)
        self._alt = [np.zeros((prompt.size - 1, self._alternatives), t) for t in (np.int64, np.float32)]

    @property
    def rows(self) -> range:
        """The prompt positions whose logits are needed."""
        if self._targets is not None or self._alternatives:
            return range(self._prompt.size - 1)
        return range(self._first - 1, self._prompt.size - 1) if self._wanted else range(0)

    def add(self, rows: range, logits_TV: torch.Tensor) -> None:
        """Take the logits of these positions; they score the token after each."""
        logprobs_TV = log_softmax(logits_TV)
        after = slice(rows.start + 1, rows.stop + 1)
        if self._wanted:
            targets = torch.from_numpy(self._prompt[after].astype(np.int64)).to(logits_TV.device)
            self.logprobs_P[after] = logprobs_TV.gather(1, targets[:, None])[:, 0].cpu().numpy()
        if self._k:
            _put_topk(self._topk, after, logprobs_TV, self._k)
        if self._targets is not None:
            self._targets.add(rows, logprobs_TV)
        if self._alternatives:
            self._draw(rows, logits_TV)

    def _draw(self, rows: range, logits_TV: torch.Tensor) -> None:
        positions = np.arange(rows.start + 1, rows.stop + 1, dtype=np.uint64)
        span = slice(rows.start, rows.stop)
        for column in range(self._alternatives):
            numbers = uniforms(self._seed, ALTERNATIVES + column, positions)
            tokens, logprobs = choose(logits_TV, numbers, self._request.sampling_params)
            self._alt[0][span, column] = tokens.cpu().numpy()
            self._alt[1][span, column] = logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy()

    def response(self, sequences: list[SampledSequence]) -> SampleResponse:
        """The result of the request."""
        if self._wanted:
            self.logprobs_P[: self._first] = np.nan
            _clear(self._topk, self._first)
        return SampleResponse(
            sequences,
            prompt_logprobs_np=self.logprobs_P if self._wanted else None,
            topk_prompt_logprobs_np=self._topk if self._k else None,
            target_prompt_logprobs=None if self._targets is None else self._targets.tensor(),
            prompt_alt_tokens=PromptAltTokens(*map(TensorData.from_numpy, self._alt)) if self._alternatives else None,
        )


class _Targets:
    """Log-probabilities of chosen tokens at prompt positions: row i of the request scores position i + 1."""

    def __init__(self, request: TensorData, rows: Array, tokens: Array) -> None:
        self._request, self._rows, self._tokens = request, rows, tokens
        self._logprobs = np.full(tokens.size, np.nan, dtype=np.float32)

    @classmethod
    def of(cls, request: TensorData | None, length: int, vocab: int) -> _Targets | None:
        if request is None:
            return None
        shape, tokens = request.shape or [], request.values
        if request.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1:
            raise EngineError(f"target_prompt_logprobs must be int64 of shape [{length - 1}, K], got {request!r}")
        if tokens.size and (tokens.min() < -1 or tokens.max() >= vocab):
            raise EngineError(f"target_prompt_logprobs holds a token outside the vocabulary of {vocab}")
        counts = np.diff(request.csr[0]) if request.csr else np.full(shape[0], shape[1])
        return cls(request, np.repeat(np.arange(shape[0]), counts), tokens)

    def add(self, rows: range, logprobs_TV: torch.Tensor) -> None:
        here = np.flatnonzero((self._rows >= rows.start) & (self._rows < rows.stop) & (self._tokens >= 0))
        at = (torch.from_numpy(self._rows[here] - rows.start), torch.from_numpy(self._tokens[here]))
        self._logprobs[here] = logprobs_TV[tuple(x.to(logprobs_TV.device) for x in at)].cpu().numpy()

    def tensor(self) -> TensorData:
        crow, col = self._request.csr or (None, None)
        return TensorData(self._logprobs, "float32", self._request.shape, crow, col)


def _empty_topk(length: int, k: int) -> TopkLogprobs:
    return TopkLogprobs(np.zeros((length, k), np.int32), np.full((length, k), EMPTY_CELL, np.float32))


def _put_topk(table: TopkLogprobs, where: slice, logprobs_TV: torch.Tensor, k: int) -> None:
    values, ids = logprobs_TV.topk(k, dim=-1)
    table.token_ids[where], table.logprobs[where] = ids.cpu().numpy(), values.cpu().numpy()


def _clear(table: TopkLogprobs, length: int) -> None:
    table.token_ids[:length], table.logprobs[:length] = 0, EMPTY_CELL


# --- Jobs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """The tokens that the rows still going got in one step."""

    rows: Array
    tokens: Array
    logprobs: Array
    topk: TopkLogprobs


class Job:
    """One request: a prefill, then a token per step for each sample that has not ended."""

    def __init__(self, source: Source, request: SampleRequest, seed: int, listener: Listener | None = None) -> None:
        config = source.model.config
        self._listener = listener
        self._source, self._request, self._seed = source, request, seed
        self._prompt = read_tokens(request.prompt, "prompt", config.context)
        _check(request, self._prompt, config.vocab)
        self._limit = _limit(request, self._prompt.size, config.context)
        self._stop = StopRule(source, request.sampling_params.stop, request.num_samples)
        self._scores = PromptScores(self._prompt, request, seed, config.vocab)
        self._rows = np.arange(request.num_samples)
        self._steps: list[_Step] = []
        self._stopped = np.zeros(request.num_samples, dtype=bool)
        self._cache: Cache | None = None

    def step(self) -> SampleResponse | None:
        """Advance; returns the result when every sample has ended."""
        with torch.inference_mode():
            logits_BV = self._prefill() if self._cache is None else self._decode(self._cache)
            if len(self._steps) < self._limit:
                self._commit(logits_BV)
        if self._rows.size and len(self._steps) < self._limit:
            return None
        return self._scores.response(self._sequences())

    def _hidden(self, tokens: Array, positions: Array, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        device = self._source.model.embed_VD.device
        tokens_T, positions_T = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (tokens, positions))
        return hidden_states(self._source.model, tokens_T, positions_T, attend, self._source.lora)

    def _logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self._source.model.logits(hidden_TD, self._source.lora)

    def _prefill(self) -> torch.Tensor:
        self._cache = Cache(self._source.model, self._prompt.size)
        hidden_PD = self._hidden(self._prompt, np.arange(self._prompt.size), self._cache.prefill)
        for rows in _blocks(self._scores.rows, self._source.model.config.vocab):
            self._scores.add(rows, self._logits(hidden_PD[rows.start : rows.stop]))
        self._cache.repeat(self._rows.size)
        return self._logits(hidden_PD[-1:]).expand(self._rows.size, -1)

    def _decode(self, cache: Cache) -> torch.Tensor:
        tokens = self._steps[-1].tokens[~self._stopped[self._steps[-1].rows]]
        position = np.full(tokens.size, cache.extend())
        return self._logits(self._hidden(tokens, position, cache.decode))

    def _commit(self, logits_BV: torch.Tensor) -> None:
        """Choose the next token of every row, keep it, and let rows go that it ends."""
        numbers = uniforms(self._seed, self._rows, len(self._steps))
        tokens_B, logprobs_BV = choose(logits_BV, numbers, self._request.sampling_params)
        k = self._request.topk_sample_logprobs
        topk = _empty_topk(self._rows.size, k)
        if k:
            _put_topk(topk, slice(None), logprobs_BV, k)
        chosen = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
        step = _Step(self._rows, tokens_B.cpu().numpy(), chosen.cpu().numpy(), topk)
        self._steps.append(step)
        ended = self._stop(self._rows, step.tokens)
        if self._listener is not None:
            self._tell(self._listener, step, ended)
        if ended.any() and self._cache is not None:
            self._stopped[self._rows[ended]] = True
            self._rows = self._rows[~ended]
            self._cache.select(torch.from_numpy(np.flatnonzero(~ended)).to(logits_BV.device))

    def _tell(self, listener: Listener, step: _Step, ended: Array) -> None:
        """Pass a step's tokens on. A stopping token stays in its sample, so none has to be held back."""
        last: StopReason | None = "length" if len(self._steps) == self._limit else None
        columns = (step.rows.tolist(), step.tokens.tolist(), step.logprobs.tolist(), ended.tolist())
        listener([DrawnToken(i, t, p, "stop" if end else last) for i, t, p, end in zip(*columns, strict=True)])

    def _sequences(self) -> list[SampledSequence]:
        count, steps, k = self._request.num_samples, len(self._steps), self._request.topk_sample_logprobs
        tokens, logprobs = np.zeros((count, steps), np.int32), np.zeros((count, steps), np.float32)
        ids, values = np.zeros((count, steps, k), np.int32), np.zeros((count, steps, k), np.float32)
        lengths = np.zeros(count, dtype=np.int64)
        for at, step in enumerate(self._steps):
            tokens[step.rows, at], logprobs[step.rows, at] = step.tokens, step.logprobs
            ids[step.rows, at], values[step.rows, at] = step.topk.token_ids, step.topk.logprobs
            lengths[step.rows] += 1
        return [
            SampledSequence(
                stop_reason="stop" if self._stopped[i] else "length",
                tokens_np=tokens[i, :n],
                logprobs_np=logprobs[i, :n],
                topk_logprobs_np=TopkLogprobs(ids[i, :n], values[i, :n]) if k else None,
            )
            for i, n in enumerate(lengths.tolist())
        ]


def _blocks(rows: range, vocab: int) -> Iterator[range]:
    step = max(1, LOGITS_BUDGET // vocab)
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


def _check(request: SampleRequest, prompt: Array, vocab: int) -> None:
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise EngineError(f"num_samples must be between 1 and {MAX_SAMPLES}, got {request.num_samples}")
    if prompt.max() >= vocab:
        raise EngineError(f"prompt: token {prompt.max()} is outside the vocabulary of {vocab}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        most = min(vocab, MAX_TOPK)
        if not 0 <= getattr(request, name) <= most:
            raise EngineError(f"{name} must be between 0 and {most}, got {getattr(request, name)}")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and (last_n < 1 or not (request.prompt_logprobs or request.topk_prompt_logprobs)):
        raise EngineError("prompt_logprobs_last_n must be at least 1 and needs prompt_logprobs")


def _limit(request: SampleRequest, prompt: int, context: int) -> int:
    """How many tokens a sample may have. One token beyond the window is allowed to who only wants prompt scores."""
    asked = request.sampling_params.max_tokens
    if asked is None:
        return context - prompt
    scoring = asked == 1 and (request.prompt_logprobs or request.topk_prompt_logprobs)
    if prompt + asked > context and not scoring:
        raise EngineError(
            f"a prompt of {prompt} tokens and max_tokens {asked} exceed the context window of {context}; "
            f"at most {context - prompt} tokens can be sampled"
        )
    return asked


@dataclass(slots=True)
class Sampler:
    """The jobs of an engine: some running, the rest waiting their turn in order."""

    _running: dict[str, Job] = field(default_factory=dict)
    _waiting: deque[tuple[str, Job]] = field(default_factory=deque)

    def start(self, name: str, job: Job) -> None:
        """Admit a job."""
        if name in self._running or any(name == other for other, _ in self._waiting):
            raise EngineError(f"there is a sampling job {name!r} already")
        self._waiting.append((name, job))

    def step(self) -> list[SampleDone]:
        """Advance every running job by a step; one that fails does not disturb the others."""
        while self._waiting and len(self._running) < MAX_RUNNING:
            self._running.update([self._waiting.popleft()])
        done = []
        for name, job in list(self._running.items()):
            try:
                result: SampleResponse | Exception | None = job.step()
            except Exception as error:
                result = error
            if result is not None:
                del self._running[name]
                done.append(SampleDone(name, result))
        return done

    def cancel(self, name: str) -> None:
        """Drop a job; unknown names are ignored."""
        self._running.pop(name, None)
        self._waiting = deque(item for item in self._waiting if item[0] != name)

    def busy(self) -> bool:
        """Whether any job is unfinished."""
        return bool(self._running or self._waiting)
