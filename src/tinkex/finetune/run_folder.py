"""The directory of a fine-tune: its options, checkpoints and metrics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunFolder:
    """The directory of a run.

    `config.json` holds the options it was started with, `run.json` the facts (checkpoints among
    them), and `metrics.jsonl` a line per step and per evaluation.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], facts: dict[str, Any]) -> None:
        self.path, self.config, self.facts = path, config, facts

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], config: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> RunFolder:
        """Start a run in a new or empty directory.

        Raises:
            FileExistsError: The directory holds a run.
        """
        place = Path(path)
        if (place / "config.json").exists():
            raise FileExistsError(f"{place} already holds a run")
        place.mkdir(parents=True, exist_ok=True)
        folder = cls(place, dict(config), {**facts, "checkpoints": []})
        _write(place / "config.json", folder.config)
        folder.save()
        (place / "metrics.jsonl").write_text("")
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Open the run of a directory.

        Raises:
            ValueError: The directory holds no readable run.
        """
        place = Path(path)
        try:
            config, facts = (
                json.loads((place / name).read_text()) for name in ("config.json", "run.json")
            )
            facts["checkpoints"] = list(facts["checkpoints"])
        except OSError as error:
            raise ValueError(
                f"{place} holds no run that can be resumed: {error.filename}: "
                f"{error.strerror or error}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place} holds no run that can be resumed: {error}") from None
        return cls(place, config, facts)

    def save(self) -> None:
        """Write the facts to run.json."""
        _write(self.path / "run.json", self.facts)

    @property
    def checkpoint(self) -> tuple[int, str] | None:
        """The last checkpoint: its step and its path."""
        saved = self.facts["checkpoints"]
        return (int(saved[-1]["step"]), str(saved[-1]["path"])) if saved else None

    @property
    def best(self) -> tuple[int, str] | None:
        """The checkpoint with the lowest held-out loss, of those evaluated when saved."""
        scored = [
            saved
            for saved in self.facts["checkpoints"]
            if math.isfinite(saved.get("eval_loss", math.nan))
        ]
        best = min(scored, key=lambda saved: float(saved["eval_loss"]), default=None)
        return (int(best["step"]), str(best["path"])) if best else None

    def surplus(self, keep: int) -> list[str]:
        """Return the paths of checkpoints to delete, oldest first.

        The last `keep` and the best one stay.
        """
        if keep < 1:
            raise ValueError(f"a run keeps at least its last checkpoint, got {keep}")
        older = [str(saved["path"]) for saved in self.facts["checkpoints"][:-keep]]
        return [path for path in older if self.best is None or path != self.best[1]]

    def add_checkpoint(self, step: int, path: str, eval_loss: float | None = None) -> None:
        """Record a checkpoint, with its held-out loss if that was computed."""
        saved = {"step": step, "path": path} | (
            {} if eval_loss is None else {"eval_loss": eval_loss}
        )
        self.facts["checkpoints"].append(saved)
        try:
            self.save()
        except BaseException:
            self.facts["checkpoints"].pop()  # a resumed run will not find it either
            raise

    def forget(self, path: str) -> None:
        """Remove a deleted checkpoint from the record."""
        self.facts["checkpoints"] = [
            saved for saved in self.facts["checkpoints"] if saved["path"] != path
        ]
        self.facts["deleted"] = self.facts.get("deleted", 0) + 1
        self.save()

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line of metrics."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return all metrics; an incomplete last line is skipped."""
        found = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def rewind(self) -> list[dict[str, Any]]:
        """Drop the metrics after the last checkpoint, whose steps run again; return the rest."""
        step = self.checkpoint[0] if self.checkpoint else -1
        kept = [record for record in self.metrics() if record["step"] <= step]
        _replace(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))
        return kept


def _write(path: Path, value: Any) -> None:
    _replace(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
