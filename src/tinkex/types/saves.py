"""Requests and answers about saving, loading, copying and uploading weights."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias
from urllib.parse import quote

import msgspec

from tinkex.types.checkpoints import CONSOLE, console_url
from tinkex.types.forms import Stamped
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfigBase
from tinkex.types.record import Int64, Record, check_depth
from tinkex.types.training import LoraConfig

SamplingClientKind: TypeAlias = Literal["snapshot", "inflight"]
"""Weights of a sampling client: those it began with, or the run's newest in-flight save."""


class _Save(Record, frozen=True, kw_only=True):
    model_id: str
    path: str | None = None


class SaveWeightsRequest(_Save, frozen=True, kw_only=True):
    """Save weights and optimizer state, to resume from.

    Example:
        >>> SaveWeightsRequest(model_id="run-1", path="step-100", ttl_seconds=86_400).overwrite
        False
    """

    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class _Saved(Record, frozen=True, kw_only=True):
    path: str

    def get_console_url(self) -> str:
        """The checkpoint's page in the hosted service's console.

        Example:
            >>> saved = SaveWeightsResponse(path="tinker://run-1/weights/step-100")
            >>> saved.get_console_url().rpartition("/checkpoints/")[2]
            'run-1/weights%2Fstep-100'
        """
        return console_url(self.path)


class SaveWeightsResponse(_Saved, frozen=True, kw_only=True):
    """Path of a saved training checkpoint.

    Example:
        >>> saved = SaveWeightsResponse(
        ...     path="tinker://run-1/weights/step-100"
        ... )  # save_state("step-100").result()
        >>> saved.path
        'tinker://run-1/weights/step-100'
    """

    type: Literal["save_weights"] | None = None


class SaveWeightsForSamplerRequest(_Save, frozen=True, kw_only=True):
    """Save weights to sample from: under a name, or nameless straight into a sampler.

    Example:
        >>> SaveWeightsForSamplerRequest(model_id="run-1", path="final").path
        'final'
    """

    sampling_session_seq_id: Int64 | None = None
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    user_metadata: dict[str, str] | None = None
    kind: SamplingClientKind = "snapshot"
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(_Saved, frozen=True, kw_only=True):
    """Path of a saved sampler checkpoint.

    Like the official client, calls leave `type` None.

    Example:
        >>> saved = SaveWeightsForSamplerResponse(path="tinker://run-1/sampler_weights/final")
        >>> saved.path  # what create_sampling_client(model_path=...) takes
        'tinker://run-1/sampler_weights/final'
    """

    type: Literal["save_weights_for_sampler"] | None = None

    def get_playground_url(self) -> str:
        """Return the address of the hosted console's page where one can chat with the checkpoint.

        Example:
            >>> saved = SaveWeightsForSamplerResponse(path="tinker://run-1/sampler_weights/final")
            >>> saved.get_playground_url().partition("?")[2]
            'mode=checkpoint&checkpoint=tinker%3A%2F%2Frun-1%2Fsampler_weights%2Ffinal'
        """
        return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsForSamplerResponseInternal(Record, frozen=True, kw_only=True):
    """Either a path (named) or a sampling session (nameless).

    Example:
        >>> SaveWeightsForSamplerResponseInternal(
        ...     sampling_session_id="sampler-1"
        ... ).sampling_session_id
        'sampler-1'
    """

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class LoadWeightsRequest(Record, frozen=True, kw_only=True):
    """Request to load a checkpoint.

    Give `model_id` to load into an existing run, `session_id` and `model_seq_id` to load into a new
    one.

    Example:
        >>> LoadWeightsRequest(
        ...     path="tinker://run-1/weights/step-100", optimizer=True, model_id="run-2"
        ... ).optimizer
        True
    """

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Int64 | None = None
    session_id: str | None = None
    model_seq_id: Int64 | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfigBase | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"

    def __post_init__(self) -> None:
        check_depth(self.user_metadata, "user_metadata")


class LoadWeightsResponse(Record, frozen=True, kw_only=True):
    """Checkpoint that was loaded, and its run.

    Example:
        >>> LoadWeightsResponse(path="tinker://run-1/weights/step-100", model_id="run-2").model_id
        'run-2'
    """

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Record, frozen=True, kw_only=True):
    """Ask what a checkpoint holds.

    Example:
        >>> WeightsInfoRequest(tinker_path="tinker://run-1/weights/step-100").tinker_path
        'tinker://run-1/weights/step-100'
    """

    tinker_path: str


class WeightsInfoResponse(Record, frozen=True, kw_only=True):
    """Description of a checkpoint's weights.

    Example:
        >>> rest.get_weights_info_by_tinker_path(path).result().base_model
        'tinkex/tiny'
    """

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfigBase = msgspec.field(default_factory=AdamOptimizerConfig)


