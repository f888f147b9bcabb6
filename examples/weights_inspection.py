"""What is known about saved weights: runs, checkpoints, what they hold, where to download them, who
samples them.

Run it:  python examples/weights_inspection.py Settings: TINKER_RUN_ID, TINKER_CHECKPOINT_PATH,
TINKER_SAMPLER_ID (else the newest ones there are, and some are made where there are none),
TINKER_EXPECTED_RANK; where to go: see common.py.
"""

import common

from tinkex import RestClient, ServiceClient


def something_to_look_at(service: ServiceClient) -> str:
    """Save a little run, so that there is something; its rank is 8."""
    client = common.trained_a_little(service, common.base_model())
    client.save_state("to-inspect", ttl_seconds=common.DAY).result()
    return client.save_weights_for_sampler("to-inspect", ttl_seconds=common.DAY).result().path


def main() -> None:
    """Look at everything, from the runs down to one checkpoint."""
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        RestClient(base_url=common.BASE_URL) as rest,
    ):
        path, run_id = common.text("TINKER_CHECKPOINT_PATH"), common.text("TINKER_RUN_ID")
        made = "" if path else something_to_look_at(service)
        path = path or made
        expected = common.whole("TINKER_EXPECTED_RANK", 8 if made else 0)

        common.section("Training runs")
        runs = rest.list_training_runs(limit=10, access_scope="accessible").result().training_runs
        for run in runs:
            print(
                f"- {run.training_run_id}: {run.base_model}, rank {run.lora_rank}, corrupted "
                f"{run.corrupted}"
            )
        common.proof(runs, f"{len(runs)} run(s) listed")

        run_id = run_id or runs[0].training_run_id
        common.section(f"The run {run_id}")
        run = rest.get_training_run(run_id, access_scope="accessible").result()
        print(f"owner {run.model_owner}, last request {run.last_request_time:%Y-%m-%d %H:%M:%S}")
        print(f"last checkpoint {run.last_checkpoint and run.last_checkpoint.tinker_path}")

        common.section("Checkpoints")
        for checkpoint in rest.list_user_checkpoints(limit=10).result().checkpoints:
            print(f"- {checkpoint.tinker_path}")
        print(
            "of the run: "
            f"{[one.checkpoint_id for one in rest.list_checkpoints(run_id).result().checkpoints]}"
        )

        common.section(f"The weights {path}")
        info = rest.get_weights_info_by_tinker_path(path).result()
        print(f"base model {info.base_model}, LoRA {info.is_lora}, rank {info.lora_rank}")
        print(
            f"trained: mlp {info.train_mlp}, attention {info.train_attn}, output layer "
            f"{info.train_unembed}"
        )
        if expected:
            found = info.lora_rank
            print(
                f"rank {'matches' if found == expected else 'mismatch'}: expected {expected}, "
                f"found {found}"
            )
            common.proof(found == expected, f"the rank is {expected}")
        by_path = rest.get_training_run_by_tinker_path(path, access_scope="accessible").result()
        print(f"belongs to the run {by_path.training_run_id}")
        common.proof(f"tinker://{by_path.training_run_id}/" in path, "the path leads to its run")
        archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        print(
            f"archive: {archive.url.partition('?')[0]}?..., good until {archive.expires:%H:%M:%S}"
        )

        common.section("A sampler")
        sampler_id = common.text("TINKER_SAMPLER_ID")
        if not sampler_id and made:
            sampler_id = (
                service.create_sampling_client(model_path=made).result().sampling_session_id
            )
        if sampler_id:
            sampler = rest.get_sampler(sampler_id).result()
            print(f"{sampler.sampler_id}: {sampler.base_model}, weights {sampler.model_path}")
            common.proof(
                not made or sampler.model_path == made, "it samples the weights that were saved"
            )
        else:
            print("none was named in TINKER_SAMPLER_ID")


if __name__ == "__main__":
    common.run(main)
