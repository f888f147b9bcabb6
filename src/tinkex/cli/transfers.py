"""Checkpoints as files: `tinkex checkpoint download`, `export`, `push-hf` and `import`."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from tinkex.cli.options import (
    Connection,
    option,
    path_argument,
    reporting,
    switch,
    wait,
)
from tinkex.cli.output import CommandError, Outcome, reason_of, size, yes_no
from tinkex.cli.progress import Meter, Transfer, transfer

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.hub.downloads import Downloaded

T = TypeVar("T")

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
NOT_PEFT = {"optimizer.safetensors", "optimizer.pt", "checkpoint_complete"}
OUTPUT_LAYERS = {"lm_head", "unembed_tokens"}
ADVICE = (
    "merging it into the weights changes the embeddings as well, and what the model says. Use it "
    "unmerged, or train with --no-train-unembed."
)
TARS = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz"}


def fetch(
    rest: RestClient,
    path: str,
    directory: Path | None,
    *,
    force: bool = False,
    resume: bool = True,
    keep_archive: bool = False,
) -> Downloaded:
    """Download a checkpoint with a progress bar; resume an interrupted download."""
    from tinkex.hub.downloads import DownloadError, download_async

    try:
        return _downloading(
            path,
            lambda meter: download_async(
                rest, path, directory, force, meter, resume=resume, keep_archive=keep_archive
            ),
        )
    except DownloadError as error:
        if error.reason == "exists":
            raise CommandError(f"{error.message}: --force replaces it", error) from None
        raise


def _downloading(path: str, begin: Callable[[Transfer], Coroutine[Any, Any, T]]) -> T:
    """Wait for a download with a progress bar; an interrupted one first writes what it fetched."""
    from tinkex.client.futures.api_future import start
    from tinkex.hub.downloads import STOP_SECONDS

    ended = threading.Event()

    async def work(meter: Transfer) -> T:
        try:
            return await begin(meter)
        finally:
            ended.set()

    with transfer(f"Downloading {path.rpartition('/')[2][:30]}") as meter:
        try:
            return wait(start(work(meter)))
        except KeyboardInterrupt:
            ended.wait(STOP_SECONDS)
            raise


@click.command()
@path_argument()
@option(
    "-o --output",
    "Parent directory of the new one.  [default: here]",
    type=click.Path(file_okay=False, path_type=Path),
)
@switch("--force", help="Replace an existing directory once the new one is complete.")
@reporting
def download(path: str, output: Path | None, force: bool, connection: Connection) -> Outcome:
    """Fetch a checkpoint's files into a directory named after it.

    An interrupted download keeps what it fetched; the next one of the same checkpoint resumes it.
    """
    with connection.rest() as rest:
        done = fetch(rest, path, output, force=force)
    data = {"path": path, "destination": str(done.destination)}
    if (warning := warn_of_files(done.destination)) is not None:
        data["warning"] = warning
    return Outcome(data, done, show=f"Downloaded to {done.destination}")


# ── for other libraries ───────────────────────────────────────────────────────────────────────────


@click.command(short_help="Write an adapter for PEFT and transformers.")
@path_argument()
@option(
    "-o --output",
    "A directory, or a file that ends in .tar, .tar.gz, .tgz or .zip.",
    required=True,
    type=click.Path(path_type=Path),
)
@option(
    "--base-model",
    "Base model to name in the adapter: a hub id or a directory.",
    metavar="NAME",
)
@switch("--force", help="Replace an existing file or directory.")
@reporting
def export(
    path: str, output: Path, base_model: str | None, force: bool, connection: Connection
) -> Outcome:
    """Write a checkpoint's adapter for PEFT and transformers: a directory, or an archive of one.

    Files that only training needs, such as the optimizer's state, are left out.
    """
    output = output.expanduser().absolute()
    pack = _packer(output)
    if os.path.lexists(output) and not force:
        raise CommandError(f"{output} already exists: --force replaces it")
    # Beside the output: so that the end is a rename, and an interrupted download is found again.
    scratch = output.with_name(f".{output.name}.export")
    with _scratch(scratch), connection.rest() as rest:
        fetched = fetch(rest, path, scratch, force=True, keep_archive=True).destination
        named = base_model or wait(rest.get_weights_info_by_tinker_path(path)).base_model
        files = _prepare(fetched, path, named)
        warning = warn_of_files(fetched)
        with transfer(f"Writing {output.name}") as meter:
            _replace(pack(fetched, files, scratch / "made", meter), output)
    places = [output / file for file in files] if output.is_dir() else [output]
    written = sum(place.stat().st_size for place in places)
    data = {
        "path": path,
        "destination": str(output),
        "base_model": named,
        "files": files,
        "size_bytes": written,
    }
    if warning is not None:
        data["warning"] = warning
    return Outcome(data, show=f"Exported to {output} ({', '.join(files)}; {size(written)})")


@contextmanager
def _scratch(directory: Path) -> Iterator[None]:
    """Yield a directory to work in; it stays if the next attempt can resume from it."""
    from tinkex.errors import APIError
    from tinkex.hub.downloads import DownloadError

    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except (KeyboardInterrupt, APIError, DownloadError):
        for made in directory.iterdir():
            if made.is_dir() and not made.name.endswith(".partial"):
                shutil.rmtree(made, ignore_errors=True)
            elif made.is_file():
                made.unlink()
        with suppress(OSError):
            directory.rmdir()  # unless there is something in it
        raise
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise CommandError(reason_of(error), error) from None
    except Exception:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory)


def _prepare(directory: Path, path: str, base_model: str) -> list[str]:
    """Check that the files are an adapter's, name its base model, and return the files."""
    config = directory / CONFIG
    if not config.exists() or not any((directory / name).exists() for name in WEIGHTS):
        raise CommandError(
            f"{path} holds no PEFT adapter: {CONFIG} and {WEIGHTS[0]} are not both present"
        )
    try:
        settings = dict(json.loads(config.read_text(encoding="utf-8")))
    except (TypeError, ValueError, RecursionError) as error:
        raise CommandError(f"{CONFIG} of {path} is not a JSON object: {error}", error) from None
    settings["base_model_name_or_path"] = base_model
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return sorted(
        file.name for file in directory.iterdir() if file.is_file() and file.name not in NOT_PEFT
    )


