"""Our types beside those of the official package: the same fields, defaults, JSON and protobuf for
the same values.

The official package is imported in a process of its own, once, which goes on to answer questions.
The functions below make the same values from either package; further values are drawn from the
schemas that the official types have.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from tinkex import types
from tinkex.engine.losses.table import LOSSES
from tinkex.types.record import Record, to_builtins
from tinkex.wire import codec

# Where ours differs on purpose. Every one of them accepts all that the official type accepts.
OPTIONAL_HERE = {
    ("CreateSessionRequest", "sdk_version"): "older clients leave it out",
    ("CreateSessionRequest", "tags"): "older clients leave them out",
    ("CreateSessionRequest", "user_metadata"): "may be absent",
    (
        "ForwardBackwardRequest",
        "forward_only",
    ): "an argument of the official call, not of its message",
    ("GenericEvent", "event"): "follows from the class",
    ("GenericEvent", "severity"): "usual for the class",
    ("ModelInput", "chunks"): "an empty input needs none",
    ("OptimStepRequest", "adam_params"): "another name of optim_params",
    ("OptimStepRequest", "optim_params"): "one of three names is needed",
    ("OptimStepRequest", "optimizer_params"): "another name of optim_params",
    ("RequestFailedResponse", "category"): "a failure of unknown kind",
    ("SampledSequence", "sequence_id"): "samples of older servers have none",
    ("SessionEndEvent", "duration"): "may be unknown",
    ("SessionEndEvent", "event"): "follows from the class",
    ("SessionEndEvent", "severity"): "usual for the class",
    ("SessionStartEvent", "event"): "follows from the class",
    ("SessionStartEvent", "severity"): "usual for the class",
    ("TelemetrySendRequest", "platform"): "older clients leave it out",
    ("TelemetrySendRequest", "process_uuid"): "older clients leave it out",
    ("TelemetrySendRequest", "sdk_version"): "older clients leave it out",
    ("TelemetrySendRequest", "session_id"): "older clients leave it out",
    ("UnhandledExceptionEvent", "event"): "follows from the class",
    ("UnhandledExceptionEvent", "severity"): "usual for the class",
}
EXTRA_HERE = {
    "Checkpoint": {"base_model"},  # of SDK 0.39
    "ClientConfigResponse": {
        "batched_results",
        "create_model_via_load_weights",
        "fwd_via_fwdbwd",
        "proto_write_fwdbwd",
    },
    "TrainingRun": {"loaded"},
    "FutureFailed": {"content_type", "inline_size"},
    "FutureFinished": {"content_type", "inline_size"},
    "FuturesRetrieveRequest": {"inline_bytes"},
    "ForwardBackwardRequest": {"forward_only"},
    "OptimStepRequest": {"adam_params", "optimizer_params"},
    "SampledSequence": {"weights_versions_np"},
    "SamplingParams": {
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
    },
}
CLASSES = [
    "AccessibleSearchOwner",
    "ActiveSessionStatusQuery",
    "AdamOptimizerConfig",
    "AdamParams",
    "AuditLogEntry",
    "AuditLogResponse",
    "AuthTokenResponse",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CancelledSessionStatusQuery",
    "Checkpoint",
    "CheckpointBillingEvent",
    "CheckpointsListResponse",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishErrored",
    "ClientSessionFinishInterrupted",
    "ClientSessionFinishSuccess",
    "ClientSessionFinished",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CreateModelRequest",
    "CreateModelResponse",
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse",
    "Cursor",
    "CustomLossGraph",
    "CustomLossInput",
    "CustomLossNode",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExternalWeightsUrlsResponse",
    "FailedSessionStatusQuery",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "FutureFailed",
    "FutureFinished",
    "FutureRetrieveRequest",
    "FuturesRetrieveRequest",
    "FuturesRetrieveResponse",
    "GenericEvent",
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "GetInfoRequest",
    "GetInfoResponse",
    "GetSamplerResponse",
    "GetServerCapabilitiesResponse",
    "GetSessionResponse",
    "HealthResponse",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "ListSessionsResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "ModelData",
    "ModelInput",
    "OptimParamsBase",
    "OptimStepRequest",
    "OptimStepResponse",
    "OptimizerConfigBase",
    "OwnSearchOwner",
    "ParsedCheckpointTinkerPath",
    "PromptAltTokens",
    "PromptProvenanceSpan",
    "RequestFailedResponse",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingParams",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "SamplingSessionFuturesTarget",
    "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse",
    "SaveWeightsExternalResponseInternal",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsForSamplerResponseInternal",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "SessionActive",
    "SessionCancelled",
    "SessionEndEvent",
    "SessionFailed",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStartEvent",
    "SessionSummary",
    "StorageBillingEvent",
    "SupportedModel",
    "TelemetryBatch",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "TensorData",
    "TopkLogprobs",
    "TrainingBillingEvent",
    "TrainingRun",
    "TrainingRunsResponse",
    "UnhandledExceptionEvent",
    "UnloadModelRequest",
    "UnloadModelResponse",
    "UntypedAPIFuture",
    "UserSearchOwner",
    "WeightsInfoResponse",
    "WhoamiResponse",
]
LITERALS = [
    "CustomLossInputRank",
    "EventType",
    "LossFnType",
    "Severity",
    "StopReason",
    "TensorDtype",
]
ALIASES = [
    "FutureRetrieveResponse",
    "LossFnInputs",
    "LossFnOutput",
    "ModelID",
    "ModelInputChunk",
    "OptimParams",
]
ALIASES += ["OptimizerConfig", "ProvenanceSpans", "RequestID", "TelemetryEvent"]


def messages(types: Any, np: Any, torch: Any) -> dict[str, Any]:
    """Messages that have a JSON form."""
    import datetime

    when = datetime.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=datetime.UTC)
    event = {"event_id": "e", "event_session_index": 3, "timestamp": when}
    tokens = types.ModelInput.from_ints([1, 2, 3])
    image = types.ImageChunk(data=b"\x00\xff", format="png")
    node = types.CustomLossNode(
        op="call_function", name="n", target="torch.exp", args=[{"ref": "x"}]
    )
    graph = types.CustomLossGraph(nodes=[node])
    unknown = types.AdamOptimizerConfig.__mro__[1]
    return {
        "adam": types.AdamParams(learning_rate=1, beta1=0),
        "adam config": types.AdamOptimizerConfig(),
        "dimuon": types.DimuonParams(learning_rate=1),
        "dimuon config": types.DimuonOptimizerConfig(),
        "unknown optimizer": unknown(type="sgd", momentum=0.5, nested={"a": [1]}),
        "unknown parameters": types.DimuonParams.__mro__[1](type="sgd", momentum=0.5),
        "step": types.OptimStepRequest(optim_params=types.AdamParams(), model_id="m"),
        "step of adam_params": types.OptimStepRequest(
            adam_params=types.AdamParams(eps=1e-8), model_id="m", seq_id=2
        ),
        "step of a dictionary": types.OptimStepRequest(
            adam_params={"learning_rate": 0.5}, model_id="m"
        ),
        "step of dimuon": types.OptimStepRequest(
            optimizer_params=types.DimuonParams(learning_rate=0.1), model_id="m"
        ),
        "step of dimuon's dictionary": types.OptimStepRequest(
            optim_params={"type": "dimuon", "learning_rate": 0.1, "later": 1}, model_id="m"
        ),
        "step answer": types.OptimStepResponse(metrics={"a:sum": 1.5}),
        "lora": types.LoraConfig(rank=8, seed=None, train_mlp=False),
        "create": types.CreateModelRequest(
            session_id="s",
            model_seq_id=1,
            base_model="b",
            lora_config=types.LoraConfig(rank=4),
            user_metadata={"a": 1},
        ),
        "create with dimuon": types.CreateModelRequest(
            session_id="s",
            model_seq_id=1,
            base_model="b",
            optimizer_config=types.DimuonOptimizerConfig(),
        ),
        "created": types.CreateModelResponse(model_id="m"),
        "info": types.GetInfoResponse(
            model_data=types.ModelData(arch="a", tokenizer_id="t"), model_id="m"
        ),
        "unload": types.UnloadModelRequest(model_id="m"),
        "unloaded": types.UnloadModelResponse(model_id="m", type="unload_model"),
        "future": types.UntypedAPIFuture(request_id="r", sample_sequence_ids=["a", "b"]),
        "params": types.SamplingParams(max_tokens=5, temperature=0, stop=["a", "b"]),
        "params with tokens": types.SamplingParams(seed=1, stop=[1, 2], top_k=4, top_p=0.5),
        "params with a text": types.SamplingParams(stop="x"),
        "params that never stop": types.SamplingParams(stop=[]),
        "sample": types.SampleRequest(
            prompt=tokens,
            sampling_params=types.SamplingParams(),
            num_samples=2,
            sampling_session_id="s",
            seq_id=0,
        ),
        "text": types.EncodedTextChunk(tokens=[5, 6]),
        "tokens": tokens,
        "nothing": types.ModelInput.empty(),
        "mixed": tokens.append(image).append(types.DmelChunk(dmel=b"\x00\x01\x05")).append_int(9),
        "image": image,
        "image of text": types.ImageChunk(data="aGk=", format="jpeg", expected_tokens=3),
        "pointer": types.ImageAssetPointerChunk(format="png", location="there"),
        "audio": types.DmelChunk(dmel="AAEF"),
        "node": node,
        "graph": graph,
        "custom loss": types.CreateCustomLossRequest(
            session_id="s",
            custom_loss_seq_id=0,
            name="f",
            inputs=[types.CustomLossInput(name="logprobs", rank=1)],
            graph=graph,
        ),
        "custom loss answer": types.CreateCustomLossResponse(loss_id="l"),
        "session start": types.SessionStartEvent(event="SESSION_START", severity="INFO", **event),
        "session end": types.SessionEndEvent(
            event="SESSION_END", severity="INFO", duration="PT1S", **event
        ),
        "exception": types.UnhandledExceptionEvent(
            event="UNHANDLED_EXCEPTION",
            severity="ERROR",
            error_type="E",
            error_message="m",
            **event,
        ),
        "batch": types.TelemetryBatch(
            events=[types.SessionStartEvent(event="SESSION_START", severity="DEBUG", **event)],
            platform="p",
            sdk_version="1",
            session_id="s",
            process_uuid="u",
        ),
        "copy": types.AdamParams().model_copy(update={"eps": 0.5}),
        "copy of a step": types.OptimStepRequest(
            optim_params=types.AdamParams(), model_id="m"
        ).model_copy(update={"seq_id": 5, "optim_params": types.DimuonParams(learning_rate=0.5)}),
        "copy of an input": tokens.model_copy(update={"chunks": [image]}),
        "validated": types.SampleRequest.model_validate(
            {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
                "sampling_params": {"top_p": 0.5},
            }
        ),
    }


def passes(types: Any, np: Any, torch: Any) -> dict[str, Any]:
    """Requests that have a protobuf form."""
    prompt, sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    tokens = types.ModelInput.from_ints([1, 2, 3])
    plain = types.Datum(tokens, {"target_tokens": [2, 3, 4], "weights": [0, 0.5, 1]})
    spans = [prompt(sequence_id="a", length=2), sampled(sequence_id="b", offset=4, length=1)]
    media = tokens.append(types.ImageChunk(data=b"png", format="png", expected_tokens=2))
    media = media.append(types.DmelChunk(dmel=b"\x00\x01\x05")).append(
        types.ImageChunk(data=b"", format="jpeg")
    )
    targets, weights = torch.zeros(6, 8, dtype=torch.int64), torch.zeros(6, 8)
    targets[1, 2], targets[5, 7], weights[0, 0], weights[3, 3] = 7, 9, 0.25, float("nan")
    data = {
        "plain": [plain],
        "no data": [],
        "nothing in it": [types.Datum(types.ModelInput.empty(), {})],
        "two": [
            plain,
            types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": np.array([1, 2])}),
        ],
        "media": [types.Datum(media, {"advantages": np.array([1.5, -2], dtype=np.float64)})],
        "spans": [plain.with_provenance(model_input=spans, loss_fn_inputs=spans), plain],
        "no spans": [
            types.Datum(types.ModelInput.empty(), {}, model_input_spans=[], loss_fn_input_spans=[])
        ],
        "sparse": [
            types.Datum(tokens, {"target_tokens": targets, "weights": weights, "mask": weights})
        ],
        "too full for sparse": [
            types.Datum(tokens, {"target_tokens": targets + 1, "weights": weights + 1})
        ],
        "wide": [
            types.Datum(tokens, {"weights": [[1, 2], [3, 4]], "logprobs": torch.tensor([[0.5]])})
        ],
        "half": [types.Datum(tokens, {"weights": torch.tensor([0.5, 1.25], dtype=torch.bfloat16)})],
        "scalar": [types.Datum(tokens, {"weights": torch.tensor(2.5)})],
    }
    generator = np.random.default_rng(0)
    for seed in range(12):
        shape = generator.integers(1, 9, size=2).tolist()
        cells = generator.integers(-3, 4, size=shape) * (generator.random(shape) < 0.3)
        row = generator.integers(0, 1000, size=shape[0])
        data[f"random {seed}"] = [
            types.Datum(
                types.ModelInput.from_ints(row.tolist()),
                {
                    "target_tokens": torch.from_numpy(cells),
                    "weights": torch.from_numpy(cells / 2).float(),
                },
            )
        ]
    config = {"text": "b", "number": 0.5, "whole": 2}
    made = {}
    for name, items in data.items():
        body = types.ForwardBackwardInput(
            data=items, loss_fn="ppo", loss_fn_config=config if items else None
        )
        made[name] = types.ForwardBackwardRequest(
            forward_backward_input=body, model_id="m", seq_id=3
        )
    return made


def readings(types: Any, np: Any, torch: Any) -> dict[str, Any]:
    """Return descriptions of the types, as plain values."""
    Topk = types.SampledSequence.__dataclass_fields__["topk_logprobs_np"] and types.TopkLogprobs
    dense = torch.tensor([[3, 3, 3, 3, 1], [3, 3, 3, 3, 3], [3, 5, 3, 3, 3]])
    sparse = types.TensorData.from_torch_sparse(dense, pad_value=3)
    flat = types.TensorData(data=[1, 2, 3, 4], dtype="float32", shape=[2, 2])
    table = Topk(
        np.array([[4, 5], [6, 0], [0, 0]], np.int32),
        np.array([[-1, -2], [-3, -99999.0], [-99999.0] * 2], np.float32),
    )
    arrays = types.SampledSequence(
        stop_reason="stop", sequence_id="i",
        tokens_np=np.array([1, 2]), logprobs_np=np.array([-0.5, -1.0]),
        topk_logprobs_np=table,
    )  # fmt: skip
    lists = types.SampledSequence(
        stop_reason="length",
        sequence_id="",
        _tokens_list=[3],
        _logprobs_list=[-0.1],
        _topk_logprobs_list=[[(1, -0.1)]],
    )
    answer = types.SampleResponse(
        sequences=[arrays, lists],
        prompt_logprobs_np=np.array([np.nan, -1.5]),
        topk_prompt_logprobs_np=table,
    )
    listed = types.SampleResponse(
        sequences=[],
        _prompt_logprobs_list=[None, -0.1],
        _topk_prompt_logprobs_list=[None, [(1, -0.5)]],
    )
    tokens = types.ModelInput.from_ints([1, 2]).append_int(3)
    output = types.ForwardBackwardOutput("x", [{"logprobs": flat}])
    return {
        "sparse": [
            sparse.data,
            sparse.sparse_crow_indices,
            sparse.sparse_col_indices,
            sparse.shape,
            sparse.dtype,
        ],
        "sparse, dense again": [
            sparse.tolist(),
            sparse.tolist(3),
            sparse.to_numpy(pad_value=-1).tolist(),
        ],
        "sparse, in torch": [sparse.to_torch(3).tolist(), str(sparse.to_torch().dtype)],
        "one row": types.TensorData.from_torch_sparse(torch.zeros(5)).shape,
        "flat": [
            flat.data,
            flat.shape,
            flat.tolist(),
            flat.to_torch().tolist(),
            str(flat.to_numpy().dtype),
        ],
        "nothing": [types.TensorData(dtype="int64").data, types.TensorData(dtype="int64").shape],
        "arrays": [
            arrays.tokens,
            arrays.logprobs,
            arrays.topk_logprobs,
            arrays.stop_reason,
            arrays.sequence_id,
        ],
        "lists": [lists.tokens, lists.logprobs, lists.topk_logprobs, lists.tokens_np is None],
        "answer": [
            answer.prompt_logprobs,
            answer.topk_prompt_logprobs,
            answer.prompt_cache_hit_tokens,
        ],
        "answer of lists": [listed.prompt_logprobs, listed.topk_prompt_logprobs],
        "same list": [
            arrays.tokens is arrays.tokens,
            answer.prompt_logprobs is answer.prompt_logprobs,
        ],
        "empty table": Topk(
            np.zeros((2, 0), np.int32), np.zeros((2, 0), np.float32)
        ).token_ids.shape,
        "input": [tokens.length, tokens.to_ints(), sum(c.length for c in tokens.chunks)],
        "equal": [tokens == tokens.model_copy(), types.AdamParams() == types.AdamParams(eps=1.0)],
        "output": [output.metrics, output.loss_fn_outputs[0]["logprobs"].tolist()],
        "span": [types.PromptProvenanceSpan(sequence_id="a", length=0).offset],
        "replaced": __import__("dataclasses").replace(output, metrics={"a": 1.0}).metrics,
    }


def refusals(types: Any, np: Any, torch: Any) -> dict[str, Any]:
    """Calls that raise."""
    tokens = types.ModelInput.from_ints([1, 2])
    datum = types.Datum(tokens, {"target_tokens": [1, 2]})
    span = types.PromptProvenanceSpan(sequence_id="a", length=2)
    short = types.SampledProvenanceSpan(sequence_id="a", length=1)
    return {
        "a negative length": lambda: types.PromptProvenanceSpan(sequence_id="a", length=-1),
        "a negative offset": lambda: types.SampledProvenanceSpan(
            sequence_id="a", length=1, offset=-1
        ),
        "no sequence": lambda: types.SampledProvenanceSpan(sequence_id="", length=1),
        "a span by position": lambda: types.SampledProvenanceSpan("a", 0, 1),
        "one list of spans": lambda: types.Datum(tokens, {}, [span]),
        "no spans at all": lambda: types.Datum(tokens, {}, [1], [1]),
        "spans that are too short": lambda: datum.with_provenance([short], [span]),
        "target spans that are too short": lambda: datum.with_provenance([span], [short]),
        "a span that changes": lambda: setattr(span, "length", 3),
        "a datum that changes": lambda: setattr(datum, "model_input", tokens),
        "parameters that change": lambda: setattr(types.AdamParams(), "eps", 1.0),
        "ragged weights": lambda: types.Datum(tokens, {"weights": [[1], [1, 2]]}),
        "no dtype": lambda: types.TensorData([1]),
        "another dtype": lambda: types.TensorData([1], "int8"),
        "another shape": lambda: types.TensorData([1], "int64", [2]),
        "a fractional pad": lambda: types.TensorData.from_torch_sparse(
            torch.zeros(2, 2, dtype=torch.int64), 0.5
        ),
        "a step without parameters": lambda: types.OptimStepRequest(model_id="m"),
        "a misspelt parameter": lambda: types.AdamParams(lr=1),
        "a misspelt option": lambda: types.SampleRequest(
            prompt=tokens, sampling_params=types.SamplingParams(), n=1
        ),
        "a negative rate": lambda: types.DimuonParams(learning_rate=-1),
        "an infinite rate": lambda: types.DimuonParams(learning_rate=float("inf")),
        "a large beta": lambda: types.DimuonParams(learning_rate=1, beta1=1),
        "a rate of text": lambda: types.DimuonParams(learning_rate="fast"),
        "a second version": lambda: types.DimuonOptimizerConfig(version=2),
        "another optimizer": lambda: types.AdamOptimizerConfig(type="sgd"),
        "an extra": lambda: types.AdamOptimizerConfig(eps=1),
        "an image as tokens": lambda: tokens.append(
            types.ImageChunk(data=b"", format="png")
        ).to_ints(),
        "an image of unknown length": lambda: types.ImageChunk(data=b"", format="png").length,
        "fractional tokens": lambda: types.ModelInput.from_ints([1.5]),
        "a rank of text": lambda: types.LoraConfig(rank="many"),
        "a temperature of text": lambda: types.SamplingParams(temperature="hot"),
    }


def made_pass(types: Any, np: Any, torch: Any, recipe: Any) -> Any:
    """A request for a pass, from plain values."""
    data = []
    for one in recipe["data"]:
        tokens = types.ModelInput.empty()
        for kind, content in one["chunks"]:
            if kind == "text":
                tokens = tokens.append(types.EncodedTextChunk(tokens=content))
            elif kind == "dmel":
                tokens = tokens.append(types.DmelChunk(dmel=bytes(content)))
            else:
                expected = len(content) or None
                tokens = tokens.append(
                    types.ImageChunk(data=bytes(content), format=kind, expected_tokens=expected)
                )
        inputs = {}
        for name, (form, shape, values) in one["inputs"].items():
            if form == "list":
                inputs[name] = values
            elif form == "torch":
                inputs[name] = torch.tensor(values, dtype=torch.float32).reshape(shape)
            else:
                inputs[name] = types.TensorData(data=values, dtype=form, shape=shape)
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    body = types.ForwardBackwardInput(
        data=data, loss_fn=recipe["loss_fn"], loss_fn_config=recipe["config"]
    )
    return types.ForwardBackwardRequest(
        forward_backward_input=body, model_id=recipe["model"], seq_id=recipe["seq"]
    )


REPORT = """
import dataclasses, json, sys
import numpy as np, torch, tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.generic_event import GenericEvent
from tinker.types.optimizer import OptimizerConfigBase, OptimParamsBase
from tinker.types.topk_logprobs import TopkLogprobs
from typing import get_args
for kind in (GenericEvent, OptimizerConfigBase, OptimParamsBase, TopkLogprobs):
    setattr(types, kind.__name__, kind)

