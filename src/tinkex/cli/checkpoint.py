"""`tinkex checkpoint`: save, list, share and delete checkpoints."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.diff import diff
from tinkex.cli.options import (
    CommandGroup,
    Connection,
    connecting,
    explaining,
    in_one_line,
    option,
    paged,
    path_argument,
    refuse_before,
    reporting,
    switch,
    together,
    wait,
)
from tinkex.cli.output import (
    Column,
    CommandError,
    Outcome,
    check_place,
    checkpoint_data,
    counted,
    expiry,
    iso,
    lora,
    print_fields,
    print_table,
    size,
    wants_json,
    when,
    write_file,
    yes_no,
)
from tinkex.cli.progress import fetch_pages, waiting
from tinkex.cli.transfers import download, export, import_, push_hf

if TYPE_CHECKING:
    from tinkex.client.futures.api_future import APIFuture
    from tinkex.client.rest import RestClient
    from tinkex.types.checkpoints import Checkpoint

PAGE = 1000
DELETIONS = 32
"""Checkpoints deleted at the same time."""
COLUMNS = (
    Column("ID", folds=True, repeats=True),
    Column("Type"),
    Column("Size", right=True),
    Column("Public"),
    Column("Created"),
    Column("Expires"),
    Column("Path", heads=True),
)
WEIGHTS_LABELS = {
    "lora_rank": "Rank",
    "train_unembed": "Trains unembed",
    "train_mlp": "Trains MLP",
    "train_attn": "Trains attention",
}
"""Labels of a checkpoint's facts that not every server tells."""


save_options = together(
    option("--base-model", "The model to make an adapter for.", metavar="NAME"),
    option(
        "--model-path",
        "A training checkpoint (tinker://…) to start from, or a model's name.",
        metavar="PATH",
    ),
    option("--name", "Name of the checkpoint.  [default: checkpoint-MODEL]"),
    option("-o --output", "File for the result, as JSON (required).", metavar="FILE"),
    option("--rank", "The adapter's rank.", default=32, least=1),
    option("--seed", "Seed of the adapter's initial weights.", type=int),
    *(
        option(f"--train-{part}/--no-train-{part}", told, default=True, show_default="on")
        for part, told in (
            ("mlp", "Adapt feed-forward layers."),
            ("attn", "Adapt attention layers."),
            ("unembed", "Adapt the output layer."),
        )
    ),
)


@click.group(cls=CommandGroup, invoke_without_command=True)
@save_options
@connecting
@click.pass_context
def checkpoint(context: click.Context, /, **given: Any) -> Any:
    """Save, list, share, fetch and compare checkpoints.

    With options alone it saves one, as `checkpoint save` does: tinkex checkpoint --base-model NAME
    --output FILE
    """
    if refuse_before(context):
        return None
    return save_checkpoint(**given)


@checkpoint.command(short_help="Save a fresh adapter, or a training checkpoint to sample from.")
@save_options
@connecting
def save(**given: Any) -> Outcome:
    """Save a fresh adapter of a model, or the weights of a training checkpoint, to sample from."""
    return save_checkpoint(**given)


for _command in (diff, download, export, import_, push_hf):
    checkpoint.add_command(_command)


# ── saving ────────────────────────────────────────────────────────────────────────────────────────


def save_checkpoint(
    *,
    connection: Connection,
    base_model: str | None,
    model_path: str | None,
    name: str | None,
    output: str | None,
    **shape: Any,
) -> Outcome:
    """Make a run, save its weights and write their path to a file; on failure write nothing."""
    from tinkex.types.checkpoints import SCHEME

    wrong = "saving failed (please check your inputs)"
    if not output:
        raise CommandError(f"{wrong}: give --output FILE")
    model = base_model or model_path
    if not model:
        raise CommandError(f"{wrong}: give --base-model or --model-path")
    check_place(Path(output))
    chosen = name or f"checkpoint-{_slug(model)}"
    with explaining("saving"), connection.service() as service, waiting(f"saving {chosen}"):
        seconds = service.holder.config.timeout
        if model_path and model_path.startswith(SCHEME):
            making = service.create_training_client_from_state(model_path, base_model)
        else:
            making = service.create_lora_training_client(model, **shape)
        client = wait(making, seconds)
        response = wait(client.save_weights_for_sampler(chosen), seconds)
    data = {
        "base_model": model,
        "model_id": client.model_id,
        "weights_path": response.path,
        "saved_at": iso(dt.datetime.now(dt.UTC).replace(microsecond=0)),
        "response": response.model_dump(),
    }
    write_file(Path(output), json.dumps(data, ensure_ascii=False) + "\n")
    click.echo(f"Checkpoint saved to {output}")
    return Outcome(data, response)


