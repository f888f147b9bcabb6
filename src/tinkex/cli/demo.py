"""`tinkex demo`: a small model learns two-digit addition, first from examples, then from rewards
alone.

Everything goes through the public client, so the same command runs against any other server with
`--base-url`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import click
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import tinkex
from tinkex.cli.charts import plot
from tinkex.cli.options import Connection, api_key_option, option, seconds_of, timeout_option
from tinkex.cli.output import plain_console
from tinkex.cli.progress import Display, waiting
from tinkex.cli.servers import place_of
from tinkex.client.settings.config import is_embedded
from tinkex.local import default_data_dir
from tinkex.models import addition
from tinkex.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

STORY = "Once upon a time"
SHOWN = 6
NARROW = 60


@dataclass(frozen=True)
class Recipe:
    """The settings of the lesson."""

    rank: int = 32
    supervised_steps: int = 12
    examples_per_step: int = 64
    supervised_rate: float = 7e-4
    reward_steps: int = 30
    prompts_per_step: int = 16
    samples_per_prompt: int = 16
    reward_rate: float = 7e-4
    held_out: int = 256


QUICK = Recipe(
    supervised_steps=3, examples_per_step=16, reward_steps=2, prompts_per_step=4, held_out=24
)


@dataclass
class Counter:
    """A count of tokens and of the time they took."""

    tokens: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Add the time spent inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Demo:
    """One run of the demo."""

    service: tinkex.ServiceClient
    model: str
    recipe: Recipe
    console: Console
    random: random.Random
    trained: Counter = field(default_factory=Counter)
    sampled: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Start the training run and pick the problems."""
        self.client = self.service.create_lora_training_client(
            self.model, rank=self.recipe.rank, seed=0
        ).result()
        self.tokenizer = self.client.get_tokenizer(backend="tokenizers")
        self.problems = addition.training_problems()
        held_out = addition.held_out_problems()
        self.held_out = self.random.sample(held_out, min(self.recipe.held_out, len(held_out)))
        self.stop = self.tokenizer.encode(addition.STOP, add_special_tokens=False)[-1:]

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def ask(
        self,
        sampler: tinkex.SamplingClient,
        problems: Sequence[tuple[int, int]],
        samples: int,
        temperature: float,
    ) -> list[list[SampledSequence]]:
        """Return the answers to problems, sampled at once."""
        with self.sampled.timing():
            futures = [
                sampler.sample(
                    ModelInput.from_ints(self.tokenizer.encode(addition.prompt(a, b))),
                    samples,
                    params,
                )
                for (a, b), params in zip(
                    problems, self.draws(len(problems), temperature), strict=True
                )
            ]
            answers = [future.result().sequences for future in futures]
        self.sampled.tokens += sum(len(sequence.tokens) for group in answers for sequence in group)
        return answers

    def draws(self, count: int, temperature: float) -> list[SamplingParams]:
        """Return one set of sampling parameters per prompt, each with its own seed."""
        limit, stop = addition.MAX_ANSWER_TOKENS, list(self.stop)
        return [
            SamplingParams(
                max_tokens=limit,
                temperature=temperature,
                stop=stop,
                seed=self.random.getrandbits(31),
            )
            for _ in range(count)
        ]

    def text(self, sequence: SampledSequence) -> str:
        """Return a sample as text."""
        return str(self.tokenizer.decode(sequence.tokens, skip_special_tokens=True))

    def examine(self, sampler: tinkex.SamplingClient) -> tuple[float, list[str]]:
        """Return the greedy accuracy on the held-out problems, and the first few answers."""
        answers = [self.text(group[0]) for group in self.ask(sampler, self.held_out, 1, 0.0)]
        right = [
            addition.reward(text, a, b) for text, (a, b) in zip(answers, self.held_out, strict=True)
        ]
        return sum(right) / len(right), answers[:SHOWN]

    def story(self, sampler: tinkex.SamplingClient) -> str:
        """Return a few sentences of the model."""
        params = SamplingParams(max_tokens=120, temperature=0.7, seed=3, stop="\n")
        response = sampler.sample(
            ModelInput.from_ints(self.tokenizer.encode(STORY)), 1, params
        ).result()
        return (STORY + self.text(response.sequences[0])).strip()

    # ── training ──────────────────────────────────────────────────────────────────────────────────

    def example(self, a: int, b: int) -> Datum:
        """Return a problem with its answer; only the answer is trained on."""
        question = self.tokenizer.encode(addition.prompt(a, b))
        answer = self.tokenizer.encode(addition.answer(a, b), add_special_tokens=False)
        tokens = np.array([*question, *answer])
        weights = np.zeros(tokens.size - 1, dtype=np.float32)
        weights[len(question) - 1 :] = 1.0
        return Datum(
            ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
        )

    def experience(
        self, problem: tuple[int, int], sample: SampledSequence, advantage: float
    ) -> Datum:
        """Return a sampled answer, weighted by its advantage over its group."""
        question = self.tokenizer.encode(addition.prompt(*problem))
        assert sample.tokens_np is not None
        assert sample.logprobs_np is not None
        tokens = np.concatenate([question, sample.tokens_np])
        logprobs, advantages = np.zeros((2, tokens.size - 1), dtype=np.float32)
        logprobs[len(question) - 1 :] = sample.logprobs_np
        advantages[len(question) - 1 :] = advantage
        inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
        return Datum(ModelInput.from_ints(tokens[:-1]), inputs)

    def step(self, data: list[Datum], loss: str, rate: float) -> float:
        """Make one pass and one optimizer step, sent together; return the summed loss."""
        with self.trained.timing():
            passed = self.client.forward_backward(data, loss)
            stepped = self.client.optim_step(AdamParams(learning_rate=rate))
            value = passed.result().metrics["loss:sum"]
            stepped.result()
        self.trained.tokens += sum(datum.model_input.length for datum in data)
        return value

    def lessons(
        self, title: str, steps: int, count: int
    ) -> Iterator[tuple[list[tuple[int, int]], Callable[..., None]]]:
        """Yield the problems of each step, and a function that shows the progress."""
        with progress(self.console, title, steps) as bar:
            for step in range(1, steps + 1):
                yield self.random.sample(self.problems, count), functools.partial(bar.show, step)

    def supervise(self) -> list[float]:
        """Learn from right answers; return the loss per problem at each step."""
        recipe, losses = self.recipe, list[float]()
        lessons = self.lessons(
            "learning from examples", recipe.supervised_steps, recipe.examples_per_step
        )
        for problems, show in lessons:
            data = [self.example(a, b) for a, b in problems]
            loss = self.step(data, "cross_entropy", recipe.supervised_rate)
            losses.append(loss / len(problems))
            show(text=f"loss {losses[-1]:.3f}")
        return losses

    def reinforce(self) -> list[float]:
        """Learn from rewards alone; return the mean reward at each step."""
        recipe, rewards = self.recipe, list[float]()
        lessons = self.lessons(
            "learning from rewards ", recipe.reward_steps, recipe.prompts_per_step
        )
        for problems, show in lessons:
            sampler = self.client.save_weights_and_get_sampling_client().result()
            groups = self.ask(sampler, problems, recipe.samples_per_prompt, 1.0)
            data: list[Datum] = []
            scores = []
            for problem, group in zip(problems, groups, strict=True):
                score = np.array([addition.reward(self.text(sample), *problem) for sample in group])
                scores.append(score.mean())
                if score.std() > 0:  # a group that agrees has nothing to teach
                    advantages = score - score.mean()
                    data += [
                        self.experience(problem, *pair)
                        for pair in zip(group, advantages, strict=True)
                    ]
            rewards.append(float(np.mean(scores)))
            if data:
                self.step(data, "importance_sampling", recipe.reward_rate)
            show(text=f"reward {rewards[-1]:.3f}")
        return rewards


