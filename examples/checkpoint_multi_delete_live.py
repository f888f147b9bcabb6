"""Two checkpoints saved, and deleted by one command.

Run it:  python examples/checkpoint_multi_delete_live.py Where to go: see common.py. The command
line can be called from programs: `tinkex.cli.run` takes the words that a shell would give, and
returns how the command ended.
"""

import common

from tinkex import RestClient, ServiceClient
from tinkex.cli import run

SAVE_SECONDS = 900


def main() -> None:
    """Save twice, delete both."""
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        RestClient(base_url=common.BASE_URL) as rest,
    ):
        client = service.create_lora_training_client(common.base_model(), rank=8).result()
        names = ("multi-delete-1", "multi-delete-2")
        saves = [client.save_state(name, ttl_seconds=common.DAY, overwrite=True) for name in names]
        paths = [save.result(SAVE_SECONDS).path for save in saves]
        for path in paths:
            print(f"saved {path}")
        # multimodal_resume_and_cleanup.py looks there for a checkpoint to resume from, and must not
        # mind a stale one.
        common.CHECKPOINT_CACHE.parent.mkdir(parents=True, exist_ok=True)
        common.CHECKPOINT_CACHE.write_text(paths[0])

        words = ["checkpoint", "delete", *paths, "--yes", *common.connection_options()]
        print(f"tinkex {' '.join(common.masked(words))}")
        result = run(words)
        left = [
            one.tinker_path for one in rest.list_checkpoints(client.model_id).result().checkpoints
        ]
    print(
        f"deleted {result.data['deleted']}, failed {result.data['failed']}"
        if result.data
        else "the command failed"
    )
    common.proof(
        result.ok and result.data["deleted"] == 2 and result.data["failed"] == 0,
        "deleted 2, failed 0",
    )
    common.proof(not set(paths) & set(left), "neither is there any more")


if __name__ == "__main__":
    common.run(main)
