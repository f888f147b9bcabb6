"""Supervised fine-tuning: files of examples, batches in an order of their own, a loop that can be
taken up again.

    examples, bad = read_examples("examples.jsonl") rendered, refused = render(examples,
    ChatFormat(client.get_tokenizer())) rows = fit(rendered, 4096).rendered FineTune(client,
    Plan(examples=len(rows), steps=100), rows, RunFolder.create("run", {}, {})).run()

Everything that a step does follows from its number, so a run that goes on from a checkpoint does
what it would have done without the break. `tinkex train` is this, with options.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from tinkex.client.futures.api_future import Future
from tinkex.client.training_client import TrainingClient
from tinkex.errors import GoneError, NotFoundError, RequestFailedError, TinkerError
from tinkex.text.chat_format import ASSISTANT, NO_ANSWER, ChatFormat, Message, Rendered, TrainOn
from tinkex.types.checkpoints import SaveWeightsResponse
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.sessions import RequestErrorCategory
from tinkex.types.tensors import Array
from tinkex.types.training import AdamParams, ForwardBackwardOutput, OptimStepResponse

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
Pairs: TypeAlias = Literal["text", "chat"]
TooLong: TypeAlias = Literal["cut", "skip", "refuse"]

AHEAD = 1
"""Steps that are sent before the one before them has been answered."""
FORMS = (
    'a chat is {"messages": [{"role": …, "content": …}, …]}, a pair {"prompt": …, "completion": …}'
)
_HELD_OUT = 1
_ORDER = 2


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be learned from, and why."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


@dataclass(frozen=True)
class Example:
    """A line of a file: a conversation, or a prompt with its completion."""

    number: int
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""

    @classmethod
    def parse(cls, number: int, line: bytes) -> Example:
        """Read a line; `ValueError` says what is wrong with it."""
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"it is not UTF-8: byte {error.start + 1} is {line[error.start]:#04x}"
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None
        if not isinstance(value, dict):
            raise ValueError(f"it is a JSON {_kind(value)}, not an object: {FORMS}")
        if "messages" in value:
            return cls(number, messages=_messages(value["messages"]))
        if "prompt" in value and "completion" in value:
            return cls(
                number,
                prompt=_text(value, "prompt"),
                completion=_text(value, "completion", needed=True),
            )
        keys = ", ".join(map(repr, value)) or "none"
        raise ValueError(f"it is neither a chat nor a pair; its keys are {keys} ({FORMS})")


def read_examples(path: str | os.PathLike[str]) -> tuple[list[Example], list[BadLine]]:
    """The examples of a file of JSON lines, and the lines that are none; blank lines are passed
    over.

    Raises:
        OSError: The file cannot be read.
    """
    examples: list[Example] = []
    bad: list[BadLine] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not line:
                continue
            try:
                examples.append(Example.parse(number, line))
            except ValueError as error:
                bad.append(BadLine(number, str(error)))
            except RecursionError:
                bad.append(BadLine(number, "it is nested too deeply"))
    return examples, bad


def without_answer(examples: Sequence[Example]) -> list[BadLine]:
    """The conversations in which the assistant says nothing, so that there is nothing to learn but
    all of it.
    """
    return [
        BadLine(example.number, NO_ANSWER)
        for example in examples
        if example.messages and all(message["role"] != ASSISTANT for message in example.messages)
    ]


def digest(path: str | os.PathLike[str]) -> str:
    """What tells a file's content from another's."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "truth value", type(None): "null"}
    return kinds.get(type(value), "number")


def _text(value: Mapping[str, Any], name: str, *, needed: bool = False) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise ValueError(
            f"{name} must be text, not a JSON "
            f"{_kind(text) if not isinstance(text, dict) else 'object'}"
        )
    if needed and not text:
        raise ValueError(f"{name} is empty: there is nothing to learn")
    return text


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a list with at least one message")
    return tuple(_message(place, message) for place, message in enumerate(value, 1))


def _message(place: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"message {place} is no object with role and content")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {place} has no role")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"message {place} holds parts that are not text")
        content = "".join(part for part in parts if part)
    if not isinstance(content, str):
        raise ValueError(f"message {place}, of the {role}, has no text as content")
    return {**value, "content": content}


# ── examples as tokens ────────────────────────────────────────────────────────────────────────────


