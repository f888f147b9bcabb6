"""Examples of every operation: all that the tests ask for when there is a new one.

A new operation has a row in each of these tables that applies to it:

- `MINIMAL_ANSWERS`, and `MINIMAL_RESULTS` if it answers with a future: the least it may answer.
- `requests`: a request that a server answers well, and in `GIVES` the answer if it is always the
  same.
- `GOOD`, if it has a body: one with many fields, which is broken in every place.
- `foreign`, if it names objects with an owner: requests that name another owner's.
- `CASES` or `ADMIN_CASES`, if RestClient or AdminClient calls it: what is sent, and what it gives.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import tinkex
from schemas import Json
from support import Wire, pass_json, sample_json, step_json
from tinkex import types
from tinkex.engine.base_models import read_tokenizer
from tinkex.engine.fake import FakeEngine
from tinkex.tokenizers import BUNDLED

TINY = "tinkex/tiny"
BASE_MODELS = [
    replace(model, tokenizer=cache(partial(read_tokenizer, TINY, BUNDLED[TINY])))
    for model in FakeEngine().models()
]
"""The base model of the fake engine, with a tokenizer as those of other engines have."""


# ── what servers answer ───────────────────────────────────────────────────────────────────────────


MINIMAL_ANSWERS: dict[str, str] = {
    "client_config": "{}",
    "client_dynamic_config": "{}",
    "create_session": '{"session_id":"sess-1"}',
    "session_heartbeat": "{}",
    "finish_session": "{}",
    "create_model": '{"request_id":"r0"}',
    "get_info": '{"model_data":{"model_name":"Qwen/Qwen3-8B"},"model_id":"sess-1:train:0"}',
    "weights_info": '{"base_model":"Qwen/Qwen3-8B","is_lora":true,"lora_rank":32}',
    "create_sampling_session": '{"sampling_session_id":"sess-1:sample:1"}',
    "get_sampler": '{"sampler_id":"sess-1:sample:0","base_model":"Qwen/Qwen3-8B"}',
    "asample": '{"request_id":"q0","sample_sequence_ids":["q0:0"]}',
    "stream_sample": '{"token_id":5}',
    "get_server_capabilities": '{"supported_models":[{"model_name":"Qwen/Qwen3-8B"}]}',
    "healthz": '{"status":"ok"}',
    "telemetry": '{"status":"accepted"}',
    "retrieve_future": "{}",
    "auth_token": '{"jwt":"eyJ.e30.sig"}',
    "get_api_key": '{"key_id":5}',
    "delete_api_key": "{}",
    "copy_weights": '{"tinker_path":"tinker://new/weights/x"}',
    "join_sampling_session": '{"client_counter":7}',
    "retrieve_futures": '{"completions":[],"cursor":0}',
    "cancel_future": "{}",
    "list_training_runs": '{"training_runs":[],"cursor":{"offset":0,"limit":20,"total_count":0}}',
    "get_training_run": '{"training_run_id":"run-1","base_model":"Q","model_owner":"o",'
    '"is_lora":true,'
    '"last_request_time":"2026-01-01T00:00:00Z"}',
    "list_checkpoints": '{"checkpoints":[]}',
    "list_user_checkpoints": '{"checkpoints":[{"checkpoint_id":"weights/0001",'
    '"checkpoint_type":"training",'
    '"time":"2026-01-01T00:00:00Z","tinker_path":"tinker://run-1/weights/0001"}]}',
    "delete_checkpoint": "{}",
    "publish_checkpoint": "{}",
    "unpublish_checkpoint": "{}",
    "set_checkpoint_ttl": "{}",
    "get_external_weights_urls": '{"urls":{"a.json":"https://x"},"expires":"2099-01-01T00:00:00Z"}',
    "get_checkpoint_archive": '{"url":"https://x","expires":"2099-01-01T00:00:00Z"}',
    "list_sessions": '{"sessions":["sess-1"]}',
    "get_session": '{"training_run_ids":[],"sampler_ids":[]}',
    "assign_session_project": "{}",
    "export_session_trace": '{"status":"pending"}',
    "search_sessions": '{"sessions":[]}',
    "search_checkpoints": '{"checkpoints":[]}',
    "external_weights_upload_start": '{"upload_id":"u","urls":{},"expires":"2099-01-01T00:00:00Z"}',
    "external_weights_upload_finish": '{"tinker_path":"tinker://r/external_weights/x"}',
    "get_billing_usage": '{"data":[]}',
    "get_current_checkpoint_storage_usage": '{"data":[]}',
    "get_audit_log": '{"entries":[]}',
}
MINIMAL_RESULTS: dict[str, str] = {
    "create_model": '{"model_id":"sess-1:train:0"}',
    "unload_model": '{"model_id":"sess-1:train:0"}',
    "drop_gradients": '{"model_id":"sess-1:train:0"}',
    "create_custom_loss": '{"loss_id":"loss-abc"}',
    "optim_step": "{}",
    "save_weights": '{"path":"tinker://sess-1:train:0/weights/s1"}',
    "save_weights_for_sampler": '{"path":"tinker://sess-1:train:0/sampler_weights/w1"}',
    "save_weights_external": '{"path":"tinker://sess-1:train:0/external_weights/e1"}',
    "load_weights": "{}",
}


# ── what clients send ─────────────────────────────────────────────────────────────────────────────


def requests(wire: Wire) -> dict[str, Any]:
    """A minimal request for each operation of a session that is well under way."""
    session = wire.session()
    model = wire.model(session)
    wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
    wire.run("save_weights_for_sampler", {"model_id": model, "path": "a", "seq_id": 2})
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    saved = f"tinker://{model}/weights/a"
    forward = pass_json(model, 4)
    forward["forward_input"] = forward.pop("forward_backward_input")
    return {
        "client_config": {"sdk_version": "0.36.0"},
        "client_dynamic_config": {"sdk_version": "0.36.0"},
        "create_session": {
            "tags": [],
            "user_metadata": {},
            "sdk_version": "0.36.0",
            "type": "create_session",
        },
        "session_heartbeat": {"session_id": session, "type": "session_heartbeat"},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "fake"},
        "get_info": {"model_id": model},
        "forward_backward": pass_json(model, 3),
        "forward": forward,
        "optim_step": step_json(model, 5),
        "create_custom_loss": {
            "session_id": session,
            "custom_loss_seq_id": 0,
            "name": "loss",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"nodes": [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]},
        },
        "save_weights": {"model_id": model, "path": "b", "seq_id": 6},
        "save_weights_for_sampler": {"model_id": model, "sampling_session_seq_id": 1, "seq_id": 7},
        "load_weights": {"model_id": model, "path": saved, "optimizer": True, "seq_id": 8},
        "weights_info": {"tinker_path": saved},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 2,
            "model_path": f"tinker://{model}/sampler_weights/a",
        },
        "get_sampler": sampler,
        "asample": sample_json(sampler),
        "stream_sample": sample_json(sampler),
        "join_sampling_session": {"sampling_session_id": sampler},
        "retrieve_futures": {
            "target": {"type": "sampling_session", "sampling_session_id": sampler},
            "timeout": 0,
        },
        "cancel_future": {"request_id": f"{sampler}:0"},
        "retrieve_future": {"request_id": f"{model}:1"},
        "save_weights_external": {"model_id": model, "path": "a", "seq_id": 9},
        "copy_weights": {"source_path": saved, "destination_project_id": "p"},
        "list_training_runs": None,
        "get_training_run": model,
        "list_checkpoints": model,
        "list_user_checkpoints": None,
        "publish_checkpoint": None,
        "unpublish_checkpoint": None,
        "set_checkpoint_ttl": {"ttl_seconds": 7200},
        "get_external_weights_urls": None,
        "get_checkpoint_archive": None,
        "delete_checkpoint": None,
        "get_server_capabilities": None,
        "healthz": None,
        "telemetry": {"events": [{"event": "SESSION_START"}], "session_id": session},
        "auth_token": {},
        "get_api_key": None,
        "get_session": None,
        "list_sessions": None,
        "search_sessions": {"user_metadata": {}, "owner": {"type": "own"}, "limit": 50},
        "search_checkpoints": {"user_metadata": {}, "owner": {"type": "own"}, "limit": 50},
        "assign_session_project": {"project_id": "p1"},
        "export_session_trace": None,
        "get_billing_usage": None,
        "get_current_checkpoint_storage_usage": None,
        "get_audit_log": None,
        "drop_gradients": {"model_id": model, "seq_id": None},
        "unload_model": {"model_id": model},
        "finish_session": {"reason": {"type": "success"}, "detail": None},
    }


GIVES: dict[str, Any] = {"healthz": {"status": "ok"}}
"""The answers to some of the `requests`."""

PASS = pass_json(
    "@model", None, weights={"data": [1.0, 0.5, 0.0], "dtype": "float32", "shape": [3]}
)
GOOD: dict[str, Json] = {
    "client_config": {"sdk_version": "0.36.0"},
    "client_dynamic_config": {"sdk_version": "0.36.0"},
    "auth_token": {},
    "create_session": {
        "tags": ["a"],
        "user_metadata": {"a": "b"},
        "sdk_version": "0.36.0",
        "display_name": "x",
    },
    "session_heartbeat": {"session_id": "@session"},
    "finish_session": {"reason": {"type": "success"}, "detail": "x"},
    "create_model": {
        "session_id": "@session",
        "model_seq_id": "@number",
        "base_model": "fake",
        "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": {"a": 1},
    },
    "unload_model": {"model_id": "@model"},
    "create_custom_loss": {
        "session_id": "@session",
        "custom_loss_seq_id": "@number",
        "name": "a",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {
            "nodes": [{"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [1]}],
            "format": 1,
        },
    },
    "get_info": {"model_id": "@model"},
    "forward_backward": {**PASS, "forward_only": False},
    "forward": {
        "model_id": "@model",
        "seq_id": None,
        "forward_input": PASS["forward_backward_input"],
    },
    "drop_gradients": {"model_id": "@model", "seq_id": None},
    "optim_step": {
        "model_id": "@model",
        "seq_id": None,
        "adam_params": {"learning_rate": 0.1, "beta1": 0.9},
    },
    "save_weights": {
        "model_id": "@model",
        "path": "@fresh",
        "ttl_seconds": 4000,
        "overwrite": False,
        "user_metadata": {"a": "b"},
    },
    "save_weights_for_sampler": {"model_id": "@model", "path": "@fresh", "ttl_seconds": 4000},
    "save_weights_external": {"model_id": "@model", "path": "@fresh", "ttl_seconds": 4000},
    "load_weights": {"model_id": "@model", "path": "@weights", "optimizer": True},
    "weights_info": {"tinker_path": "@weights"},
    "copy_weights": {"source_path": "@weights", "destination_project_id": "p", "ttl_seconds": 4000},
    "create_sampling_session": {
        "session_id": "@session",
        "sampling_session_seq_id": "@number",
        "model_path": "@samplable",
    },
    "join_sampling_session": {"sampling_session_id": "@sampler"},
    "asample": {
        **sample_json("@sampler", None, prompt_logprobs=True, topk_prompt_logprobs=1),
        "sampling_params": {
            "max_tokens": 2,
            "seed": 1,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "stop": ["a"],
        },
    },
    "stream_sample": sample_json("@sampler", None),
    "retrieve_future": {"request_id": "@request", "allow_metadata_only": True},
    "retrieve_futures": {
        "target": {
            "type": "sampling_session",
            "sampling_session_id": "@sampler",
            "cloned_sampler_id": 0,
        },
        "prev_cursor": 0,
        "timeout": 0.01,
        "retrieved_request_ids": ["@request"],
        "inline_bytes": 1000,
    },
    "cancel_future": {"request_id": "@request"},
    "set_checkpoint_ttl": {"ttl_seconds": 4000},
    "assign_session_project": {"project_id": "p"},
    "search_sessions": {
        "session_id": "@session",
        "project_ids": ["default"],
        "user_metadata": {"a": "b"},
        "owner": {"type": "user", "owner_urns": ["tml:user:local"]},
        "statuses": [{"type": "client_finished", "reasons": ["success"]}],
        "limit": 3,
        "cursor": {"last_created_at": "2026-07-13T00:00:00Z", "last_session_id": "x"},
    },
    "external_weights_upload_start": {
        "base_model": "fake",
        "lora_config": {"rank": 4},
        "destination_project_id": "p",
    },
    "external_weights_upload_finish": {"upload_id": "0" * 32},
    "search_checkpoints": {
        "project_ids": ["default"],
        "user_metadata": {"a": "b"},
        "checkpoint_type": "sampler",
        "owner": {"type": "user", "owner_urns": ["tml:user:local"]},
        "base_models": ["fake"],
        "limit": 3,
        "cursor": {"last_created_at": "2026-07-13T00:00:00Z", "last_checkpoint_uuid": "x"},
    },
    "telemetry": {
        "events": [{"event": "GENERIC_EVENT"}],
        "platform": "x",
        "session_id": "@session",
    },
}


def foreign(name: str, own: dict[str, str], its: dict[str, str]) -> list[Any]:
    """Bodies that name another owner's things; one without a body is given as None."""
    model, session, sampler = its["model"], its["session"], its["sampler"]
    passed = pass_json(model, 9)
    old = {"model_id": model, "seq_id": 9, "forward_input": passed["forward_backward_input"]}
    bodies: dict[str, list[Any]] = {
        "session_heartbeat": [{"session_id": session}],
        "finish_session": [{"reason": {"type": "success"}}],
        "create_model": [{"session_id": session, "model_seq_id": 5, "base_model": "fake"}],
        "unload_model": [{"model_id": model}],
        "get_info": [{"model_id": model}],
        "forward_backward": [passed],
        "forward": [old],
        "optim_step": [step_json(model, 9)],
        "drop_gradients": [{"model_id": model, "seq_id": 9}],
        "save_weights": [{"model_id": model, "path": "z", "seq_id": 9}],
        "save_weights_for_sampler": [{"model_id": model, "path": "z", "seq_id": 9}],
        "save_weights_external": [{"model_id": model, "path": "z", "seq_id": 9}],
        "create_custom_loss": [
            {
                "session_id": session,
                "custom_loss_seq_id": 0,
                "name": "x",
                "inputs": [],
                "graph": {"nodes": []},
            }
        ],
        "load_weights": [
            {"model_id": model, "path": own["saved"], "seq_id": 9, "optimizer": True},
            {"session_id": session, "model_seq_id": 6, "path": own["saved"], "optimizer": True},
        ],
        "weights_info": [{"tinker_path": its["saved"]}],
        "create_sampling_session": [
            {"session_id": session, "sampling_session_seq_id": 7, "base_model": "fake"}
        ],
        "join_sampling_session": [{"sampling_session_id": sampler}],
        "asample": [sample_json(sampler)],
        "stream_sample": [sample_json(sampler)],
        "retrieve_future": [{"request_id": its["request"]}, {"request_id": its["drawn"]}],
        "retrieve_futures": [
            {"target": {"type": "sampling_session", "sampling_session_id": sampler}, "timeout": 0}
        ],
        "cancel_future": [{"request_id": its["drawn"]}],
        "assign_session_project": [{"project_id": "mine"}],
        "set_checkpoint_ttl": [{"ttl_seconds": 7200}],
        "copy_weights": [{"source_path": its["saved"], "destination_project_id": "mine"}],
        "search_sessions": [{"session_id": session}],
        "telemetry": [{"session_id": session, "events": [], "platform": "x", "sdk_version": "x"}],
        "external_weights_upload_finish": [{"upload_id": "0" * 32}],
    }
    return bodies.get(name, [None])


