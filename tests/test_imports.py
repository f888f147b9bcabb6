"""Cost and side effects of imports; each measurement in its own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tinkex

HEAVY = [
    "torch",
    "transformers",
    "tokenizers",
    "starlette",
    "uvicorn",
    "tinkex.server",
    "tinkex.engine",
    "tinker",
]


def run(code: str, **environment: str) -> str:
    """Return the output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def best_cpu_seconds(setup: str, statement: str) -> float:
    """CPU seconds of a statement, the best of three fresh processes."""
    code = (
        f"import time\n{setup}\nbegan = "
        f"time.process_time()\n{statement}\nprint(time.process_time() - began)"
    )
    return min(float(run(code)) for _ in range(3))


@pytest.mark.covers("W11")
def test_importing_is_quick() -> None:
    assert best_cpu_seconds("", "import tinkex") < 0.15


@pytest.mark.covers("W11")
def test_service_client_is_ready_soon() -> None:
    made = 'from tinkex import ServiceClient\nclient = ServiceClient(base_url="http://127.0.0.1:1")'
    assert best_cpu_seconds("", made) < 0.4


@pytest.mark.covers("W11")
@pytest.mark.parametrize(
    "code",
    [
        "import tinkex",
        'import tinkex\ntinkex.ServiceClient(base_url="http://127.0.0.1:1")',
        "import tinkex, tinkex.cli.main",
        "from tinkex import *",
    ],
    ids=["import", "client", "cli", "star"],
)
def test_import_brings_no_heavy_package(code: str) -> None:
    shown = run(f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])")
    assert shown == "[]"


def test_serve_is_described_without_a_server() -> None:
    """Its help is shown, and put into the site, where starlette is not installed."""
    shown = run("import tinkex.cli.serve, sys\nprint('starlette' in sys.modules)")
    assert shown == "False"


def test_every_public_name_exists() -> None:
    for name in tinkex.__all__:
        assert getattr(tinkex, name) is not None
    assert len(set(tinkex.__all__)) == len(tinkex.__all__)
    assert set(tinkex.__all__) <= set(dir(tinkex))
    with pytest.raises(AttributeError, match="surprise"):
        _ = tinkex.surprise


def test_names_are_resolved_when_used() -> None:
    shown = run(
        "import sys, tinkex\ntinkex.AdamParams\nprint('tinkex.client.service' in sys.modules, "
        "'aiohttp' in sys.modules)"
    )
    assert shown == "False False"


@pytest.mark.parametrize("name", ["adapters", "auth", "metrics", "regularizers", "types"])
def test_modules_are_names_of_the_package(name: str) -> None:
    assert run(f"import tinkex\nprint(tinkex.{name}.__name__)") == f"tinkex.{name}"


def test_torch_modules_are_imported_on_first_use() -> None:
    code = (
        "import sys, tinkex\nspec = tinkex.RegularizerSpec(lambda data, logprobs: None, 1.0, 'a')\n"
    )
    platform = (
        "tinkex.MemoryPlatform(), tinkex.PeftPlatform('x'), tinkex.TrainingPlatform, "
        "tinkex.CustomLossOutput\n"
    )
    assert (
        run(f"{code}{platform}print([name for name in {HEAVY!r} if name in sys.modules])") == "[]"
    )
    missing = (
        "import sys, tinkex\nsys.modules['torch'] = None\ntry:\n    "
        "tinkex.regularizers.L1()\nexcept ImportError:\n"
    )
    assert run(f"{missing}    print('it wants torch')") == "it wants torch"


def test_types_is_a_module() -> None:
    assert run("import tinkex\nprint(tinkex.types.AdamParams is tinkex.AdamParams)") == "True"
    assert run("from tinkex import types\nprint(types.__name__)") == "tinkex.types"


def test_program_ends_although_a_client_was_left_open() -> None:
    code = """
import tinkex
from tinkex.engine.fake import FakeEngine
import tempfile
backend = tinkex.LocalBackend(engine=FakeEngine(), data_dir=tempfile.mkdtemp())
service = tinkex.ServiceClient(base_url=backend.base_url)
client = service.create_lora_training_client("fake").result()
print(client.optim_step(tinkex.AdamParams()).result(10).metrics["grad_norm:mean"])
"""
    assert run(code) == "0.0"
