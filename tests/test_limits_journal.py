"""The journal of a run: passes without a step do not fill the disk, and a step makes room again."""

from __future__ import annotations

from pathlib import Path

from support import pass_json, step_json
from test_survival import life, played, until
from tinkex.server.server_limits import Limits

LIMIT = 6_000


def test_passes_without_a_step_are_refused_in_band_until_a_step_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(journal_bytes=LIMIT)) as server:
            model, number = await server.model(), 0
            journal = server.state.journals.of_run(model)
            while journal.held_bytes < LIMIT:
                number += 1
                done = await server.run("forward_backward", pass_json(model, number))
                assert "loss_fn_outputs" in done
                assert number < 100
            refused = await server.run("forward_backward", pass_json(model, number + 1))
            assert f"the limit journal_bytes of this server is {LIMIT}" in refused["error"]
            await server.run("optim_step", step_json(model, number + 2))
            await until(lambda: journal.held_bytes < LIMIT // 2)
            assert "loss_fn_outputs" in await server.run(
                "forward_backward", pass_json(model, number + 3)
            )

    played(scenario)


def test_journal_of_an_earlier_life_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a") as server:
            model = await server.model()
            for number in range(1, 6):
                await server.run("forward_backward", pass_json(model, number))
        async with life(tmp_path / "a", limits=Limits(journal_bytes=500)) as server:
            refused = await server.run("forward_backward", pass_json(model, 6))
            refused = await server.run("forward_backward", pass_json(model, 7))
            assert "journal_bytes" in refused["error"]

    played(scenario)