def plain(value):
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value

def fields(kind):
    if dataclasses.is_dataclass(kind):
        found = {}
        for field in dataclasses.fields(kind):
            if not field.name.startswith("_"):
                factory = field.default_factory
                required = field.default is dataclasses.MISSING and factory is dataclasses.MISSING
                made = dataclasses.MISSING is factory
                value = None if required else field.default if made else factory()
                found[field.name] = [required, plain(value)]
        return found
    return {
        name: [
            info.is_required(),
            None
            if info.is_required()
            else plain(info.get_default(call_default_factory=True)),
        ]
        for name, info in kind.model_fields.items()
    }

def refused(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None

def proto(request):
    return forward_backward_request_to_proto(request).SerializeToString(deterministic=True).hex()

def dumps(message):
    dumps = message.model_dump_json(), message.model_dump_json(exclude_none=True)
    return [json.loads(text) for text in dumps]

given = types, np, torch
print(json.dumps({
    "version": tinker.__version__,
    "fields": {name: fields(getattr(types, name)) for name in CLASSES},
    "literals": {name: list(get_args(getattr(types, name))) for name in LITERALS},
    "classes": [name for name, kind in vars(types).items() if isinstance(kind, type) and (
        hasattr(kind, "model_fields") or dataclasses.is_dataclass(kind))],
    "aliases": [name for name in ALIASES if hasattr(types, name)],
    "messages": {
        name: [*dumps(m), json.loads(json.dumps(m.model_dump(), default=str))]
        for name, m in messages(*given).items()
    },
    "passes": {
        name: proto(request)
        for name, request in passes(*given).items()
    },
    "schemas": {
        kind.__name__: kind.model_json_schema()
        for kind in (getattr(types, name) for name in CLASSES) if hasattr(kind, "model_fields")
    },
    "readings": readings(*given),
    "refusals": {name: refused(call) for name, call in refusals(*given).items()},
}), flush=True)
for line in sys.stdin:
    name, value = json.loads(line)
    try:
        if name == "pass":
            answer = proto(made_pass(*given, value))
        else:
            answer = dumps(getattr(types, name).model_validate(value))
    except Exception as error:
        answer = {"refused": type(error).__name__}
    print(json.dumps(answer), flush=True)
"""
Ask = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def worker() -> Iterator[subprocess.Popen[str]]:
    """The official package in a process of its own: it says what it makes of the values above, then
    answers."""
    code = "from __future__ import annotations\nfrom typing import Any\n"
    shared = (messages, passes, readings, refusals, made_pass)
    code += "".join(inspect.getsource(function) + "\n" for function in shared)
    code += f"CLASSES, LITERALS, ALIASES = {CLASSES!r}, {LITERALS!r}, {ALIASES!r}\n{REPORT}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture(scope="module")
def official(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the official package's results for all cases."""
    assert worker.stdout is not None
    report: dict[str, Any] = json.loads(worker.stdout.readline())
    return report


@pytest.fixture(scope="module")
def ask(worker: subprocess.Popen[str], official: dict[str, Any]) -> Ask:
    """What the official package makes of one value: its JSON with and without nulls, or its
    protobuf."""

    def question(name: str, value: Any) -> Any:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps([name, value]) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    return question


def fields(kind: type[Any]) -> dict[str, list[Any]]:
    """The fields of one of our types: whether each is required, and its default."""
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        found = {}
        for field in dataclasses.fields(kind):
            if not field.name.startswith("_"):
                required = field.default is missing and field.default_factory is missing
                default: Any = field.default
                if field.default_factory is not missing:
                    default = field.default_factory()
                found[field.name] = [required, None if required else to_builtins(default)]
        return found
    if issubclass(kind, Record):
        found = {}
        for info in msgspec.structs.fields(kind):
            made = (
                info.default_factory()
                if info.default_factory is not msgspec.NODEFAULT
                else info.default
            )
            found[info.name] = [info.required, None if info.required else to_builtins(made)]
        return found
    found = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            required = parameter.default is inspect.Parameter.empty
            found[name] = [required, None if required else to_builtins(parameter.default)]
    return found


@pytest.mark.covers("24.types.2", "4.2/3")
@pytest.mark.parametrize("name", CLASSES)
def test_fields_and_defaults_are_the_same(official: dict[str, Any], name: str) -> None:
    theirs = official["fields"][name]
    ours = fields(getattr(types, name))
    assert ours.keys() - theirs.keys() == EXTRA_HERE.get(name, set()) | (
        {"data"} if name == "TensorData" else set()
    )
    assert theirs.keys() <= ours.keys()
    assert {field for kind, field in OPTIONAL_HERE if kind == name} <= ours.keys()
    for field, (required, default) in theirs.items():
        if (name, field) in OPTIONAL_HERE:
            assert not ours[field][0]
        elif not (
            name == "TensorData" and field == "dtype"
        ):  # checked when it is called, as theirs is
            assert ours[field] == [required, default], field


def test_no_class_is_missing(official: dict[str, Any]) -> None:
    assert sorted(official["classes"]) == sorted(CLASSES)
    assert not [name for name in CLASSES if name not in types.__all__]


@pytest.mark.parametrize("name", LITERALS)
def test_literals_are_the_same(official: dict[str, Any], name: str) -> None:
    """But for losses that are tinkex's own, which say so in the table."""
    known = official["literals"][name]
    own = {loss for loss, row in LOSSES.items() if row.own_form and loss not in known}
    assert [value for value in get_args(getattr(types, name)) if value not in own] == known


def test_aliases_exist(official: dict[str, Any]) -> None:
    assert official["aliases"] == ALIASES
    assert not [name for name in ALIASES if name not in types.__all__]


@pytest.mark.parametrize("name", messages(types, np, torch))
def test_json_is_the_same(official: dict[str, Any], name: str) -> None:
    message = messages(types, np, torch)[name]
    full, sent, _ = official["messages"][name]
    assert json.loads(message.model_dump_json()) == full
    assert json.loads(message.model_dump_json(exclude_none=True)) == sent
    assert json.loads(codec.encode(message).data) == sent
    assert type(message).model_validate(message.model_dump()) == message
    assert type(message).model_validate_json(message.model_dump_json()) == message


@pytest.mark.parametrize("name", messages(types, np, torch))
def test_dictionaries_are_the_same(official: dict[str, Any], name: str) -> None:
    message = messages(types, np, torch)[name]
    assert (
        json.loads(json.dumps(message.model_dump(), default=str)) == official["messages"][name][2]
    )


@pytest.mark.parametrize("name", passes(types, np, torch))
def test_protobuf_is_the_same(official: dict[str, Any], name: str) -> None:
    request = passes(types, np, torch)[name]
    body = codec.encode(request)
    assert body.data.hex() == official["passes"][name]
    back = codec.decode(types.ForwardBackwardRequest, body.data, body.content_type)
    if name != "scalar":  # reads back as one number in a row
        assert codec.encode(back).data == body.data


@pytest.mark.parametrize("name", readings(types, np, torch))
def test_readings_are_the_same(official: dict[str, Any], name: str) -> None:
    assert json.loads(json.dumps(readings(types, np, torch)[name])) == official["readings"][name]


@pytest.mark.parametrize("name", refusals(types, np, torch))
def test_both_packages_refuse_the_same_values(official: dict[str, Any], name: str) -> None:
    assert official["refusals"][name] is not None
    with pytest.raises((ValueError, TypeError, AttributeError)):
        refusals(types, np, torch)[name]()


# ── values that are drawn ─────────────────────────────────────────────────────────────────────────

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5)
WHOLE = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9)
REAL = st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9)
TIMES = st.sampled_from(
    ["2026-07-13T00:00:00Z", "2026-01-02T03:04:05.678000Z", "2025-12-31T23:59:59.000001+02:00"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | TEXT, lambda inner: st.lists(inner, max_size=2)
)
IMAGES = st.sampled_from(["", "AAAA", "iVBORw0KGgo="])
# What no schema says and a message always does, or what no server takes and ours refuse at once.
MEANT: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("DmelChunk", "dmel"): IMAGES,
    ("EncodedTextChunk", "tokens"): st.lists(st.integers(0, 2**31 - 1), max_size=3),
    ("GenericEvent", "event"): st.just("GENERIC_EVENT"),
    ("GetBillingUsageRequest", "ending_before"): st.just("2026-07-14T00:00:00Z"),
    ("GetBillingUsageRequest", "starting_on"): st.just("2026-07-13T00:00:00Z"),
    ("ImageChunk", "data"): IMAGES,
    # ours cuts it there
    ("ModelData", "tokenizer_id"): st.none() | TEXT.map(lambda name: name.replace(":", "")),
    ("SampleRequest", "target_prompt_logprobs"): st.sampled_from(
        [None, {"data": [1, -1], "dtype": "int64", "shape": [1, 2]}]
    ),
    ("SamplingParams", "max_tokens"): st.none() | st.integers(0, 2**31),
    ("SamplingParams", "temperature"): st.floats(0, 2),
    ("SamplingParams", "top_k"): st.just(-1) | st.integers(1, 2**31),
    ("SamplingParams", "top_p"): st.floats(0.125, 1),
    ("SessionEndEvent", "event"): st.just("SESSION_END"),
    ("SessionStartEvent", "event"): st.just("SESSION_START"),
    ("UnhandledExceptionEvent", "event"): st.just("UNHANDLED_EXCEPTION"),
}
AS_GIVEN = {"TelemetrySendRequest"}
"""Hands events on as they come, whatever they are: only the official type puts in what was not
given."""
BEYOND = {
    field for name, fields in EXTRA_HERE.items() if name != "OptimStepRequest" for field in fields
}