def progress(console: Console, title: str, total: int) -> Display:
    """Return a bar with the count, the time left and the newest value, as wide as fits."""
    wide, left = console.width >= NARROW, TimeRemainingColumn(elapsed_when_finished=True)
    columns = (
        TextColumn("{task.description}"),
        *((BarColumn(), MofNCompleteColumn(), left) if wide else (MofNCompleteColumn(),)),
        TextColumn("{task.fields[text]}"),
    )
    return Display(Progress(*columns, console=console), title, total)


@click.command()
@option(
    "--base-url",
    'Server to run against.  [default: TINKER_BASE_URL, else "local": inside this process]',
    metavar="URL",
)
@api_key_option
@timeout_option
@option("--base-model", "Model to teach.", metavar="NAME", default="tinkex/tiny")
@option("--seed", "Seed of the problems and the samples.", default=0)
@option("--quick", "Run a few small steps only, as a quick check.", is_flag=True)
def demo(
    base_url: str | None,
    api_key: str | None,
    timeout: int | None,
    base_model: str,
    seed: int,
    quick: bool,
) -> None:
    """Watch a small model learn to add, on this machine.

    A LoRA adapter learns two-digit addition, first from examples and then from rewards alone. It is
    tested on problems that no training text contains. Takes about half a minute on two CPU cores.
    """
    url = base_url or os.environ.get("TINKER_BASE_URL") or "local"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # better a question mark than a traceback where there are no such signs
    console = plain_console()
    began = time.perf_counter()
    with Connection(api_key, url, seconds_of(timeout)).service() as service:
        with waiting(
            "starting the embedded backend …" if is_embedded(url) else f"connecting to {url} …"
        ):
            run = Demo(
                service, base_model, QUICK if quick else Recipe(), console, random.Random(seed)
            )
        told = escape(f"{base_model} {place_of(service)}")
        title = f"[bold]tinkex {tinkex.__version__}[/]: {told}, ready in {_since(began)}\n"
        console.print(title, soft_wrap=True)
        passed = _show(run, service, url, console)
        console.print(f"finished in {_since(began)}")
    if not passed and not quick:
        raise click.exceptions.Exit(1)


