"""The whole loop with our client, over a socket and in process; and with the official client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex
from support import whole_loop

OFFICIAL = """
import tinker
from support import MODEL, whole_loop
with tinker.ServiceClient() as service:
    whole_loop(service, tinker.types)
    client = service.create_lora_training_client(MODEL, rank=2).result()
    sampler = service.create_sampling_client(base_model=MODEL).result()
    for tokenizer in (client.get_tokenizer(), sampler.get_tokenizer()):
        assert tokenizer.decode(tokenizer.encode("hello cat")) == "hello cat"
print("whole loop done with", tinker.__version__)
"""


@pytest.mark.covers("C36", "C41", "C44", "C46", "C49", "D18", "24.service.6", "4.1/6")
def test_our_client_runs_the_whole_loop(service: tinkex.ServiceClient) -> None:
    whole_loop(service, tinkex.types)


def test_official_client_runs_the_whole_loop(server_url: str) -> None:
    """In a process of its own, as its users run it: it leaves sockets and threads behind."""
    environment = os.environ | {
        "TINKER_BASE_URL": server_url,
        "TINKER_API_KEY": "tml-any-key-will-do",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", OFFICIAL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "whole loop done with 0.38.0" in done.stdout
