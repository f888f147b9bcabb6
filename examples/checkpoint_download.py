"""A checkpoint on your own disk: found or made, downloaded with progress, unpacked.

Run it:  python examples/checkpoint_download.py Settings: TINKER_CHECKPOINT_PATH (else the first
that can be downloaded; one is made where there is none), TINKER_OUTPUT_DIR (a directory for
temporary files), FORCE=true (replace what is there), TINKEX_DEBUG=1 (more words); where to go: see
common.py.
"""

import tempfile
import time
from pathlib import Path

import common

from tinkex import APIStatusError, DownloadError, RestClient, ServiceClient, download, types

OUTPUT = Path(
    common.text("TINKER_OUTPUT_DIR", str(Path(tempfile.gettempdir()) / "tinkex_checkpoints"))
)
PAGE, PAGES = 10, 3
GONE = (400, 403, 404)
"""How a server says that a checkpoint cannot be had; then the next one is tried."""


def debug(said: str) -> None:
    """Print a line for those who asked for more."""
    if common.flag("TINKEX_DEBUG"):
        print(f"[debug] {said}")


def can_be_fetched(rest: RestClient, path: str, tries: int, pause: float = 2.0) -> bool:
    """Whether the server has an archive of a checkpoint; one that is being packed is given a little
    time.
    """
    for attempt in range(1, tries + 1):
        try:
            rest.get_checkpoint_archive_url_from_tinker_path(path, max_retries=1).result()
            return True
        except APIStatusError as error:
            debug(f"{path}: {error.format()} (attempt {attempt})")
            if error.status_code in GONE:
                return False
        if attempt < tries:
            time.sleep(pause)
    return False


def first_listed(rest: RestClient) -> str | None:
    """The first checkpoint that can be downloaded, among the first few pages."""
    for offset in range(0, PAGE * PAGES, PAGE):
        page = rest.list_user_checkpoints(limit=PAGE, offset=offset).result().checkpoints
        for checkpoint in page:
            if can_be_fetched(rest, checkpoint.tinker_path, tries=3):
                return checkpoint.tinker_path
        if len(page) < PAGE:
            break
    return None


def new_checkpoint(rest: RestClient) -> str:
    """Train one step and save it."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        client = common.trained_a_little(service, common.base_model())
        path = client.save_weights_for_sampler("to-download", ttl_seconds=common.DAY).result().path
    if not can_be_fetched(rest, path, tries=6):
        common.fail(f"{path} was saved, and cannot be downloaded")
    return path


def show_progress(done: int, total: int) -> None:
    """Print how far it is, at every quarter."""
    if done >= total or done * 4 // total != max(done - (1 << 20), 0) * 4 // total:
        print(f"  {done * 100 // total:3d} % of {total:,} bytes")


def main() -> None:
    """Find or make a checkpoint, fetch it, and look at its files."""
    with RestClient(base_url=common.BASE_URL) as rest:
        path = common.text("TINKER_CHECKPOINT_PATH")
        if path:
            try:
                types.ParsedCheckpointTinkerPath.from_tinker_path(path)
            except ValueError as error:
                common.fail(f"TINKER_CHECKPOINT_PATH: {error}")
        else:
            path = first_listed(rest) or ""
            print(
                f"the first that can be downloaded: {path}"
                if path
                else "nothing to download: making a checkpoint"
            )
            path = path or new_checkpoint(rest)
        print(f"downloading {path} into {OUTPUT}")
        OUTPUT.mkdir(parents=True, exist_ok=True)
        try:
            fetched = download(
                rest, path, OUTPUT, force=common.flag("FORCE"), progress=show_progress
            )
        except DownloadError as error:
            if error.reason != "exists":
                raise
            print(
                "it already exists; FORCE=true would replace it. Fetching it beside that one "
                "instead"
            )
            beside = Path(tempfile.mkdtemp(prefix="again-", dir=OUTPUT))
            fetched = download(rest, path, beside, progress=show_progress)

    print(f"directory: {fetched.destination}")
    files = {file.name: file.stat().st_size for file in sorted(fetched.destination.iterdir())}
    for name, size in files.items():
        print(f"  {name}: {size:,} bytes")
    # The hosted service adds an empty file, checkpoint_complete.
    common.proof(
        {"adapter_config.json", "adapter_model.safetensors"} <= files.keys(),
        "the adapter and its settings are there",
    )
    common.proof(
        all(size for name, size in files.items() if name != "checkpoint_complete"),
        "none of them is empty",
    )


if __name__ == "__main__":
    common.run(main)
