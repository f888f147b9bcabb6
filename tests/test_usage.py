"""What was used and what was done: counted by the hour, kept, and told to whom it concerns."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import tinkex
from support import Keyed, Wire, pass_json, sample_json, serving, step_json
from tinkex.client.rest import AdminClient
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key, revoke_key
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.meter import Meter

Serve = Callable[..., Wire]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda **options: Wire(
            stack.enter_context(serving(FakeEngine(), tmp_path, **options))
        )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteDatabase]:
    with closing(SqliteDatabase(tmp_path)) as opened:
        yield opened


def span(hours: int = 2, back: int = 1) -> str:
    """A query for some hours around now."""
    start = dt.datetime.now(dt.UTC).replace(minute=0, second=0, microsecond=0) - dt.timedelta(
        hours=back
    )
    end = start + dt.timedelta(hours=hours + back)
    return f"starting_on={start:%Y-%m-%dT%H:%M:%SZ}&ending_before={end:%Y-%m-%dT%H:%M:%SZ}"


def used(wire: Wire) -> dict[str, float]:
    """All amounts of the present, by type."""
    amounts: dict[str, float] = {}
    for event in wire.get(f"billing/usage/events?{span()}")["data"]:
        info = event["event_info"]
        amount = info.get("token_count", info.get("count", info.get("gigabyte_hours")))
        amounts[info["type"]] = amounts.get(info["type"], 0) + amount
    return amounts


def work(wire: Wire, **fields: Any) -> str:
    session = str(wire.post("create_session", {"sdk_version": "0.36.0", **fields})["session_id"])
    model = wire.model(session)
    wire.run("forward_backward", pass_json(model, 1, tokens=(1, 2, 3, 4, 5)))
    # the same again is not done again
    wire.run("forward_backward", pass_json(model, 1, tokens=(1, 2, 3, 4, 5)))
    wire.run("optim_step", step_json(model, 2))
    wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 3})
    wire.run(
        "save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 1, "seq_id": 4}
    )
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    # three tokens of prompt, three drawn for each
    wire.run("asample", sample_json(sampler, num_samples=2))
    assert wire.send("stream_sample", sample_json(sampler)).status == 200
    return session


def test_tokens_and_checkpoints_are_counted_by_the_hour(serve: Serve) -> None:
    wire = serve()
    session = work(wire, project_id="p", user_metadata={"team": "a"})
    assert used(wire) == {
        "training": 5,
        "sampling_prefill": 6,
        "sampling_sample": 9,
        "checkpoint": 1,
    }
    answer = wire.get(f"billing/usage/events?{span()}")
    for event in answer["data"]:
        start = dt.datetime.fromisoformat(event["bucket_start"])
        assert start <= dt.datetime.now(dt.UTC) < start + dt.timedelta(hours=1)
        assert dt.datetime.fromisoformat(event["bucket_end"]) - start == dt.timedelta(hours=1)
        assert event["session_id"] == session
        assert (event["base_model"], event["project_id"], event["user_name"]) == (
            "fake",
            "p",
            "local",
        )
        assert event["estimated_cost_usd"] == 0
    assert answer["sessions"] == {session: {"user_metadata": {"team": "a"}}}
    work(wire)
    assert used(wire) == {
        "training": 10,
        "sampling_prefill": 12,
        "sampling_sample": 18,
        "checkpoint": 2,
    }
    assert wire.get(f"billing/usage/events?{span(hours=1, back=30)}")["data"]
    assert (
        wire.get(
            "billing/usage/events?starting_on=2020-01-01T00:00:00Z&"
            "ending_before=2020-01-02T00:00:00Z"
        )["data"]
        == []
    )


def test_failed_work_is_not_counted(serve: Serve) -> None:
    wire = serve()
    model = wire.model()
    bad = pass_json(model, 1)
    bad["forward_backward_input"]["loss_fn"] = "nonsense"
    assert "error" in wire.run("forward_backward", bad)
    assert used(wire) == {}


def test_usage_outlives_the_server(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        work(Wire(url))
    with serving(FakeEngine(), tmp_path) as url:
        assert used(Wire(url))["training"] == 5


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "starting_on is missing"),
        ("starting_on=2026-07-13T00:00:00Z", "ending_before is missing"),
        ("starting_on=yesterday&ending_before=2026-07-14T00:00:00Z", "yesterday"),
        ("starting_on=2026-07-13T00:30:00Z&ending_before=2026-07-14T00:00:00Z", "full hour"),
        ("starting_on=2026-07-13T00:00:00Z&ending_before=2026-07-13T00:00:00Z", "later"),
        ("starting_on=2026-07-13T00:00:00Z&ending_before=2026-07-27T01:00:00Z", "14"),
    ],
)
def test_span_that_cannot_be_accounted_for_is_refused_in_words(
    serve: Serve, query: str, words: str
) -> None:
    heard = serve().send(f"billing/usage/events?{query}", method="GET")
    assert heard.status == 400
    assert words in heard.json["detail"]


def test_room_that_checkpoints_take_is_counted_and_shown(
    serve: Serve, store: SqliteDatabase
) -> None:
    wire = serve()
    model = wire.model()
    wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
    (held,) = wire.get("billing/usage/checkpoints/current")["data"]
    (size,) = store.connection.rows("SELECT size_bytes FROM checkpoints")[0]
    assert (held["checkpoint_count"], held["size_bytes"]) == (1, size)
    assert held["size_gigabytes"] == pytest.approx(size / 1e9)
    assert (held["org_user_urn"], held["estimated_monthly_cost_usd"]) == ("tml:user:local", 0)
    assert wire.get("billing/usage/checkpoints/current?project_id=none")["data"] == []

    async def an_hour() -> None:
        meter = Meter(store)
        meter._weighed -= 3600
        await meter.weigh()
        await meter.flush()

    asyncio.run(an_hour())
    assert used(wire)["storage"] == pytest.approx(size / 1e9, rel=0.01)


def test_failed_usage_write_is_retried(
    store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        meter = Meter(store)
        meter.count("ada", "s", "m", "training", 5)
        meter.audit("ada", "save_weights", tinker_path="tinker://a/weights/b")
        meter.span("s", "s:train:0:1", "forward", time.time(), None)

        def broken(*_: object) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(store.activity, "add", broken)
            with pytest.raises(OSError, match="full"):
                await meter.flush()
        meter.count("ada", "s", "m", "training", 2)
        await meter.flush()
        await meter.flush()

    asyncio.run(scenario())
    assert [row["amount"] for row in store.connection.rows("SELECT amount FROM usage")] == [7]
    assert (
        len(store.connection.rows("SELECT * FROM audit"))
        == len(store.connection.rows("SELECT * FROM spans"))
        == 1
    )


# ── audit ─────────────────────────────────────────────────────────────────────────────────────────


def test_audit_log_records_changes_of_checkpoints(serve: Serve) -> None:
    wire = serve()
    model = wire.session() and wire.model()
    path = wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})["path"]
    wire.run("load_weights", {"model_id": model, "path": path, "seq_id": 2, "optimizer": True})
    gone = path.replace("/a", "/gone")
    wire.run("load_weights", {"model_id": model, "path": gone, "seq_id": 3, "optimizer": True})
    wire.run(
        "save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 0, "seq_id": 4}
    )
    entries = wire.get("audit?event_type=checkpoints")["entries"]
    assert [(entry["event"], entry["tinker_path"]) for entry in entries] == [
        ("checkpoint_saved", path),
        ("checkpoint_loaded", path),
    ]
    assert entries[0]["model_id"] == model
    assert entries[0]["event_details"]["owner"] == "local"
    assert wire.get("audit?event_type=projects")["entries"] == []
    assert wire.get("audit?day=2020-01-01")["entries"] == []
    for query in ("event_type=nonsense", "day=nonsense"):
        assert wire.send(f"audit?{query}", method="GET").status == 400


def test_operator_sees_all_accounts_and_users_only_their_own(
    serve: Serve, store: SqliteDatabase
) -> None:
    number, key = create_key(store, "k", "ada")
    _, other = create_key(store, "k", "bob")
    operator = Keyed(serve(api_key="tml-operator").url, "tml-operator")
    ada, bob = Keyed(operator.url, key), Keyed(operator.url, other)
    work(ada)
    assert used(bob) == {}
    assert used(ada) == used(operator) != {}
    assert len(operator.get("billing/usage/checkpoints/current")["data"]) == 1
    revoke_key(store, number)
    with AdminClient(base_url=operator.url, api_key="tml-operator") as admin:
        entries = admin.get_audit_log("organizations").result(10).entries
        assert [entry.event for entry in entries] == [
            "api_key_created",
            "api_key_created",
            "api_key_revoked",
        ]
        assert entries[2].event_details == {"owner": "ada", "key_id": number, "name": "k"}
        start = dt.datetime.now(dt.UTC).replace(minute=0, second=0, microsecond=0)
        events = admin.get_billing_usage(start, start + dt.timedelta(hours=2)).result(10).data
        assert {event.user_id for event in events} == {"tml:user:ada"}
        assert tinkex.types.TrainingBillingEvent(token_count=5) in [
            event.event_info for event in events
        ]