Packer = Callable[[Path, list[str], Path, Meter], Path]


class _Contents:
    """The files of a directory one after the other, with a meter of the bytes read."""

    def __init__(self, directory: Path, files: list[str], meter: Meter) -> None:
        self._directory, self._files, self._meter = directory, files, meter
        self._total = sum((directory / file).stat().st_size for file in files)
        self._done = 0
        self._open: BinaryIO | None = None

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            with (self._directory / file).open("rb") as self._open:
                yield file

    def read(self, size: int = -1) -> bytes:
        assert self._open is not None
        data = self._open.read(size)
        self._done += len(data)
        self._meter(self._done, self._total)
        return data


def _packer(output: Path) -> Packer:
    """Return the function that writes the output, by the ending of its name."""
    name = output.name.lower()
    for ending, mode in TARS.items():
        if name.endswith(ending):
            return lambda directory, files, made, meter: _tar(directory, files, made, meter, mode)
    return _zip if name.endswith(".zip") else _directory


def _tar(directory: Path, files: list[str], made: Path, meter: Meter, mode: Any) -> Path:
    import tarfile

    contents: Any = _Contents(directory, files, meter)
    with tarfile.open(made, mode) as archive:
        for file in contents:
            archive.addfile(archive.gettarinfo(directory / file, file), contents)
    return made


