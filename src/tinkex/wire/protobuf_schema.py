"""The schema of protobuf messages, as a table.

The message classes are built at run time in a private descriptor pool, so no generated code can
fall behind the installed runtime.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PACKAGE = "tinker_public"

ENUMS: dict[str, list[str]] = {
    "StopReason": ["STOP", "LENGTH"],
    "DType": ["UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16"],
}

# message -> {field: (number, type)}; a type may be prefixed by "repeated", "optional", "oneof NAME"
# or be "map VALUE".
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "repeated Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "LossConfigValue": {"number": (1, "oneof value double"), "text": (2, "oneof value string")},
    "Datum": {
        "model_input": (1, "repeated Chunk"),
        "loss_fn_inputs": (2, "map Tensor"),
        "model_input_spans": (3, "repeated ProvenanceSpan"),
        "loss_fn_input_spans": (4, "repeated ProvenanceSpan"),
    },
    "ProvenanceSpan": {
        "prompt_tokens": (1, "oneof span PromptProvenanceSpan"),
        "sampled_tokens": (2, "oneof span SampledProvenanceSpan"),
    },
    "PromptProvenanceSpan": {
        "sequence_id": (1, "string"),
        "offset": (2, "int64"),
        "length": (3, "int64"),
    },
    "SampledProvenanceSpan": {
        "sequence_id": (1, "string"),
        "offset": (2, "int64"),
        "length": (3, "int64"),
    },
    "Chunk": {
        "encoded_text": (1, "oneof chunk EncodedTextChunk"),
        "image": (2, "oneof chunk ImageChunk"),
        "dmel": (3, "oneof chunk DmelChunk"),
    },
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "ImageChunk": {
        "data": (1, "bytes"),
        "format": (2, "string"),
        "expected_tokens": (3, "optional int32"),
        "override_dimensions": (4, "optional ImageDimensions"),
    },
    "ImageDimensions": {"width": (1, "uint32"), "height": (2, "uint32")},
    "DmelChunk": {"dmel": (1, "bytes")},
    "Tensor": {
        "dense": (1, "oneof encoding bytes"),
        "sparse_csr": (2, "oneof encoding SparseCsr"),
        "dtype": (3, "DType"),
        "shape": (4, "repeated int64"),
    },
    "SparseCsr": {
        "values": (1, "bytes"),
        "crow_indices": (2, "bytes"),
        "col_indices": (3, "bytes"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "repeated ArrayRecord"),
        "metrics": (3, "map double"),
    },
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "map BatchedTensor"),
        "num_datums": (3, "int64"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "DType"),
        "trailing_shape": (4, "repeated int64"),
    },
    "SampleResponse": {
        "sequences": (1, "repeated SampledSequence"),
        "prompt_logprobs": (2, "optional bytes"),
        "topk_prompt_logprobs": (3, "optional TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
        "target_prompt_logprobs": (5, "optional Tensor"),
        "prompt_alt_tokens": (6, "optional PromptAltTokens"),
    },
    "PromptAltTokens": {"tokens": (1, "Tensor"), "logprobs": (2, "Tensor")},
    "SampledSequence": {
        "stop_reason": (1, "StopReason"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "optional bytes"),
        "topk_sampled_logprobs": (4, "optional TopkLogprobs"),
        "weights_spans": (1001, "repeated WeightsSpan"),  # ours; official clients skip it
    },
    "WeightsSpan": {"version": (1, "int64"), "tokens": (2, "int64")},
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "uint32"),
        "length": (4, "uint32"),
    },
}

SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
TYPE_MESSAGE, TYPE_ENUM = 11, 14
OPTIONAL, REPEATED = 1, 3


@cache
def message(name: str) -> Any:
    """Return the protobuf library's class for one of our messages."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(
        name="tinkex/wire.proto", package=PACKAGE, syntax="proto3"
    )
    for enum, labels in ENUMS.items():
        declared = file.enum_type.add(name=enum)
        for number, label in enumerate(labels):
            declared.value.add(name=f"{enum}_{label}", number=number)
    for name, fields in MESSAGES.items():
        _declare(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


class NotInProtobuf(ValueError):
    """Raised for data that the schema cannot hold; it can be sent as JSON."""


def _declare(entry: Any, fields: dict[str, tuple[int, str]]) -> None:
    """Fill one message of the descriptor.

    Oneofs of real unions come before those that proto3 makes for `optional`.
    """
    for _, spec in fields.values():
        if spec.startswith("oneof ") and spec.split()[1] not in [o.name for o in entry.oneof_decl]:
            entry.oneof_decl.add(name=spec.split()[1])
    for field, (number, spec) in fields.items():
        words = spec.split()
        if words[0] == "map":
            _declare_map(entry, field, number, words[1])
            continue
        declared = entry.field.add(name=field, number=number, label=OPTIONAL)
        if words[0] == "repeated":
            declared.label = REPEATED
        elif words[0] == "oneof":
            declared.oneof_index = [o.name for o in entry.oneof_decl].index(words[1])
        elif words[0] == "optional" and words[1] in SCALARS:
            declared.oneof_index = len(entry.oneof_decl)
            declared.proto3_optional = True
            entry.oneof_decl.add(name=f"_{field}")
        _set_type(declared, words[-1])


def _declare_map(entry: Any, field: str, number: int, value: str) -> None:
    nested = entry.nested_type.add(
        name="".join(part.title() for part in field.split("_")) + "Entry"
    )
    nested.options.map_entry = True
    _set_type(nested.field.add(name="key", number=1, label=OPTIONAL), "string")
    _set_type(nested.field.add(name="value", number=2, label=OPTIONAL), value)
    declared = entry.field.add(name=field, number=number, label=REPEATED, type=TYPE_MESSAGE)
    declared.type_name = f".{PACKAGE}.{entry.name}.{nested.name}"


def _set_type(declared: Any, kind: str) -> None:
    if kind in SCALARS:
        declared.type = SCALARS[kind]
        return
    declared.type = TYPE_ENUM if kind in ENUMS else TYPE_MESSAGE
    declared.type_name = f".{PACKAGE}.{kind}"


def parse(name: str, body: bytes) -> Any:
    """Parse one of our messages, or raise ValueError."""
    from google.protobuf.message import DecodeError

    try:
        return message(name).FromString(body)
    except DecodeError:
        raise ValueError(f"malformed protobuf: the body is not a {name} message") from None