def _slug(model: str) -> str:
    return model.removeprefix("tinker://").lower().replace("/", "-").replace(":", "-")


# ── looking ───────────────────────────────────────────────────────────────────────────────────────


@checkpoint.command("list")
@option("--run-id", "List all checkpoints of this run only.", metavar="RUN")
@paged
@reporting
@click.pass_context
def list_command(
    context: click.Context,
    run_id: str | None,
    limit: int,
    offset: int,
    connection: Connection,
) -> Outcome:
    """List checkpoints, the newest first."""
    sources = [context.get_parameter_source(name) for name in ("limit", "offset")]
    if run_id is not None and click.core.ParameterSource.COMMANDLINE in sources:
        raise click.UsageError(
            "--run-id lists all checkpoints of the run: --limit and --offset have no effect"
        )
    with connection.rest() as rest:
        if run_id is not None:
            found = _of_run(rest, run_id)
            total = len(found)
        else:

            def fetch(count: int, start: int) -> tuple[list[Checkpoint], Any]:
                page = wait(rest.list_user_checkpoints(count, start))
                return page.checkpoints, page.cursor

            found, total = fetch_pages(fetch, "checkpoints", PAGE, limit, offset)
    data = {
        "checkpoints": [checkpoint_data(item) for item in found],
        "total": total,
        "shown": len(found),
    }
    if run_id is not None:
        data["run_id"] = run_id
    place = f" for {run_id}" if run_id is not None else ""
    title = f"Checkpoints{place} ({len(found)}/{total})"
    return Outcome(
        data, found, show=lambda: print_table(title, COLUMNS, [_row(item) for item in found])
    )


def _of_run(rest: RestClient, run_id: str) -> list[Checkpoint]:
    with in_one_line(ValueError):
        return wait(rest.list_checkpoints(run_id)).checkpoints


def _row(item: Checkpoint) -> tuple[object, ...]:
    return (
        item.checkpoint_id,
        item.checkpoint_type,
        size(item.size_bytes),
        yes_no(item.public),
        when(item.time),
        expiry(item.expires_at),
        item.tinker_path,
    )


@checkpoint.command()
@path_argument()
@reporting
def info(path: str, connection: Connection) -> Outcome:
    """Show the facts of a checkpoint."""
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    with connection.rest() as rest:
        found = next((item for item in _of_run(rest, run_id) if item.tinker_path == path), None)
        if found is None:
            raise CommandError(
                f"there is no checkpoint {path}; `tinkex checkpoint list --run-id {run_id}` shows "
                "them"
            )
        weights = wait(rest.get_weights_info_by_tinker_path(path))
    known = {
        name: value for name in WEIGHTS_LABELS if (value := getattr(weights, name)) is not None
    }
    fields: dict[str, object] = {
        "ID": found.checkpoint_id,
        "Run ID": found.training_run_id,
        "Type": found.checkpoint_type,
        "Path": found.tinker_path,
        "Size": size(found.size_bytes),
        "Public": yes_no(found.public),
        "Created": when(found.time),
        "Expires": expiry(found.expires_at),
        "Base model": weights.base_model,
        "LoRA": lora(weights.is_lora),
    }
    for name, value in known.items():
        fields[WEIGHTS_LABELS[name]] = value if name == "lora_rank" else yes_no(value)
    about = {"base_model": weights.base_model, "is_lora": weights.is_lora, **known}
    return Outcome(
        checkpoint_data(found) | about, (found, weights), show=lambda: print_fields(fields)
    )


# ── changing ──────────────────────────────────────────────────────────────────────────────────────


def _sharing(action: str, told: str) -> click.Command:
    @click.command(action, help=told)
    @path_argument()
    @reporting
    def change(path: str, connection: Connection) -> Outcome:
        with connection.rest() as rest:
            wait(getattr(rest, f"{action}_checkpoint_from_tinker_path")(path))
        data = {"action": action, "path": path}
        return Outcome(data, show=f"{action.capitalize()}ed {path}")

    return change


checkpoint.add_command(_sharing("publish", "Let everyone use a checkpoint."))
checkpoint.add_command(_sharing("unpublish", "Make a published checkpoint private again."))


