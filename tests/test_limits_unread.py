"""Results that nobody reads: each owner has a budget, and beyond it new work is refused until some
have been read."""

from __future__ import annotations

import threading
from pathlib import Path

from support import pass_json, sample_json
from test_survival import life, played, until
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key
from tinkex.server.server_limits import Limits


def test_owner_with_too_many_unread_results_is_refused_until_they_are_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(unread_bytes=400)) as server:
            keys = {
                name: create_key(server.state.database, name, name)[1] for name in ("ada", "ben")
            }
            samplers = {}
            for name, key in keys.items():
                session = await server.session(key)
                body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
                samplers[name] = (await server.post("create_sampling_session", body, key))[
                    "sampling_session_id"
                ]
            asked = [
                await server.submit(
                    "asample",
                    sample_json(samplers["ada"], number, sampling_params={"max_tokens": 30}),
                    keys["ada"],
                )
                for number in range(2)
            ]
            await until(lambda: server.state.meter.unread["ada"] == 480)
            status, answer = await server.send(
                "asample", sample_json(samplers["ada"], 5), keys["ada"]
            )
            assert status == 429
            assert (
                "480 bytes of results wait to be read, and the limit unread_bytes of this server "
                "is 400" in str(answer)
            )
            await server.run("asample", sample_json(samplers["ben"], 5), keys["ben"])
            await server.result(asked[0], keys["ada"])
            await server.result(asked[0], keys["ada"])  # again makes no more room
            assert server.state.meter.unread["ada"] == 240
            await server.run("asample", sample_json(samplers["ada"], 5), keys["ada"])
            await server.post(
                f"sessions/{samplers['ada'].partition(':')[0]}/finish",
                {"reason": {"type": "success"}},
                keys["ada"],
            )
            assert not server.state.meter.unread

    played(scenario)


def test_passes_count_as_unread_and_are_refused_in_band(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(unread_bytes=10)) as server:
            model = await server.model()
            first = await server.submit("forward_backward", pass_json(model, 1))
            await until(lambda: server.state.meter.unread["local"] == 12)
            refused = await server.run("forward_backward", pass_json(model, 2))
            assert "read results before you ask for more" in refused["error"]
            assert "loss_fn_outputs" in await server.result(first)
            assert "loss_fn_outputs" in await server.run("forward_backward", pass_json(model, 3))

    played(scenario)


def test_results_of_open_samples_count_before_they_finish(tmp_path: Path) -> None:
    """Else thousands that were taken in good time would fill the memory later."""
    engine, opened = FakeEngine(), threading.Event()

    def hold(method: str, subject: str) -> None:
        assert method != "sample_step" or opened.wait(20)

    async def scenario() -> None:
        async with life(tmp_path / "a", engine, limits=Limits(unread_bytes=400)) as server:
            engine.fail = hold
            wanted = {
                "sampling_session_id": None,
                "base_model": "fake",
                "sampling_params": {"max_tokens": 30},
            }
            asked = [
                await server.submit("asample", sample_json("", None, **wanted)) for _ in range(2)
            ]
            status, answer = await server.send("asample", sample_json("", None, **wanted))
            assert status == 429
            assert "0 bytes of results wait to be read and those of open requests may take" in str(
                answer
            )
            opened.set()
            for request in asked:
                await server.result(request)
            assert not +server.state.meter.expected
            await server.run("asample", sample_json("", None, **wanted))

    played(scenario)
