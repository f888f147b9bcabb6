"""Sessions: list them, and see what belongs to one.

Run it:  python examples/sessions_management.py
Where to go: see common.py.
"""

import common

from tinkex import RestClient, ServiceClient


def main() -> None:
    """Open a session with a run and a sampler in it, then look at what there is."""
    # A RestClient looks things up and opens no session of its own.
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        RestClient(base_url=common.BASE_URL) as rest,
    ):
        model = common.base_model()
        trainer = service.create_lora_training_client(model, rank=8).result()
        sampler = service.create_sampling_client(base_model=model).result()

        common.section("Sessions")
        sessions = rest.list_sessions(limit=10, access_scope="accessible").result().sessions
        for number, session_id in enumerate(sessions, 1):
            print(f"{number:2d}. {session_id}")
        common.proof(0 < len(sessions) <= 10, f"{len(sessions)} session(s) listed, 10 at most")

        common.section(f"The first of them: {sessions[0]}")
        details = rest.get_session(sessions[0], access_scope="accessible").result()
        print(f"training runs: {len(details.training_run_ids)} {details.training_run_ids}")
        print(f"samplers:      {len(details.sampler_ids)} {details.sampler_ids}")
        ours = (
            trainer.model_id in details.training_run_ids
            and sampler.sampling_session_id in details.sampler_ids
        )
        # others may have opened one since, where there are others
        newest = f"{sessions[0]}:" in trainer.model_id
        common.proof(ours or not newest, "its run and its sampler are listed")


if __name__ == "__main__":
    common.run(main)
