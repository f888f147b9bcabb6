"""The parts of a server that runs, samplers and replay are made of."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.server.database.interface import Database
from tinkex.server.open_sessions import Sessions
from tinkex.server.runs.journals import Journals, Revivals
from tinkex.server.runs.promises import Promises
from tinkex.server.samples.sampler_weights import NamelessSamplers
from tinkex.server.samples.sampling_records import SamplingRecords
from tinkex.server.server_limits import Limits
from tinkex.server.workers.pool import Workers


@dataclass(frozen=True, slots=True)
class Parts:
    """The shared parts, for those that know of runs."""

    database: Database
    journals: Journals
    promises: Promises
    workers: Workers
    sessions: Sessions
    revivals: Revivals
    nameless: NamelessSamplers
    recordings: SamplingRecords
    limits: Limits