def render(
    examples: Sequence[Example],
    chat: ChatFormat,
    *,
    train_on: TrainOn = ASSISTANT,
    pairs: Pairs = "text",
) -> tuple[list[tuple[int, Rendered]], list[BadLine]]:
    """Examples as tokens, each with the number of its line, and the lines that cannot be rendered.

    Args:
        examples: The examples.
        chat: How the model writes conversations.
        train_on: What is learned; see `ChatFormat.conversation`.
        pairs: Whether a pair is a text that goes on, or a question and its answer in the chat
            format.
    """
    rendered: list[tuple[int, Rendered]] = []
    bad: list[BadLine] = []
    for example in examples:
        try:
            rendered += [(example.number, one) for one in _rendered(example, chat, train_on, pairs)]
        except ValueError as error:
            bad.append(BadLine(example.number, str(error)))
    return rendered, bad


def _rendered(
    example: Example, chat: ChatFormat, train_on: TrainOn, pairs: Pairs
) -> list[Rendered]:
    messages = example.messages
    if not messages and pairs == "text":
        found = [chat.pair(example.prompt, example.completion, train_on)]
    else:
        messages = messages or (
            {"role": "user", "content": example.prompt},
            {"role": ASSISTANT, "content": example.completion},
        )
        found = chat.conversation(messages, train_on)
    if not any(one.learned for one in found):
        raise ValueError("no token of it is learned: it is too short")
    return found


@dataclass(frozen=True)
class Fitted:
    """Examples that are no longer than allowed, and the lines of those that were."""

    rendered: list[Rendered]
    cut: list[int]
    left_out: list[int]


def fit(
    rendered: Sequence[tuple[int, Rendered]], length: int | None, *, cut: bool = True
) -> Fitted:
    """Cut what is longer than so many tokens, or leave it out; what has nothing left to learn is
    left out as well.
    """
    kept: list[Rendered] = []
    shortened: list[int] = []
    left_out: list[int] = []
    for number, one in rendered:
        if length is None or one.tokens.size <= length:
            kept.append(one)
        elif cut and (shorter := one.cut(length)).learned:
            kept.append(shorter)
            shortened.append(number)
        else:
            left_out.append(number)
    return Fitted(kept, shortened, left_out)


def hold_out(
    rendered: Sequence[Rendered], fraction: float, seed: int
) -> tuple[list[Rendered], list[Rendered]]:
    """What is trained on, and a fraction that is not (one example at least, in an order that the
    seed decides).
    """
    if not fraction or len(rendered) < 2:
        return list(rendered), []
    count = min(max(1, round(fraction * len(rendered))), len(rendered) - 1)
    chosen = {
        int(index)
        for index in np.random.default_rng([seed, _HELD_OUT]).permutation(len(rendered))[:count]
    }
    held = [one for index, one in enumerate(rendered) if index in chosen]
    return [one for index, one in enumerate(rendered) if index not in chosen], held


def datum(one: Rendered) -> Datum:
    """An example as a server takes it: each token foretells the next."""
    inputs = {"target_tokens": one.tokens[1:], "weights": one.weights[1:]}
    return Datum(ModelInput.from_ints(one.tokens[:-1]), inputs)


def summed_loss(output: ForwardBackwardOutput, rendered: Sequence[Rendered]) -> tuple[float, float]:
    """The summed loss of a pass and the weight it is spread over; their quotient is the loss of a
    token.
    """
    total = weight = 0.0
    for one, tensors in zip(rendered, output.loss_fn_outputs, strict=True):
        weights = one.weights[1:].astype(np.float64)
        total -= float(weights @ tensors["logprobs"].to_numpy().astype(np.float64))
        weight += float(weights.sum())
    return total, weight


