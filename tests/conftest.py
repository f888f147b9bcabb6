"""Shared fixtures: a small random Llama with a real tokenizer, servers over it, in process and on a
socket."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from support import MODEL, serving

if TYPE_CHECKING:
    from tinkex import ServiceClient
    from tinkex.engine.api import Engine


def _own_places() -> None:
    """Isolate tests: writes stay in their own directories, nothing is fetched, no settings leak
    in.

    Done on import, before any test module: some of these are read once, when a library is first
    imported.
    """
    home = Path(tempfile.mkdtemp(prefix="tinkex-tests-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for name in [name for name in os.environ if name.startswith(("TINKER_", "TINKEX_"))]:
        del os.environ[name]
    os.environ |= {
        "HF_HOME": str(home / "hf"),
        "HF_HUB_CACHE": str(home / "hf" / "hub"),
        "HF_HUB_OFFLINE": "1",
        # threads that spin while they wait are a burden to everything else that runs
        "OMP_WAIT_POLICY": "PASSIVE",
        "TINKEX_DATA_DIR": str(home / "data"),
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


_own_places()
# as shells start what is to run in the background
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long examples take to make says something of the machine, not of what is tested.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

CORPUS = [
    "the cat sat on the mat and the dog ran",
    "hello world, how are you today?",
    "12 + 34 = 46",
]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, with a byte-level BPE tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def server_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the small model; shared, since sessions are independent of each other."""
    from tinkex.engine.torch.engine import TorchEngine
    from tinkex.local import publish_tokenizers

    engine = TorchEngine({MODEL: model_dir})
    publish_tokenizers(engine.models())
    with serving(engine, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="session")
def embedded_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same, inside the process."""
    from tinkex import LocalBackend

    with LocalBackend({MODEL: model_dir}, data_dir=tmp_path_factory.mktemp("embedded")) as backend:
        yield backend.base_url


@pytest.fixture(params=["socket", "embedded"])
def base_url(request: pytest.FixtureRequest) -> str:
    """Both ways to reach a server."""
    url: str = request.getfixturevalue(
        "server_url" if request.param == "socket" else "embedded_url"
    )
    return url


@pytest.fixture
def service(base_url: str) -> Iterator[ServiceClient]:
    """A client of the small model's server, both ways."""
    from tinkex import ServiceClient

    with ServiceClient(base_url=base_url) as client:
        yield client


@pytest.fixture
def fake_service(tmp_path: Path) -> Iterator[Callable[..., ServiceClient]]:
    """Makes clients of an embedded server over the fake engine."""
    from contextlib import ExitStack

    from tinkex import LocalBackend, ServiceClient
    from tinkex.engine.fake import FakeEngine

    with ExitStack() as stack:

        def make(engine: Engine | None = None, **options: Any) -> ServiceClient:
            chosen = engine or FakeEngine()
            backend = stack.enter_context(LocalBackend(data_dir=tmp_path, engine=chosen, **options))
            return stack.enter_context(ServiceClient(base_url=backend.base_url))

        yield make