@checkpoint.command("set-ttl")
@path_argument()
@option("--ttl", "Expire in this many seconds.", metavar="SECONDS", least=1)
@switch("--remove", help="Keep it forever.")
@reporting
def set_ttl(path: str, ttl: int | None, remove: bool, connection: Connection) -> Outcome:
    """Set when a checkpoint expires.

    Give one of --ttl and --remove.
    """
    if (ttl is None) == (not remove):
        raise click.UsageError("give one of --ttl SECONDS and --remove")
    with connection.rest() as rest:
        wait(rest.set_checkpoint_ttl_from_tinker_path(path, ttl))
    data = {
        "command": "checkpoint set-ttl",
        "action": "set_ttl",
        "path": path,
        "ttl_seconds": ttl,
        "remove": remove,
    }
    line = f"Removed the expiry of {path}" if remove else f"Updated {path}: it expires in {ttl} s"
    return Outcome(data, show=line)


# ── deleting ──────────────────────────────────────────────────────────────────────────────────────


@checkpoint.command(short_help="Delete checkpoints for good.")
@path_argument("paths", nargs=-1)
@option("--run-id", "Delete checkpoints of this run, in place of paths.", metavar="RUN")
@option(
    "--type kind",
    "With --run-id: only this type.",
    choices=["training", "sampler", "external"],
)
@option(
    "--before",
    "With --run-id: only those saved before (2026-11-16, or with a time; UTC).",
    metavar="DATE",
    type=click.DateTime(),
)
@option("--after", "With --run-id: only those saved after.", metavar="DATE", type=click.DateTime())
@switch("--yes", "-y", help="Do not ask.")
@reporting
def delete(
    paths: tuple[str, ...],
    run_id: str | None,
    kind: str | None,
    before: dt.datetime | None,
    after: dt.datetime | None,
    yes: bool,
    connection: Connection,
) -> Outcome:
    """Delete checkpoints for good: the PATHS, or those of a run that the options select."""
    if bool(paths) == (run_id is not None):
        raise click.UsageError("give either paths or --run-id")
    if run_id is None and (kind or before or after):
        raise click.UsageError(
            "--type, --before and --after choose among the checkpoints of --run-id"
        )
    with connection.rest() as rest:
        chosen = list(dict.fromkeys(paths))
        if run_id is not None:
            chosen = [
                item.tinker_path
                for item in _of_run(rest, run_id)
                if _fits(item, kind, before, after)
            ]
        if not yes and chosen and not _confirmed(chosen):
            click.echo("Aborted: nothing was deleted.", err=True)
            return Outcome(_deletion("cancelled", chosen, deleted=0, failed=0))
        failures = list(_delete(rest, chosen, wants_json()))
    data = _deletion(
        "delete",
        chosen,
        deleted=len(chosen) - len(failures),
        failed=len(failures),
        failures=failures,
    )
    return Outcome(
        data,
        exit_code=1 if failures else 0,
        show="" if chosen else "There is nothing to delete.",
    )


def _deletion(action: str, paths: Sequence[str], **counts: Any) -> dict[str, Any]:
    return {"command": "checkpoint delete", "action": action, "paths": paths, **counts}


def _fits(
    item: Checkpoint, kind: str | None, before: dt.datetime | None, after: dt.datetime | None
) -> bool:
    return (
        (kind is None or item.checkpoint_type == kind)
        and (before is None or item.time < before.replace(tzinfo=dt.UTC))
        and (after is None or item.time > after.replace(tzinfo=dt.UTC))
    )


def _confirmed(paths: Sequence[str]) -> bool:
    """Ask on stderr, so that stdout holds only the result; no answer means no."""
    click.echo(f"{counted(len(paths), 'checkpoint')} will be deleted for good:", err=True)
    for path in paths:
        click.echo(f"  {path}", err=True)
    click.echo("Delete? [y/N] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        click.echo(err=True)
    return answer.strip().lower() in ("y", "yes")


def _delete(rest: RestClient, paths: Sequence[str], as_json: bool) -> Iterator[dict[str, str]]:
    """Delete a few at a time, report each in order, and yield the failures."""
    from tinkex.errors import TinkerError

    begun: deque[APIFuture[None]] = deque()
    waiting_paths = iter(paths)

    def begin() -> None:
        if (path := next(waiting_paths, None)) is not None:
            begun.append(rest.delete_checkpoint_from_tinker_path(path))

    for _ in range(DELETIONS):
        begin()
    for number, path in enumerate(paths, 1):
        click.echo(f"Deleting {number}/{len(paths)}: {path}", err=as_json)
        try:
            wait(begun.popleft())
        except TinkerError as error:
            click.echo(f"Error: {path} was not deleted: {error}", err=True)
            yield {"path": path, "error": str(error)}
        else:
            click.echo(f"Deleted {path}", err=as_json)
        begin()
