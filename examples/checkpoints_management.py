"""Checkpoints: the first few, then all of them page by page, and those of one run.

Run it:  python examples/checkpoints_management.py
Settings: TINKER_RUN_ID, a run whose checkpoints to list; where to go: see common.py.
"""

import common

from tinkex import Checkpoint, RestClient, ServiceClient

PAGE = 50


def show(checkpoint: Checkpoint) -> None:
    """Print one checkpoint."""
    size = "unknown size" if checkpoint.size_bytes is None else f"{checkpoint.size_bytes:,} bytes"
    expires = (
        "never" if checkpoint.expires_at is None else f"{checkpoint.expires_at:%Y-%m-%d %H:%M}"
    )
    print(f"- {checkpoint.checkpoint_id}\n  path    {checkpoint.tinker_path}")
    print(f"  type    {checkpoint.checkpoint_type}, {size}, public {checkpoint.public}")
    print(f"  created {checkpoint.time:%Y-%m-%d %H:%M}, expires {expires}")


def main() -> None:
    """List in three ways."""
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        RestClient(base_url=common.BASE_URL) as rest,
    ):
        if not rest.list_user_checkpoints(limit=1).result().checkpoints:
            print("there are no checkpoints yet: saving one")
            client = service.create_lora_training_client(common.base_model(), rank=8).result()
            client.save_state("something-to-list", ttl_seconds=common.DAY).result()

        common.section("The first 20")
        for checkpoint in rest.list_user_checkpoints(limit=20).result().checkpoints:
            show(checkpoint)

        common.section(f"All, in pages of {PAGE}")
        found: list[Checkpoint] = []
        while True:
            page = rest.list_user_checkpoints(limit=PAGE, offset=len(found)).result()
            found += page.checkpoints
            total = page.cursor.total_count if page.cursor is not None else len(found)
            print(f"{len(page.checkpoints)} checkpoint(s); {len(found)} of {total}")
            if not page.checkpoints or len(found) >= total:
                break
        common.proof(len(found) == total, f"the pages add up to the total: {total}")

        run_id = common.text("TINKER_RUN_ID") or found[0].training_run_id
        common.section(f"Of the run {run_id}")
        listed = rest.list_checkpoints(run_id).result().checkpoints
        for checkpoint in listed:
            show(checkpoint)
        common.proof(
            all(one.training_run_id == run_id for one in listed), "all of them are this run's"
        )


if __name__ == "__main__":
    common.run(main)
