"""One run of `tinkex train`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tinkex._version import __version__
from tinkex.cli.options import Connection, seconds_of
from tinkex.cli.output import never_fail_to_write, plain_console
from tinkex.cli.progress import waiting
from tinkex.cli.servers import model_of, place_of
from tinkex.cli.train_data import Loader, Material, counted
from tinkex.cli.train_report import Pruning, StepDisplay, show_summary, summarize
from tinkex.client.rest import RestClient
from tinkex.client.service import ServiceClient
from tinkex.client.training_client import TrainingClient
from tinkex.errors import NotFoundError, TinkerError
from tinkex.finetune import FineTune, Plan, Progress, RunFolder, digest, is_full, is_lost
from tinkex.tokenizers import get_tokenizer_id

EPOCHS = 3
KEPT = 3
"""Checkpoints that a run keeps, besides the best one."""
FULL = "make room where the server keeps checkpoints (`tinkex checkpoint delete`), then "
PLANNED = ("batch_size", "seed", "learning_rate", "schedule", "warmup_steps", "save_every")
"""Options that are fields of the plan as they are."""
RECOVERIES = 3
"""Times a lost run is restored without a new checkpoint in between."""
NOT_KEPT = {"resume", "config", "api_key", "output_format", "output"}
"""Options that config.json leaves out."""


class Command:
    """One call of `tinkex train`, with its options complete."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.json = options["output_format"] == "json"
        never_fail_to_write()
        self.notes = plain_console(stderr=True)
        given = re.sub(r"[^A-Za-z0-9._-]+", "-", options["name"] or options["data"].stem)
        self.name = given.lstrip(".-").rstrip("-")[:100] or "run"
        self.folder: RunFolder | None = None
        self.place = self.model = ""
        self.keep: int = KEPT if options["keep"] is None else options["keep"]
        self._service: ServiceClient | None = None
        self._services = contextlib.ExitStack()
        self._held = contextlib.ExitStack()

    def note(self, text: str) -> None:
        """Print a line beside the result."""
        self.notes.print(text, soft_wrap=True, markup=False)

    # ── the whole ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Read the examples, train, and print the summary."""
        began = time.perf_counter()
        files = [
            self.options[name] for name in ("data", "eval_file") if self.options[name] is not None
        ]
        loader = Loader(self.options, self.note)
        read = [loader.read(path) for path in files]
        digests = [digest(path) for path in files]
        with self._held, self._services:
            if self.options["resume"]:
                self._hold(self.options["resume"])
            service = self._connect()
            model = model_of(service, self.options["base_model"], "--base-model")
            self.place, self.model = place_of(service), model
            place = None if self.options["resume"] else self._new_place()
            known = get_tokenizer_id(model)
            material = loader.early_material(service, model, known, read)
            # after the checks, so that a refused command leaves no run
            client = self._client(service)
            try:
                told = get_tokenizer_id(model, client)
                if material is None or told != known:
                    material = loader.material(service, model, told, read)
                plan = self._plan(len(material.train))
                self.folder = self._open_folder(service, place, plan, material, digests)
            except BaseException:
                # nothing will be trained: let the server forget it
                with contextlib.suppress(TinkerError):
                    client.unload_model()
                raise
            finished = self._train(client, plan, material)
            seconds = time.perf_counter() - began
            summary = summarize(
                self.folder,
                plan,
                name=self.name,
                model=model,
                finished=finished,
                seconds=seconds,
            )
        sampler = summary["sampler_path"]
        summary["resume"] = None if finished else self._again()
        summary["chat"] = self._chat(sampler) if sampler else None
        if self.json:
            click.echo(json.dumps(summary))
        else:
            show_summary(self.folder, summary)
        if not finished:
            raise click.exceptions.Exit(130)

    def _connect(self) -> ServiceClient:
        """Return a new client of the server; the one before it is closed."""
        with contextlib.suppress(TinkerError):
            self._services.close()
        connection = Connection(
            self.options["api_key"], self.options["base_url"], seconds_of(self.options["timeout"])
        )
        self._service = self._services.enter_context(connection.service(self.name))
        return self._service

    def _client(self, service: ServiceClient) -> TrainingClient:
        """Return a new run, or one restored from the last checkpoint."""
        folder = self.folder or (
            RunFolder.open(self.options["resume"]) if self.options["resume"] else None
        )
        saved = folder.checkpoint if folder else None
        with waiting(f"starting {self.model} {self.place} …"):
            if saved is not None:
                return service.create_training_client_from_state_with_optimizer(saved[1]).result()
            return service.create_lora_training_client(
                self.model,
                rank=self.options["rank"],
                seed=self.options["seed"],
                train_unembed=self.options["train_unembed"],
                user_metadata={"name": self.name},
            ).result()

    def _plan(self, examples: int) -> Plan:
        options = self.options
        per_epoch = math.ceil(examples / options["batch_size"])
        return Plan(
            examples=examples,
            steps=options["steps"] or (options["epochs"] or EPOCHS) * per_epoch,
            eval_every=options["eval_every"] or per_epoch,
            **{name: options[name] for name in PLANNED},
        )

    # ── the folder ────────────────────────────────────────────────────────────────────────────────

    def _open_folder(
        self,
        service: ServiceClient,
        place: Path | None,
        plan: Plan,
        material: Material,
        digests: list[str],
    ) -> RunFolder:
        facts = {
            "tinkex": __version__,
            "digests": digests,
            "examples": plan.examples,
            "held_out": len(material.held_out),
            "tokens": int(sum(one.tokens.size for one in material.train)),
            "steps": plan.steps,
        }
        if self.options["resume"]:
            return self._same_folder(facts)
        told = {
            **self.options,
            "base_model": self.model,
            "base_url": service.holder.config.base_url,
            "keep": self.keep,
        }
        config = {
            name: value
            for name, value in told.items()
            if value is not None and name not in NOT_KEPT
        }
        for name in ("data", "eval_file"):
            if name in config:
                config[name] = str(config[name].resolve())
        assert place is not None
        try:
            return RunFolder.create(place, config, facts)
        except OSError as error:
            raise self._unwritable(place, error) from None

    def _new_place(self) -> Path:
        """Make and lock the directory of a new run."""
        place: Path = self.options["output"] or self._free_place()
        self._held.callback(
            _remove_empty, [one for one in (place, *place.parents) if not one.exists()]
        )
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._hold(place)
        except OSError as error:
            raise self._unwritable(place, error) from None
        if not (place / "config.json").exists():
            return place
        with contextlib.suppress(ValueError):
            if RunFolder.open(place).facts.get("sampler"):
                raise click.ClickException(f"{place} holds a finished run: give another --output")
        again = f"tinkex train --resume {shlex.quote(str(place))}"
        raise click.ClickException(f"{place} already holds a run: continue it with `{again}`")

    def _unwritable(self, place: Path, error: OSError) -> click.ClickException:
        return click.ClickException(f"{place} cannot be written to: {error.strerror or error}")

    def _same_folder(self, facts: Mapping[str, Any]) -> RunFolder:
        folder = RunFolder.open(self.options["resume"])
        if folder.facts.get("digests") != facts["digests"]:
            raise click.ClickException(
                f"{self.options['data']} (or the --eval-file) is not what the run in {folder.path} "
                "was started with: it can only resume with the same examples"
            )
        names = ("examples", "tokens", "steps")
        if changed := [name for name in names if folder.facts.get(name) != facts[name]]:
            raise click.ClickException(
                f"the run in {folder.path} was started with {folder.facts.get(changed[0])} "
                f"{changed[0]}, and now there are {facts[changed[0]]}: "
                "the model's tokenizer or its longest input has changed"
            )
        done = folder.checkpoint[0] if folder.checkpoint else 0
        self.note(f"going on with {folder.path} after step {done} of {facts['steps']}")
        return folder

    def _hold(self, place: Path) -> None:
        """Lock the folder until the end: of two writers one would lose its checkpoints.

        Raises:
            click.ClickException: Another command holds the lock.
        """
        if os.name != "posix":
            return
        import fcntl

        with contextlib.suppress(OSError):  # some file systems have no locks
            folder = os.open(place, os.O_RDONLY)
            self._held.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise click.ClickException(
                    f"another `tinkex train` is running in {place}"
                ) from None

    def _free_place(self) -> Path:
        numbers = (f"-{number}" if number > 1 else "" for number in range(1, sys.maxsize))
        return next(
            place
            for number in numbers
            if not (place := Path("runs", f"{self.name}{number}")).joinpath("config.json").exists()
        )

    # ── training ──────────────────────────────────────────────────────────────────────────────────

    def _train(self, client: TrainingClient, plan: Plan, material: Material) -> bool:
        """Train to the end or until stopped; return True at the end."""
        assert self.folder is not None
        folder = self.folder
        rows = (
            f"{counted(plan.examples, 'example')}, {counted(plan.steps, 'step')} of "
            f"{min(plan.batch_size, plan.examples)}"
        )
        self.note(
            f"{self.model} {self.place}: {rows}, rank {self.options['rank']}, into {folder.path}"
        )
        lost = 0
        with StepDisplay(self.notes, plan, folder) as display:
            pruning = Pruning(folder, self.keep, self._delete, display.say)

            def listen(progress: Progress) -> None:
                display.show_step(progress)
                pruning.look()

            while True:
                before = folder.checkpoint
                tune = FineTune(
                    client,
                    plan,
                    material.train,
                    folder,
                    held_out=material.held_out,
                    name=self.name,
                    listener=listen,
                )
                try:
                    with _interrupts(tune, display.say):
                        finished = tune.run()
                        if finished:
                            self._finish(client)
                        pruning.look()
                    return finished
                except TinkerError as error:
                    lost = lost + 1 if folder.checkpoint == before else 1
                    if is_full(error):
                        raise click.ClickException(f"{error}\n{self._saved(FULL)}") from error
                    if not is_lost(error) or lost > RECOVERIES:
                        raise click.ClickException(f"{error}\n{self._saved()}") from error
                    display.say(
                        f"the run broke off ({error.message}): going on from the last checkpoint"
                    )
                except OSError as error:
                    told = f"{folder.path} cannot be written to: {error.strerror or error}"
                    raise click.ClickException(f"{told}\n{self._saved()}") from error
                except KeyboardInterrupt:
                    display.say(self._saved())
                    raise
                try:
                    client = self._client(self._connect())
                except TinkerError as error:
                    raise click.ClickException(f"{error}\n{self._saved()}") from error

    def _finish(self, client: TrainingClient) -> None:
        assert self.folder is not None
        self.folder.facts["sampler"] = client.save_weights_for_sampler(self.name).result().path
        self.folder.save()

    def _delete(self, path: str) -> None:
        assert self._service is not None
        with contextlib.suppress(NotFoundError):  # deleted before
            RestClient(self._service.holder).delete_checkpoint_from_tinker_path(path).result()

    def _again(self) -> str:
        assert self.folder is not None
        return f"tinkex train --resume {shlex.quote(str(self.folder.path))}"

    def _saved(self, first: str = "") -> str:
        """Return what a run that broke off has saved, and how to resume it."""
        assert self.folder is not None
        if self.folder.checkpoint is None:
            return f"no checkpoint was saved; {first}`{self._again()}` starts over"
        step, path = self.folder.checkpoint
        return f"saved after step {step}: {path}\n{first}go on with: {self._again()}"

    def _chat(self, sampler: str) -> str:
        assert self.folder is not None
        url = str(self.folder.config["base_url"])
        return f"tinkex chat {sampler}" + (f" --base-url {url}" if self.options["base_url"] else "")


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove the directories that are empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


@contextlib.contextmanager
def _interrupts(tune: FineTune, say: Callable[[str], object]) -> Iterator[None]:
    """Stop after the step on the first Ctrl-C, at once on the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def handle(number: int, frame: object) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        tune.stop()
        say("stopping after this step, with a checkpoint (Ctrl-C again: at once)")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