def _since(began: float) -> str:
    return f"{time.perf_counter() - began:.1f} s"


def _show(run: Demo, service: tinkex.ServiceClient, url: str, console: Console) -> bool:
    """Run the whole demo; return True if the model learned in both parts."""
    base = service.create_sampling_client(base_model=run.model).result()
    console.print(f"[dim]the base model tells a story:[/] {escape(run.story(base))}\n")
    with waiting(f"testing the base model on {len(run.held_out)} held-out problems …"):
        before, first_answers = run.examine(base)
    console.print(
        f"greedy accuracy on {len(run.held_out)} held-out problems: [bold]{before:.1%}[/]\n"
    )

    losses = run.supervise()
    _draw(losses, "loss per problem", console)
    middle, _ = run.examine(run.client.save_weights_and_get_sampling_client().result())
    console.print(f"accuracy after the examples: [bold]{middle:.1%}[/]\n")

    rewards = run.reinforce()
    _draw(rewards, "mean reward", console)
    saved = run.client.save_weights_for_sampler("demo").result().path
    state = run.client.save_state("demo").result().path
    after, last_answers = run.examine(service.create_sampling_client(model_path=saved).result())
    console.print(f"accuracy after the rewards: [bold]{after:.1%}[/]\n")

    console.print(_answers(run, first_answers, last_answers))
    console.print(_summary(run, before, middle, after))
    _where(url, state, saved, console)
    return before < middle < after and after > 0.8


def _draw(values: list[float], label: str, console: Console) -> None:
    """Print a plot as wide as the terminal; skip it for a handful of points."""
    if len(values) >= 5:
        width = max(10, min(60, console.width - 12))
        console.print(plot(values, width=width, label=label), no_wrap=True)


def _answers(run: Demo, before: list[str], after: list[str]) -> Table:
    table = Table(title="held-out problems, before and after", title_justify="left")
    for column in ("problem", "before", "after", "truth"):
        table.add_column(column, justify="right")
    for (a, b), old, new in zip(run.held_out[:SHOWN], before, after, strict=True):
        table.add_row(f"{a} + {b}", _mark(old, a, b), _mark(new, a, b), str(a + b))
    return table


def _mark(text: str, a: int, b: int) -> str:
    shown = text.strip().replace("\n", " ")[:12].replace("[", "(") or "(nothing)"
    return f"[green]{shown} ✓[/]" if addition.reward(text, a, b) else f"[red]{shown} ✗[/]"


def _summary(run: Demo, before: float, middle: float, after: float) -> Table:
    table = Table(title="summary", title_justify="left", show_header=False)
    table.add_row("accuracy: base model", f"{before:.1%}")
    for title, last, now in (
        ("accuracy: after examples (supervised)", before, middle),
        ("accuracy: after rewards (reinforcement)", middle, after),
    ):
        table.add_row(title, f"{now:.1%}  ({100 * (now - last):+.1f} points)")
    table.add_row("training", f"{run.trained.tokens:,} tokens, {run.trained.rate:,.0f} tokens/s")
    table.add_row("sampling", f"{run.sampled.tokens:,} tokens, {run.sampled.rate:,.0f} tokens/s")
    return table


def _where(url: str, state: str, saved: str, console: Console) -> None:
    paths = f"checkpoint to resume from: {state}\ncheckpoint to sample from: {saved}"
    console.print(paths, soft_wrap=True, markup=False)
    if is_embedded(url):
        files = default_data_dir() / "checkpoints"
        console.print(f"their files (PEFT format):  {files}", soft_wrap=True, markup=False)