# ── calls of RestClient and AdminClient ───────────────────────────────────────────────────────────


RUN = "sess-1:train:0"
PATH = f"tinker://{RUN}/weights/0001"
EXPORT = f"tinker://{RUN}/external_weights/e1"
NEW_YEAR = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
CHECKPOINT = {
    "checkpoint_id": "weights/0001",
    "checkpoint_type": "training",
    "time": "2026-01-01T00:00:00Z",
    "tinker_path": PATH,
}
TRAINING_RUN = {
    "training_run_id": RUN,
    "base_model": "Q",
    "model_owner": "o",
    "is_lora": True,
    "last_request_time": "2026-01-01T00:00:00Z",
}
PAGE = {"offset": 0, "limit": 20, "total_count": 0}


@dataclass(frozen=True)
class Case:
    """A call, the request it makes, an answer, and what it gives."""

    name: str
    args: tuple[Any, ...]
    request: str
    """Method, path and query."""
    answer: Any = b""
    gives: Any = None
    body: Any = None
    keywords: dict[str, Any] = field(default_factory=dict)
    admin: bool = False
    warns: type[Warning] | None = None


RUNS = types.TrainingRunsResponse(
    training_runs=[], cursor=types.Cursor(offset=0, limit=20, total_count=0)
)
A_RUN = types.TrainingRun(
    training_run_id=RUN, base_model="Q", model_owner="o", is_lora=True, last_request_time=NEW_YEAR
)
A_CHECKPOINT = types.Checkpoint(
    checkpoint_id="weights/0001", checkpoint_type="training", time=NEW_YEAR, tinker_path=PATH
)
ADDRESS = f"training_runs/{RUN}/checkpoints/weights/0001"
SESSION = types.GetSessionResponse(training_run_ids=[], sampler_ids=[])
SEARCH = types.SessionSearchRequest(
    display_name="x",
    owner=types.AccessibleSearchOwner(),
    statuses=[types.ActiveSessionStatusQuery()],
)
SPAN = ("2026-07-13T00:00:00Z", dt.datetime(2026, 7, 14, tzinfo=dt.UTC))
SPAN_QUERY = "starting_on=2026-07-13T00%3A00%3A00Z&ending_before=2026-07-14T00%3A00%3A00Z"
ADMIN_CASES = [
    Case(
        "get_audit_log",
        (),
        "GET audit?event_type=all",
        {"entries": []},
        types.AuditLogResponse(entries=[]),
    ),
    Case(
        "get_audit_log",
        ("teams", dt.date(2026, 1, 1)),
        "GET audit?event_type=teams&day=2026-01-01",
        {"entries": [{"timestamp": "2026-01-01T00:00:00", "event": "e", "more": 1}]},
        types.AuditLogResponse(entries=[types.AuditLogEntry(timestamp=NEW_YEAR, event="e")]),
    ),
    Case(
        "get_audit_log",
        ("all", dt.datetime(2026, 1, 1, 23)),
        "GET audit?event_type=all&day=2026-01-01",
        {"entries": []},
        types.AuditLogResponse(entries=[]),
    ),
    Case(
        "get_billing_usage",
        SPAN,
        f"GET billing/usage/events?{SPAN_QUERY}",
        {"data": []},
        types.BillingUsageResponse(data=[]),
    ),
    Case(
        "get_billing_usage",
        (dt.datetime(2026, 7, 13), "2026-07-14"),
        f"GET billing/usage/events?{SPAN_QUERY}",
        {"data": []},
        types.BillingUsageResponse(data=[]),
    ),
    Case(
        "get_current_checkpoint_storage_usage",
        (),
        "GET billing/usage/checkpoints/current",
        {"data": []},
        types.CurrentCheckpointStorageUsageResponse(data=[]),
    ),
    Case(
        "get_current_checkpoint_storage_usage",
        ("p&1",),
        "GET billing/usage/checkpoints/current?project_id=p%261",
        {"data": [{"checkpoint_count": 1, "size_bytes": 2, "size_gigabytes": 3}]},
        types.CurrentCheckpointStorageUsageResponse(
            data=[
                types.CurrentCheckpointStorageUsageItem(
                    checkpoint_count=1, size_bytes=2, size_gigabytes=3
                )
            ]
        ),
    ),
]
CASES = [
    Case(
        "get_training_run",
        (RUN,),
        f"GET training_runs/{RUN}?access_scope=owned",
        TRAINING_RUN,
        A_RUN,
    ),
    Case(
        "unload_model",
        (RUN,),
        "POST unload_model",
        {"model_id": RUN},
        types.UnloadModelResponse(model_id=RUN),
        {"model_id": RUN, "type": "unload_model"},
    ),
    Case("get_training_run", ("a/b ?", None), "GET training_runs/a%2Fb%20%3F", TRAINING_RUN, A_RUN),
    Case(
        "get_training_run_by_tinker_path",
        (PATH, "accessible"),
        f"GET training_runs/{RUN}?access_scope=accessible",
        TRAINING_RUN | {"last_checkpoint": CHECKPOINT, "lora_rank": 8},
        A_RUN.model_copy(update={"last_checkpoint": A_CHECKPOINT, "lora_rank": 8}),
    ),
    Case(
        "list_training_runs",
        (),
        "GET training_runs?limit=20&offset=0&access_scope=owned",
        {"training_runs": [], "cursor": PAGE},
        RUNS,
    ),
    Case(
        "list_training_runs",
        (5, 10, "accessible", "p"),
        "GET training_runs?limit=5&offset=10&access_scope=accessible&project_id=p",
        {"training_runs": [], "cursor": PAGE},
        RUNS,
    ),
    Case(
        "get_weights_info_by_tinker_path",
        ("anything",),
        "POST weights_info",
        {"base_model": "Q", "is_lora": True, "lora_rank": 32},
        types.WeightsInfoResponse(base_model="Q", is_lora=True, lora_rank=32),
        {"tinker_path": "anything"},
    ),
    Case(
        "list_checkpoints",
        (RUN,),
        f"GET training_runs/{RUN}/checkpoints",
        {"checkpoints": []},
        types.CheckpointsListResponse(checkpoints=[]),
    ),
    Case(
        "list_user_checkpoints",
        (),
        "GET checkpoints?limit=100&offset=0",
        {"checkpoints": [CHECKPOINT], "cursor": PAGE},
        types.CheckpointsListResponse(checkpoints=[A_CHECKPOINT], cursor=RUNS.cursor),
    ),
    Case(
        "get_external_weights_urls",
        (EXPORT,),
        f"GET training_runs/{RUN}/checkpoints/external_weights/e1/external_weights_urls",
        {"urls": {"a.json": "https://x"}, "expires": "2026-01-01T00:00:00Z"},
        types.ExternalWeightsUrlsResponse(urls={"a.json": "https://x"}, expires=NEW_YEAR),
    ),
    Case(
        "get_checkpoint_archive_url",
        (RUN, "weights/0001"),
        f"GET {ADDRESS}/archive",
        {"url": "https://x", "expires": "2026-01-01T00:00:00Z"},
        types.CheckpointArchiveUrlResponse(url="https://x", expires=NEW_YEAR),
    ),
    Case(
        "get_checkpoint_archive_url_from_tinker_path",
        (PATH,),
        f"GET {ADDRESS}/archive",
        {"url": "https://x", "expires": "2026-01-01T00:00:00Z"},
        types.CheckpointArchiveUrlResponse(url="https://x", expires=NEW_YEAR),
    ),
    Case("delete_checkpoint", (RUN, "weights/0001"), f"DELETE {ADDRESS}"),
    Case("delete_checkpoint", (PATH,), f"DELETE {ADDRESS}"),
    Case(
        "delete_checkpoint_from_tinker_path", (PATH,), f"DELETE {ADDRESS}", b"gone, as you wished"
    ),
    Case("publish_checkpoint", (RUN, "weights/0001"), f"POST {ADDRESS}/publish"),
    Case(
        "publish_checkpoint_from_tinker_path", (PATH,), f"POST {ADDRESS}/publish", {"status": "ok"}
    ),
    Case("unpublish_checkpoint", (RUN, "weights/0001"), f"DELETE {ADDRESS}/publish"),
    Case("unpublish_checkpoint_from_tinker_path", (PATH,), f"DELETE {ADDRESS}/publish"),
    Case(
        "set_checkpoint_ttl_from_tinker_path",
        (PATH, 7200),
        f"PUT {ADDRESS}/ttl",
        body={"ttl_seconds": 7200},
    ),
    Case(
        "set_checkpoint_ttl_from_tinker_path",
        (PATH, None),
        f"PUT {ADDRESS}/ttl",
        body={"ttl_seconds": None},
    ),
    Case(
        "copy_weights",
        ("tinker://a/weights/b", "proj-1"),
        "POST copy_weights",
        {"tinker_path": "tinker://new/weights/x"},
        "tinker://new/weights/x",
        {"destination_project_id": "proj-1", "source_path": "tinker://a/weights/b"},
    ),
    Case(
        "copy_weights",
        ("anything", "proj-1"),
        "POST copy_weights",
        {"tinker_path": "tinker://new/weights/x"},
        "tinker://new/weights/x",
        {"destination_project_id": "proj-1", "source_path": "anything", "ttl_seconds": 3600},
        {"ttl_seconds": 3600, "weights_access_token": "tml-other"},
    ),
    Case(
        "get_session",
        ("sess-1",),
        "GET sessions/sess-1?access_scope=owned",
        {"training_run_ids": [], "sampler_ids": []},
        SESSION,
    ),
    Case(
        "list_sessions",
        (),
        "GET sessions?limit=20&offset=0&access_scope=owned",
        {"sessions": ["sess-1"]},
        types.ListSessionsResponse(sessions=["sess-1"]),
    ),
    Case(
        "list_sessions",
        (1, 2, None),
        "GET sessions?limit=1&offset=2",
        {"sessions": []},
        types.ListSessionsResponse(sessions=[]),
    ),
    Case(
        "assign_session_project",
        ("sess-1", "p1"),
        "PUT sessions/sess-1/project",
        body={"project_id": "p1"},
    ),
    Case(
        "finish_session",
        ("sess-1", "errored", "it broke"),
        "POST sessions/sess-1/finish",
        body={"reason": {"type": "errored"}, "detail": "it broke"},
    ),
    Case(
        "export_session_trace",
        ("sess-1",),
        "GET sessions/sess-1/trace_export",
        {"status": "ready", "url": "https://x"},
        "https://x",
    ),
    Case(
        "search_sessions",
        (SEARCH,),
        "POST sessions/search",
        {"sessions": []},
        types.SessionSearchResponse(sessions=[]),
        {
            "user_metadata": {},
            "display_name": "x",
            "owner": {"type": "accessible"},
            "statuses": [{"type": "active"}],
            "limit": 50,
        },
        warns=tinkex.ExperimentalWarning,
    ),
    Case(
        "get_server_capabilities",
        (),
        "GET get_server_capabilities",
        {"supported_models": [{"model_name": "m"}]},
        types.GetServerCapabilitiesResponse(
            supported_models=[types.SupportedModel(model_name="m")]
        ),
    ),
    Case(
        "get_sampler",
        ("sess-1:sample:0",),
        "GET samplers/sess-1:sample:0",
        {"sampler_id": "sess-1:sample:0", "base_model": "Q"},
        types.GetSamplerResponse(sampler_id="sess-1:sample:0", base_model="Q"),
    ),
    *(replace(case, warns=FutureWarning) for case in ADMIN_CASES),
    *(replace(case, admin=True) for case in ADMIN_CASES),
]
WITHOUT_TWIN = {
    "get_server_capabilities",
    "get_weights_info_by_tinker_path",
    "search_sessions",
    "unload_model",
}