# ── the plan ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What each step does, by its number."""

    examples: int
    steps: int
    batch_size: int = 16
    seed: int = 0
    learning_rate: float = 3e-4
    schedule: Schedule = "linear"
    warmup_steps: int = 0
    eval_every: int = 0
    save_every: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """How many steps go once over the examples; the last of them may be smaller."""
        return math.ceil(self.examples / self.batch_size)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0 on: rising to the full rate, then as the schedule
        says.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = 1.0 - (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.learning_rate * left
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 - math.cos(math.pi * left))
        return self.learning_rate

    def batch(self, step: int) -> Array:
        """Which examples a step learns from: every epoch has all of them, in an order of its own."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, _ORDER, epoch]).permutation(self.examples)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def is_eval(self, done: int) -> bool:
        """Whether the held-out loss is computed after so many steps: before the first, now and
        then, at the end.
        """
        return done in (0, self.steps) or (self.eval_every > 0 and done % self.eval_every == 0)

    def is_save(self, done: int) -> bool:
        """Whether a checkpoint is saved after so many steps."""
        return done == self.steps or (self.save_every > 0 and done % self.save_every == 0)


# ── what is kept of a run ─────────────────────────────────────────────────────────────────────────


class RunFolder:
    """A directory with what is known of a run.

    `config.json` has the options it was started with, `run.json` the facts (the checkpoints among
    them) and `metrics.jsonl` a line for each step and each evaluation.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], facts: dict[str, Any]) -> None:
        self.path, self.config, self.facts = path, config, facts

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], config: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> RunFolder:
        """Begin a run in a new or empty directory.

        Raises:
            FileExistsError: There is a run in it already.
        """
        place = Path(path)
        if (place / "config.json").exists():
            raise FileExistsError(f"{place} holds a run already")
        place.mkdir(parents=True, exist_ok=True)
        folder = cls(place, dict(config), {**facts, "checkpoints": []})
        _write(place / "config.json", folder.config)
        folder.save()
        (place / "metrics.jsonl").write_text("")
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Take up the run of a directory.

        Raises:
            ValueError: There is none that can be read.
        """
        place = Path(path)
        try:
            config, facts = (
                json.loads((place / name).read_text()) for name in ("config.json", "run.json")
            )
            facts["checkpoints"] = list(facts["checkpoints"])
        except OSError as error:
            raise ValueError(
                f"{place} holds no run that could be taken up: {error.filename}: "
                f"{error.strerror or error}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place} holds no run that could be taken up: {error}") from None
        return cls(place, config, facts)

    def save(self) -> None:
        """Write the facts down."""
        _write(self.path / "run.json", self.facts)

    @property
    def checkpoint(self) -> tuple[int, str] | None:
        """The last checkpoint: after how many steps, and its path."""
        saved = self.facts["checkpoints"]
        return (int(saved[-1]["step"]), str(saved[-1]["path"])) if saved else None

    @property
    def best(self) -> tuple[int, str] | None:
        """Of the checkpoints that were evaluated when they were saved, the one with the lowest
        held-out loss.
        """
        scored = [
            saved
            for saved in self.facts["checkpoints"]
            if math.isfinite(saved.get("eval_loss", math.nan))
        ]
        best = min(scored, key=lambda saved: float(saved["eval_loss"]), default=None)
        return (int(best["step"]), str(best["path"])) if best else None

    def surplus(self, keep: int) -> list[str]:
        """The paths of checkpoints that are neither among the last so many nor the best, the oldest
        first.
        """
        if keep < 1:
            raise ValueError(f"a run keeps its last checkpoint at least, not {keep}")
        older = [str(saved["path"]) for saved in self.facts["checkpoints"][:-keep]]
        return [path for path in older if self.best is None or path != self.best[1]]

    def add_checkpoint(self, step: int, path: str, eval_loss: float | None = None) -> None:
        """Note a checkpoint, and the held-out loss it has where that was computed."""
        saved = {"step": step, "path": path} | (
            {} if eval_loss is None else {"eval_loss": eval_loss}
        )
        self.facts["checkpoints"].append(saved)
        try:
            self.save()
        except BaseException:
            self.facts["checkpoints"].pop()  # who takes the run up again will not know of it
            raise

    def forget(self, path: str) -> None:
        """Strike out a checkpoint that has been deleted."""
        self.facts["checkpoints"] = [
            saved for saved in self.facts["checkpoints"] if saved["path"] != path
        ]
        self.facts["deleted"] = self.facts.get("deleted", 0) + 1
        self.save()

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line of metrics."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All metrics so far; a line that was not written to its end is no line."""
        found = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def rewind(self) -> list[dict[str, Any]]:
        """Forget the metrics after the last checkpoint, since those steps are made again; the
        others.
        """
        step = self.checkpoint[0] if self.checkpoint else -1
        kept = [record for record in self.metrics() if record["step"] <= step]
        _replace(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))
        return kept


