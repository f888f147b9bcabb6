"""Checkpoints as files: fetched, exported for other libraries, compared, pushed and brought in."""

from __future__ import annotations

import json
import os
import signal
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from hub import fake_hub
from support import serving
from tinkex.cli import run
from tinkex.cli.diff import compare, read_tensors
from tinkex.cli.results import CommandError
from tinkex.engine import BaseModel
from tinkex.engine.fake import FakeEngine
