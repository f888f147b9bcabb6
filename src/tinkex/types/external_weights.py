"""Messages of uploads of external weights."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping

from tinkex.types.forms import Stamped
from tinkex.types.record import Record
from tinkex.types.training import LoraConfig


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
