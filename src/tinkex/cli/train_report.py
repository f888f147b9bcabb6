"""The output of `tinkex train`: its progress and its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn

from tinkex.cli.charts import chart, plot
from tinkex.cli.output import plain_console
from tinkex.cli.progress import Display
from tinkex.cli.train_data import counted
from tinkex.errors import TinkerError
from tinkex.finetune import Plan, Progress, RunFolder

NARROW = 60
"""Columns below which a terminal shows less."""


def summarize(
    folder: RunFolder, plan: Plan, *, name: str, model: str, finished: bool, seconds: float
) -> dict[str, Any]:
    """Return the facts of a run that ended, and draw its losses into the folder."""
    metrics = folder.metrics()
    losses = [(record["step"], record["loss"]) for record in metrics if "loss" in record]
    evaluated = [
        (record["step"], record["eval_loss"]) for record in metrics if "eval_loss" in record
    ]
    drawn = chart({"training": losses, "held out": evaluated}, f"{name}: loss per token")
    with contextlib.suppress(OSError):  # the plot is the least of what a run makes
        (folder.path / "loss.svg").write_text(drawn, encoding="utf-8")
    step, state = folder.checkpoint or (0, None)
    sampler = folder.facts.get("sampler")
    return {
        "status": "finished" if finished else "interrupted",
        "model": model,
        "steps": step,
        "of_steps": plan.steps,
        "examples": plan.examples,
        "tokens": sum(record["tokens"] for record in metrics if "tokens" in record),
        "first_loss": losses[0][1] if losses else None,
        "loss": losses[-1][1] if losses else None,
        "eval_loss": evaluated[-1][1] if evaluated else None,
        "seconds": round(seconds, 3),
        "state_path": state,
        "kept": len(folder.facts["checkpoints"]),
        "deleted": folder.facts.get("deleted", 0),
        "best_path": folder.best[1] if folder.best else None,
        "sampler_path": sampler,
        "output": str(folder.path),
    }


def show_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Print a run's summary and the plot of its losses."""
    shown = plain_console()
    metrics = folder.metrics()
    points = [(record["step"], record["loss"]) for record in metrics if "loss" in record]
    losses = [loss for _, loss in points]
    if len(losses) >= 5:
        width = max(10, min(60, shown.width - 12))
        ends = (f"step {points[0][0]}", points[-1][0])
        shown.print(plot(losses, width=width, label="loss per token", ends=ends), no_wrap=True)
    said = [f"{summary['status']}: {summary['steps']} of {counted(summary['of_steps'], 'step')}"]
    said.append(f"{summary['tokens']:,} tokens in {summary['seconds']:.1f} s")
    if losses:
        said.append(f"loss {losses[0]:.4f} → {losses[-1]:.4f}")
    if summary["eval_loss"] is not None:
        evaluated = [record["eval_loss"] for record in metrics if "eval_loss" in record]
        said.append(f"held out {evaluated[0]:.4f} → {evaluated[-1]:.4f}")
    shown.print(", ".join(said), markup=False, soft_wrap=True)
    kept, deleted = summary["kept"], summary["deleted"]
    for title, value in (
        ("checkpoint to resume from", summary["state_path"]),
        (
            "best by held-out loss",
            summary["best_path"] if summary["best_path"] != summary["state_path"] else None,
        ),
        ("model to sample from", summary["sampler_path"]),
        ("checkpoints kept", f"{kept} of {kept + deleted} (--keep)" if deleted else None),
        ("metrics and plot", summary["output"]),
        ("resume with", summary["resume"]),
        ("talk to it", summary["chat"]),
    ):
        if value:
            shown.print(f"{title}: {value}", markup=False, soft_wrap=True)


class Pruning:
    """Deletes surplus checkpoints, each after a newer one is recorded."""

    def __init__(
        self,
        folder: RunFolder,
        keep: int,
        delete: Callable[[str], object],
        say: Callable[[str], object],
    ) -> None:
        self._folder, self._keep, self._delete, self._say = folder, keep, delete, say
        self._seen = folder.checkpoint
        self._complained = False

    def look(self) -> None:
        """Delete surplus checkpoints if there is a new one; one that cannot be deleted stays."""
        if not self._keep or self._folder.checkpoint == self._seen:
            return
        self._seen = self._folder.checkpoint
        for path in self._folder.surplus(self._keep):
            try:
                self._delete(path)
            except TinkerError as error:
                if not self._complained:
                    self._say(
                        f"{path} was not deleted; a later checkpoint tries again: {error.message}"
                    )
                self._complained = True
                return
            self._folder.forget(path)


class StepDisplay(Display):
    """The progress of a run: its step, losses, speed and time left."""

    def __init__(self, console: Console, plan: Plan, folder: RunFolder) -> None:
        self._steps, self._first = plan.steps, folder.checkpoint[0] if folder.checkpoint else 0
        self._wide = console.width >= NARROW
        self._loss = self._eval_loss = ""
        bar = None
        if console.is_terminal:
            count = "{task.completed}/{task.total}"
            columns = (
                TextColumn(f"step {count}" if self._wide else count),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}", markup=False),
            )
            bar = Bar(*columns, console=console, expand=True)
        super().__init__(bar, total=plan.steps, done=self._first)

    def show_step(self, progress: Progress) -> None:
        """Show the progress after a step."""
        if progress.loss is not None:
            self._loss = f"loss {progress.loss:.4f}"
        if progress.eval_loss is not None:
            self._eval_loss = f"held out {progress.eval_loss:.4f}"
        rate = progress.tokens / progress.seconds if progress.seconds else 0.0
        speed = f"{rate:,.0f} tokens/s" if progress.tokens else ""
        left = ""
        if progress.made:
            seconds = progress.seconds / progress.made * (self._steps - progress.step)
            left = f"{_duration(seconds)} left"
        facts = [self._loss, self._eval_loss, speed, left]
        line = [f"step {progress.step}/{self._steps}", *facts]
        ends = progress.step in (0, self._first + 1, self._steps)
        self.show(
            progress.step,
            text=" ".join(filter(None, facts if self._wide else [self._loss, left])),
            line=lambda: "  ".join(filter(None, line)),
            at_once=ends or progress.eval_loss is not None,
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