def drawn(schema: Any, root: Any, owner: str = "", field: str = "") -> st.SearchStrategy[Any]:
    """Values that a schema of the official package allows."""
    if (owner, field) in MEANT:
        return MEANT[owner, field]
    if "$ref" in schema:
        return drawn(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of([drawn(one, root, owner, field) for one in schema[several]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "string":
            return TIMES if schema.get("format") == "date-time" else TEXT
        case "integer":
            return st.integers(schema["minimum"], 99) if "minimum" in schema else WHOLE
        case "number":
            return (
                st.floats(0, 0.875)
                if {"minimum", "exclusiveMinimum", "exclusiveMaximum"} & schema.keys()
                else REAL
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return (
                st.lists(drawn(schema["items"], root), max_size=2)
                if "items" in schema
                else JSON.map(lambda x: [x])
            )
        case "object":
            fields = {
                key: drawn(one, root, schema.get("title", ""), key)
                for key, one in schema.get("properties", {}).items()
            }
            tags = {key for key, one in schema.get("properties", {}).items() if "const" in one}
            needed = {*schema.get("required", ()), *tags}  # by its tag one is told from another
            if not fields:
                rest = schema.get("additionalProperties", True)
                return st.dictionaries(
                    TEXT, JSON if rest is True else drawn(rest, root), max_size=2
                )
            return st.fixed_dictionaries(
                {key: one for key, one in fields.items() if key in needed},
                optional={key: one for key, one in fields.items() if key not in needed},
            )
    return JSON


@pytest.fixture(scope="module")
def kinds(official: dict[str, Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Values of each official type that has a JSON form."""
    schemas = official["schemas"]
    return {name: drawn(schemas[name], schemas[name]) for name in sorted(schemas)}


def check_json(kinds: dict[str, st.SearchStrategy[Any]], ask: Ask, data: st.DataObject) -> None:
    """What the official package takes for one of its types is taken by ours, and says the same
    again."""
    name = data.draw(st.sampled_from(list(kinds)))
    value = data.draw(kinds[name])
    answer = ask(name, value)
    if isinstance(answer, dict):  # the schema does not say all that is refused
        return
    full, sent = answer
    kind: Any = getattr(types, name)
    for ours in (
        kind.model_validate(value),
        kind.model_validate_json(json.dumps(value)),
        kind.model_validate(full),
    ):
        if name in AS_GIVEN:
            assert ask(name, json.loads(ours.model_dump_json())) == answer
            assert ask(name, json.loads(ours.model_dump_json(exclude_none=True))) == answer
            continue
        assert fitted(json.loads(ours.model_dump_json()), full) == full
        assert fitted(json.loads(ours.model_dump_json(exclude_none=True)), sent) == sent


def fitted(ours: Any, theirs: Any) -> Any:
    """Less what only ours have."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        kept = {key: one for key, one in ours.items() if key in theirs or key not in BEYOND}
        return {key: fitted(one, theirs.get(key)) for key, one in kept.items()}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [fitted(one, other) for one, other in zip(ours, theirs, strict=True)]
    return ours


@st.composite
def recipes(draw: st.DrawFn) -> Any:
    """Passes of all kinds, as plain values."""
    names = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "mask"])
    tokens = st.lists(st.integers(0, 2**31 - 1), max_size=4)
    media = st.lists(st.integers(0, 255), max_size=4)
    chunk = st.tuples(st.just("text"), tokens) | st.tuples(
        st.sampled_from(["dmel", "png", "jpeg"]), media
    )
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)

    @st.composite
    def tensors(draw: st.DrawFn) -> Any:
        rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        shape = draw(st.sampled_from([[rows * columns], [rows, columns]]))
        form = draw(st.sampled_from(["int64", "float32", "torch"]))
        cell = st.just(0) | (st.integers(-(2**40), 2**40) if form == "int64" else floats)
        return form, shape, draw(st.lists(cell, min_size=rows * columns, max_size=rows * columns))

    plain = st.tuples(st.just("list"), st.none(), st.lists(floats, min_size=1, max_size=4))
    inputs = st.dictionaries(names, tensors(), max_size=3)
    weights = st.dictionaries(st.just("weights"), plain, max_size=1)
    datum = st.fixed_dictionaries(
        {"chunks": st.lists(chunk, max_size=3), "inputs": inputs | weights}
    )
    return {
        "data": draw(st.lists(datum, max_size=3)),
        "loss_fn": draw(st.sampled_from(get_args(types.LossFnType))),
        "config": draw(st.none() | st.dictionaries(TEXT, REAL | TEXT, max_size=2)),
        "model": draw(TEXT),
        "seq": draw(st.none() | st.integers(0, 2**31)),
    }


def check_protobuf(ask: Ask, recipe: Any) -> None:
    """The same pass is the same bytes, and is the same again when it has been read."""
    answer = ask("pass", recipe)
    if isinstance(answer, dict):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            codec.encode(made_pass(types, np, torch, recipe))
        return
    body = codec.encode(made_pass(types, np, torch, recipe))
    assert body.data.hex() == answer
    assert (
        codec.encode(codec.decode(types.ForwardBackwardRequest, body.data, body.content_type)).data
        == body.data
    )


SHARED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=SHARED,
)


@settings(QUICK)
@given(data=st.data())
def test_official_values_round_trip(
    kinds: dict[str, st.SearchStrategy[Any]], ask: Ask, data: st.DataObject
) -> None:
    check_json(kinds, ask, data)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=SHARED)
@given(data=st.data())
def test_official_values_round_trip_at_length(
    kinds: dict[str, st.SearchStrategy[Any]], ask: Ask, data: st.DataObject
) -> None:
    check_json(kinds, ask, data)


@settings(QUICK)
@given(recipe=recipes())
def test_same_pass_is_the_same_bytes(ask: Ask, recipe: Any) -> None:
    check_protobuf(ask, recipe)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=SHARED)
@given(recipe=recipes())
def test_same_pass_is_the_same_bytes_at_length(ask: Ask, recipe: Any) -> None:
    check_protobuf(ask, recipe)