def _write(path: Path, value: Any) -> None:
    _replace(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


# ── the loop ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Progress:
    """What is known after a step."""

    step: int
    loss: float | None
    eval_loss: float | None
    made: int
    """Steps that this loop has made, …"""
    tokens: int
    """… their tokens, …"""
    seconds: float
    """… and how long it took for them."""


@dataclass(frozen=True)
class _Sent:
    """A step on its way: after it, `done` steps have been made."""

    done: int
    rows: list[Rendered]
    passed: Future[ForwardBackwardOutput] | None
    stepped: Future[OptimStepResponse] | None
    evaluated: list[tuple[Future[ForwardBackwardOutput], Sequence[Rendered]]]
    saved: Future[SaveWeightsResponse] | None


class FineTune:
    """The loop of a supervised fine-tune: steps, evaluations and checkpoints, each sent before the
    last is answered.

    Args:
        client: The run to train; made of the folder's last checkpoint, if it has one.
        plan: What each step does.
        train: The examples.
        folder: Where metrics and checkpoints are noted.
        held_out: Examples to evaluate on.
        name: What the names of checkpoints begin with.
        listener: Is told of every step.
    """

    def __init__(
        self,
        client: TrainingClient,
        plan: Plan,
        train: Sequence[Rendered],
        folder: RunFolder,
        *,
        held_out: Sequence[Rendered] = (),
        name: str = "train",
        listener: Callable[[Progress], object] = lambda progress: None,
    ) -> None:
        self.client, self.plan, self.folder = client, plan, folder
        self._train, self._held_out, self._name, self._listener = train, held_out, name, listener
        self._stopping = False
        self._made = self._tokens = 0
        self._began = time.perf_counter()

    def stop(self) -> None:
        """End after the steps that are on their way, with a checkpoint; may be called by a signal's
        handler.
        """
        self._stopping = True

    def run(self) -> bool:
        """Make the steps that are left; whether all of them were made."""
        done = self.folder.checkpoint[0] if self.folder.checkpoint else 0
        self.folder.rewind()
        self._began = time.perf_counter()
        sent: deque[_Sent] = deque()
        if done == 0 and self._held_out:
            sent.append(_Sent(0, [], None, None, self._evaluate(), None))
        while done < self.plan.steps and not self._stopping:
            sent.append(self._send(done))
            done += 1
            while len(sent) > AHEAD:
                self._receive(sent.popleft())
        while sent:
            self._receive(sent.popleft())
        if (self.folder.checkpoint or (0, ""))[0] < done:
            self.folder.add_checkpoint(done, self._save(done).result().path)
        return done == self.plan.steps

    def _send(self, step: int) -> _Sent:
        plan, done = self.plan, step + 1
        rows = [self._train[index] for index in plan.batch(step)]
        passed = self.client.forward_backward([datum(row) for row in rows], "cross_entropy")
        stepped = self.client.optim_step(AdamParams(learning_rate=plan.rate(step)))
        evaluated = self._evaluate() if plan.is_eval(done) else []
        return _Sent(
            done, rows, passed, stepped, evaluated, self._save(done) if plan.is_save(done) else None
        )

    def _save(self, done: int) -> Future[SaveWeightsResponse]:
        return self.client.save_state(f"{self._name}-{done:06d}")

    def _evaluate(self) -> list[tuple[Future[ForwardBackwardOutput], Sequence[Rendered]]]:
        return [
            (self.client.forward([datum(row) for row in rows], "cross_entropy"), rows)
            for rows in _groups(self._held_out, self.plan.batch_size)
        ]

    def _receive(self, sent: _Sent) -> None:
        """Wait for a step, and note what came of it; the checkpoint last, when all before it is
        noted.
        """
        loss = eval_loss = None
        if sent.passed is not None and sent.stepped is not None:
            total, weight = summed_loss(sent.passed.result(), sent.rows)
            sent.stepped.result()
            loss, step = total / weight, sent.done - 1
            tokens = sum(row.tokens.size for row in sent.rows)
            self._made += 1
            self._tokens += tokens
            self.folder.log(
                {
                    "step": sent.done,
                    "epoch": step // self.plan.steps_per_epoch + 1,
                    "loss": loss,
                    "learning_rate": self.plan.rate(step),
                    "examples": len(sent.rows),
                    "tokens": tokens,
                }
            )
        if sent.evaluated:
            sums = np.array(
                [summed_loss(future.result(), rows) for future, rows in sent.evaluated]
            ).sum(axis=0)
            eval_loss = float(sums[0] / sums[1])
            self.folder.log({"step": sent.done, "eval_loss": eval_loss})
        if sent.saved is not None:
            self.folder.add_checkpoint(sent.done, sent.saved.result().path, eval_loss)
        seconds = time.perf_counter() - self._began
        self._listener(Progress(sent.done, loss, eval_loss, self._made, self._tokens, seconds))


def _groups(rows: Sequence[Rendered], size: int) -> Iterator[Sequence[Rendered]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def is_lost(error: TinkerError) -> bool:
    """Whether a run failed because its server has it no more, so that going on from a checkpoint
    may help.
    """
    if isinstance(error, RequestFailedError):
        return error.category != RequestErrorCategory.User
    return isinstance(error, GoneError | NotFoundError)


def is_full(error: TinkerError) -> bool:
    """Whether a server could not save for want of space: trying again would not help, making room
    does.
    """
    return (
        re.search(
            r"disk is full|no space left on device|disk quota exceeded",
            error.message,
            re.IGNORECASE,
        )
        is not None
    )
