"""Limits on the bytes of requests that arrive or have not ended; 429 beyond."""

from __future__ import annotations

import threading
from pathlib import Path

from support import pass_json
from test_survival import life, played, until
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key
from tinkex.server.server_limits import Limits


def test_owner_beyond_the_byte_limit_must_retry_later(tmp_path: Path) -> None:
    engine, opened = FakeEngine(), threading.Event()

    def hold(method: str, subject: str) -> None:
        assert method != "forward_backward" or opened.wait(20)

    async def scenario() -> None:
        async with life(tmp_path / "a", engine, limits=Limits(held_bytes=1000)) as server:
            keys = {
                name: create_key(server.state.database, name, name)[1] for name in ("ada", "ben")
            }
            ada, ben = [await server.model(key=key) for key in keys.values()]
            engine.fail = hold
            asked, number = [], 0
            while True:
                number += 1
                status, answer = await server.send(
                    "forward_backward", pass_json(ada, number), keys["ada"]
                )
                if status != 200:
                    break
                asked.append(answer["request_id"])
            assert status == 429
            assert "the limit held_bytes is 1000" in str(answer)
            assert 1 <= len(asked) < 20
            assert (await server.send("forward_backward", pass_json(ben, 1), keys["ben"]))[0] == 200
            opened.set()
            for request in asked:
                await server.result(request, keys["ada"])
            assert not server.state.meter.held["ada"]
            assert "metrics" in await server.run(
                "forward_backward", pass_json(ada, number), keys["ada"]
            )

    played(scenario)


def test_single_request_may_exceed_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(held_bytes=1)) as server:
            model = await server.model()
            assert "metrics" in await server.run("forward_backward", pass_json(model, 1))
            await until(lambda: not server.state.meter.held)

    played(scenario)


def test_bodies_count_while_they_arrive(tmp_path: Path) -> None:
    """Many slow uploads must not take more memory together than the limit."""

    async def scenario() -> None:
        async with life(tmp_path / "a", limits=Limits(held_bytes=1000)) as server:
            model = await server.model()
            server.state.meter.held["local"] = 900
            body = pass_json(model, 1) | {"padding": "x" * 200_000}
            status, answer = await server.send("forward_backward", body)
            assert status == 429
            assert "900 bytes of your other requests" in str(answer)
            assert server.state.meter.held["local"] == 900

    played(scenario)