def _zip(directory: Path, files: list[str], made: Path, meter: Meter) -> Path:
    import zipfile

    contents = _Contents(directory, files, meter)
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:  # weights do not get smaller
        for file in contents:
            with archive.open(zipfile.ZipInfo.from_file(directory / file, file), "w") as target:
                shutil.copyfileobj(contents, target, 1 << 20)
    return made


def _directory(directory: Path, files: list[str], made: Path, meter: Meter) -> Path:
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for file in files:
        os.replace(directory / file, made / file)
    return made


def _replace(made: Path, output: Path) -> None:
    if output.is_dir() and not output.is_symlink():
        old = made.with_name("old")
        try:
            os.replace(output, old)
            os.replace(made, output)
        except BaseException:  # the directory that both are in will be emptied
            if old.exists() and not output.exists():
                os.replace(old, output)
            raise
        shutil.rmtree(old)
    else:
        os.replace(made, output)


@click.command("push-hf")
@path_argument()
@option(
    "-r --repo repo_id",
    "The repository.  [default: one named after the model and the run]",
    metavar="ID",
)
@switch("--public", help="Make a new repository public.")
@option("--revision", "The branch; created if missing.", metavar="BRANCH")
@option("--commit-message", "Message of the upload.", metavar="TEXT")
@switch("--create-pr", help="Open a pull request instead.")
@option(
    "--allow-pattern allow_patterns",
    "Only files like this. Repeatable.",
    multiple=True,
    metavar="GLOB",
)
@option(
    "--ignore-pattern ignore_patterns",
    "Skip files like this. Repeatable.",
    multiple=True,
    metavar="GLOB",
)
@option("--hf-token", "The token for the hub (better set HF_TOKEN).", metavar="TOKEN")
@option(
    "--model-card/--no-model-card add_model_card",
    "Write a README.md if there is none.",
    default=True,
)
@reporting
def push_hf(path: str, connection: Connection, **options: Any) -> Outcome:
    """Push a checkpoint's adapter to the Hugging Face hub.

    A push that was stopped or failed keeps its download for a week, and the next one resumes it.
    Files that the hub has already are not sent again.
    """
    from tinkex.hub.pushes import push_checkpoint_adapter_async

    for name in ("allow_patterns", "ignore_patterns"):
        options[name] = list(options[name]) or None
    with connection.rest() as rest:
        pushed = _downloading(
            path,
            lambda meter: push_checkpoint_adapter_async(
                rest,
                path,
                **options,
                progress=meter,
                uploading=lambda: meter.end(f"Uploading {path}"),
                cache_dir=push_cache(),
            ),
        )
    data = {
        "command": "checkpoint push-hf",
        "action": "push_hf",
        "checkpoint_path": path,
        "repo_id": pushed.repo_id,
        "revision": pushed.revision,
        "public": pushed.public,
    }
    if (
        warning := warn_of_tied(pushed.config, pushed.config["base_model_name_or_path"])
    ) is not None:
        data["warning"] = warning
    lines = (
        f"Uploaded {path} to {pushed.repo_id}",
        f"Revision: {pushed.revision}",
        f"Public: {yes_no(pushed.public)}",
    )
    return Outcome(data, pushed, show="\n".join(lines))


def push_cache() -> Path:
    """Return the directory that keeps the download of an interrupted push."""
    from platformdirs import user_cache_path

    return user_cache_path("tinkex") / "push"


# ── bringing in ───────────────────────────────────────────────────────────────────────────────────