class SaveWeightsExternalRequest(Record, frozen=True, kw_only=True):
    """Save weights as files to download; readable by the recipients alone when there are any.

    Example:
        >>> SaveWeightsExternalRequest(
        ...     model_id="run-1", path="export", ttl_seconds=3600
        ... ).ttl_seconds
        3600
    """

    model_id: str
    path: str
    seq_id: Int64 | None = None
    ttl_seconds: Int64 | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Record, frozen=True, kw_only=True):
    """Path of an exported checkpoint.

    Example:
        >>> SaveWeightsExternalResponse(path="tinker://run-1/external_weights/export").path
        'tinker://run-1/external_weights/export'
    """

    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(Record, frozen=True, kw_only=True):
    """Path and size of an exported checkpoint.

    Example:
        >>> answer = SaveWeightsExternalResponseInternal(
        ...     path="tinker://run-1/external_weights/a", size_bytes=2048
        ... )
        >>> answer.size_bytes
        2048
    """

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class ExternalWeightsUrlsResponse(Stamped, frozen=True, kw_only=True):
    """Signed addresses of an exported checkpoint's files, good until they expire.

    Example:
        >>> files = {"adapter_model.safetensors": "https://files.example.org/1"}
        >>> answer = ExternalWeightsUrlsResponse(urls=files, expires=dt.datetime(2026, 1, 2))
        >>> list(answer.urls), answer.expires.isoformat()
        (['adapter_model.safetensors'], '2026-01-02T00:00:00+00:00')
    """

    urls: dict[str, str]
    expires: dt.datetime


class CheckpointArchiveUrlResponse(Stamped, frozen=True, kw_only=True):
    """The signed address of a checkpoint packed into one file, good until it expires.

    Example:
        >>> until = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> answer = CheckpointArchiveUrlResponse(
        ...     url="https://files.example.org/1.tar", expires=until
        ... )
        >>> answer.url, answer.expires.isoformat()
        ('https://files.example.org/1.tar', '2026-01-02T00:00:00+00:00')
    """

    url: str
    expires: dt.datetime


class CopyWeightsRequest(Record, frozen=True, kw_only=True):
    """Copy a checkpoint into a project.

    Example:
        >>> CopyWeightsRequest(
        ...     source_path="tinker://run-1/weights/a", destination_project_id="p-1"
        ... ).source_path
        'tinker://run-1/weights/a'
    """

    session_id: str | None = None
    model_seq_id: Int64 | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Int64 | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Record, frozen=True, kw_only=True):
    """Path of a copied checkpoint.

    Example:
        >>> CopyWeightsResponse(tinker_path="tinker://run-2/weights/step-100").tinker_path
        'tinker://run-2/weights/step-100'
    """

    tinker_path: str


class SetCheckpointTtlRequest(Record, frozen=True, kw_only=True):
    """Let a checkpoint expire after so many seconds, or never.

    Example:
        >>> SetCheckpointTtlRequest(ttl_seconds=None).model_dump()  # never expires
        {'ttl_seconds': None}
    """

    SENT_AS_NULL: ClassVar[frozenset[str]] = frozenset({"ttl_seconds"})

    ttl_seconds: Int64 | None = None


class ExternalWeightsUploadStartRequest(
    Record, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Begin an upload of weights that were trained elsewhere, or exported before.

    Example:
        >>> ExternalWeightsUploadStartRequest(
        ...     base_model="tinkex/tiny", lora_config=LoraConfig(rank=8)
        ... ).lora_config.rank
        8
    """

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


class ExternalWeightsUploadStartResponse(Stamped, frozen=True, kw_only=True):
    """Addresses to put the files to, by their names, good until they expire.

    Example:
        >>> files = {"adapter_config.json": "https://files.example.org/1"}
        >>> answer = ExternalWeightsUploadStartResponse(
        ...     upload_id="u-1", urls=files, expires=dt.datetime(2026, 1, 2)
        ... )
        >>> list(answer.urls), answer.expires.isoformat()
        (['adapter_config.json'], '2026-01-02T00:00:00+00:00')
    """

    upload_id: str
    urls: dict[str, str]
    expires: dt.datetime


class ExternalWeightsUploadFinishRequest(
    Record, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """End an upload whose files are all there.

    Example:
        >>> ExternalWeightsUploadFinishRequest(upload_id="u-1").upload_id
        'u-1'
    """

    upload_id: str


class ExternalWeightsUploadFinishResponse(Record, frozen=True, kw_only=True):
    """The path of the checkpoint that the files have become.

    Example:
        >>> ExternalWeightsUploadFinishResponse(
        ...     tinker_path="tinker://run-1/external_weights/uploaded"
        ... ).tinker_path
        'tinker://run-1/external_weights/uploaded'
    """

    tinker_path: str


@dataclasses.dataclass(frozen=True, slots=True)
class ExternalWeightsUploadStartResult:
    """An upload that has begun: PUT every file to its address, then finish it.

    Example:
        >>> until = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> files = {"adapter_config.json": "https://files.example.org/1"}
        >>> begun = ExternalWeightsUploadStartResult("u-1", files, until)
        >>> sorted(begun.urls)
        ['adapter_config.json']
    """

    upload_id: str
    urls: Mapping[str, str]
    expires: dt.datetime


@dataclasses.dataclass(frozen=True, slots=True)
class ExternalWeightsUploadFinishResult:
    """An upload that has ended, and the path of its checkpoint.

    Example:
        >>> ExternalWeightsUploadFinishResult(
        ...     "tinker://run-1/external_weights/uploaded"
        ... ).tinker_path
        'tinker://run-1/external_weights/uploaded'
    """

    tinker_path: str