@click.command("import", short_help="Make a training checkpoint of a PEFT adapter.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@option(
    "--base-model",
    "Base model of the adapter, by the server's name: a bundled name, a hub id, or NAME=DIR.  "
    "[default: the one that the adapter names]",
    metavar="NAME[=DIR]",
)
@option("--name", "Name of the checkpoint.", default="imported")
@option(
    "--data-dir",
    "The server's data directory; the server may run meanwhile. [default: TINKEX_DATA_DIR]",
    type=click.Path(path_type=Path),
)
def import_(directory: Path, base_model: str | None, name: str, data_dir: Path | None) -> Outcome:
    """Make a training checkpoint of a PEFT adapter in DIRECTORY, and print its path.

    A training client created from that path computes what PEFT computes with the adapter, and
    trains on from it.
    """
    from tinkex.engine.api import EngineError
    from tinkex.engine.torch.kind import require_packages
    from tinkex.local import default_data_dir, resolve_models, unusable

    require_packages()
    from tinkex.server.database.interface import DatabaseError
    from tinkex.server.database.sqlite import SqliteDatabase
    from tinkex.server.files.data_dir import DataDirError
    from tinkex.server.files.imports import import_adapter, read_source

    try:
        named = read_source(directory).base_model or ""
        if base_model is None and (not named or Path(named).is_dir()):
            raise click.UsageError(
                f"the adapter names its base model {named!r}, which is no name that a server has: "
                "give --base-model NAME[=DIR]"
            )
        model, _, place = (base_model or named).partition("=")
        base_directory = resolve_models({model: place})[model]
        root = (data_dir or default_data_dir()).expanduser().resolve()
        root.mkdir(parents=True, exist_ok=True)
        with (
            closing(SqliteDatabase(root)) as database,
            transfer(f"Importing {directory.name}") as meter,
        ):
            saved = import_adapter(database, directory, model, base_directory, name, progress=meter)
    except DataDirError as error:
        raise CommandError(str(unusable(data_dir or default_data_dir(), error)), error) from None
    except (EngineError, OSError, DatabaseError) as error:
        raise CommandError(reason_of(error), error) from None
    click.echo(saved.tinker_path)
    return Outcome({"tinker_path": saved.tinker_path})


# ── adapters of tied output layers ────────────────────────────────────────────────────────────────


def warn_of_files(directory: Path) -> str | None:
    """Warn as `warn_of_tied` does, if the files are an adapter's."""
    settings = _object_in(directory / CONFIG)
    if settings is None:
        return None
    return warn_of_tied(settings, str(settings.get("base_model_name_or_path") or ""))


def warn_of_tied(settings: Mapping[str, Any], base_model: str) -> str | None:
    """Warn if an adapter changes an output layer that is, or may be, tied; return the warning."""
    targets = settings.get("target_modules")
    if not isinstance(targets, list) or not OUTPUT_LAYERS & {
        str(target).rpartition(".")[2] for target in targets
    }:
        return None
    tied = is_tied(base_model)
    if tied is False:
        return None
    told = "the adapter changes the output layer"
    if tied:
        told += f", which {base_model} ties to its embeddings: {ADVICE}"
    else:
        told += (
            ". If the base model ties that to its embeddings (tie_word_embeddings in config.json), "
            f"{ADVICE}"
        )
    click.echo(f"Warning: {told}", err=True)
    return told


def is_tied(base_model: str) -> bool | None:
    """Return True if a base model ties its output layer to its embeddings, None if unknown."""
    from tinkex.engine.families.family import families

    found = _config(base_model)
    if found is None:
        return None
    if (said := found.get("tie_word_embeddings")) is not None:
        return bool(said)
    arch = str(found.get("model_type"))
    if arch in families():
        return families()[arch].tied
    return True if "gemma" in arch else None  # those with images, too


def _config(base_model: str) -> dict[str, Any] | None:
    """Return the configuration of a base model on this machine."""
    if not base_model:
        return None
    from tinkex.tokenizers import BUNDLED

    places = [BUNDLED.get(base_model, Path(base_model)) / "config.json"]
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base_model, "config.json")
        places += [Path(cached)] if isinstance(cached, str) else []
    except (ImportError, ValueError):  # a name that no repository of the hub can have
        pass
    return next((found for place in places if (found := _object_in(place)) is not None), None)


def _object_in(file: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file, or None."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
