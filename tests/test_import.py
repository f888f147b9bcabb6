"""Adapters made by peft, imported: the same function to the last digits that floats have, and
trained on from there."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig as PeftConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support import MODEL, assert_peft_agrees, make_data, serving, train
from tinkex import LocalBackend, RestClient, ServiceClient, types
from tinkex.cli.main import cli
from tinkex.engine import file_formats
from tinkex.engine.api import EngineError
from tinkex.engine.families.family import families
from tinkex.engine.torch.engine import TorchEngine
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.files import imports
from tinkex.server.files.imports import import_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[..., Path]

pytestmark = pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")


@pytest.fixture
def make(model_dir: Path, tmp_path: Path) -> Make:
    """Write an adapter with peft whose factors are all random, so that each has an effect."""

    def write(dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
        model = get_peft_model(base, PeftConfig(task_type="CAUSAL_LM", **(settings | options)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
        directory = tmp_path / "adapter"
        model.save_pretrained(str(directory), save_embedding_layers=False)
        _edit(directory, base_model_name_or_path=MODEL)
        if dtype != torch.float32:
            path = directory / "adapter_model.safetensors"
            save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
        return directory

    return write


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def store(data_dir: Path) -> Iterator[SqliteDatabase]:
    opened = SqliteDatabase(data_dir)
    yield opened
    opened.close()


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_import_reports_progress(
    make: Make,
    store: SqliteDatabase,
    model_dir: Path,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, told = make(dtype), list[tuple[int, int]]()
    for module in (imports, file_formats):
        monkeypatch.setattr(module, "PIECE", 100)
    saved = import_adapter(
        store, adapter, MODEL, model_dir, progress=lambda done, total: told.append((done, total))
    )
    read = (adapter / "adapter_model.safetensors").stat().st_size
    written = load_file(saved.directory / "adapter_model.safetensors")
    assert told == sorted(told)
    assert told[-1] == (read + sum(4 * tensor.numel() for tensor in written.values()),) * 2
    assert len(told) >= told[-1][0] // 100


def test_reading_an_adapter_holds_its_file_no_longer_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "PIECE", 1 << 16)
    path = tmp_path / "adapter_model.safetensors"
    save_file({str(number): torch.zeros(1 << 18) for number in range(8)}, path)
    imports._read_tensors(path, imports._Told(None))  # whatever is imported for it
    tracemalloc.start()
    try:
        imports._read_tensors(path, imports._Told(None))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2.5 * path.stat().st_size  # the tensors twice, while their numbers are converted


@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({}, "attn"),
        ({"r": 8, "lora_alpha": 16, "lora_dropout": 0.1}, "attn"),
        ({"r": 3, "lora_alpha": 5, "use_rslora": True}, "attn"),
        ({"r": 4, "lora_alpha": 32, "target_modules": ALL}, "attn mlp unembed"),
        ({"target_modules": ["layers.1.mlp.down_proj", "lm_head"]}, "mlp unembed"),
        ({"target_modules": r".*\.1\.mlp\.(up|gate)_proj"}, "mlp"),
        ({"target_modules": "all-linear"}, "attn mlp"),
        ({"dtype": torch.bfloat16}, "attn"),
        ({"dtype": torch.float16}, "attn"),
    ],
    ids=str,
)
def test_imported_adapter_equals_peft_and_trains_on(
    make: Make,
    store: SqliteDatabase,
    data_dir: Path,
    model_dir: Path,
    options: dict[str, Any],
    trains: str,
) -> None:
    adapter = make(**options)
    saved = import_adapter(store, adapter, MODEL, model_dir, "mine")
    assert saved.tinker_path.endswith(":train:0/weights/mine")
    with (
        LocalBackend({MODEL: model_dir}, data_dir=data_dir) as backend,
        ServiceClient(base_url=backend.base_url) as service,
    ):
        client = service.create_training_client_from_state(saved.tinker_path).result()
        assert_peft_agrees(client, types, model_dir, adapter)
        info = (
            RestClient(base_url=backend.base_url)
            .get_weights_info_by_tinker_path(saved.tinker_path)
            .result(20)
        )
        assert info.lora_rank == options.get("r", 4)
        flags = {"attn": info.train_attn, "mlp": info.train_mlp, "unembed": info.train_unembed}
        assert [group for group, on in flags.items() if on] == trains.split()
        losses = train(client, types, make_data(types), 4)
        assert losses == sorted(losses, reverse=True)


def test_modules_without_an_adapter_learn(
    make: Make, store: SqliteDatabase, data_dir: Path, model_dir: Path
) -> None:
    saved = import_adapter(store, make(), MODEL, model_dir)
    before = load_file(saved.directory / "adapter_model.safetensors")
    with (
        LocalBackend({MODEL: model_dir}, data_dir=data_dir) as backend,
        ServiceClient(base_url=backend.base_url) as service,
    ):
        client = service.create_training_client_from_state(saved.tinker_path).result()
        train(client, types, make_data(types), 2)
        path = client.save_state("after").result(60).path
    after = load_file(
        data_dir
        / "checkpoints"
        / path.split("/")[2].replace(":", "_")
        / "weights/after/adapter_model.safetensors"
    )
    assert before.keys() == after.keys()
    for name in ("k_proj.lora_A", "k_proj.lora_B", "q_proj.lora_B"):
        [key] = [key for key in after if f"layers.1.self_attn.{name}" in key]
        assert not torch.equal(before[key], after[key]), key


def test_adapter_of_the_hosted_service_finds_its_unembedding(
    make: Make, store: SqliteDatabase, model_dir: Path
) -> None:
    adapter = make(target_modules=["lm_head", "q_proj"])
    _edit(adapter, target_modules="all-linear")
    path = adapter / "adapter_model.safetensors"
    save_file(
        {
            key.replace("lm_head", "model.unembed_tokens"): value
            for key, value in load_file(path).items()
        },
        path,
    )
    saved = import_adapter(store, adapter, MODEL, model_dir)
    assert saved.lora.train_unembed
    assert "base_model.model.lm_head.lora_B.weight" in load_file(
        saved.directory / "adapter_model.safetensors"
    )


def test_name_of_the_base_model_is_the_adapters_own_by_default(
    make: Make, store: SqliteDatabase, model_dir: Path
) -> None:
    saved = import_adapter(store, make(), None, model_dir)
    assert saved.base_model == MODEL
    run = store.runs.get(saved.model_id)
    assert run is not None
    assert (run.base_model, run.lora.rank, run.owner) == (MODEL, 4, "local")


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


def _edit(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: _edit(directory, **changes)


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, directory / "adapter_model.safetensors")

    return edit


def _pickle(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()
    (directory / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda directory: (directory / "adapter_config.json").unlink(),
            r"has no adapter_config\.json",
        ),
        (
            lambda directory: (directory / "adapter_config.json").write_text("{"),
            "is not valid JSON",
        ),
        (
            lambda directory: (directory / "adapter_config.json").write_text("[]"),
            "is not a JSON object",
        ),
        (
            lambda directory: (directory / "adapter_model.safetensors").unlink(),
            r"has no adapter_model\.safetensors",
        ),
        (
            lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"x" * 50),
            "cannot be read",
        ),
        (_pickle, r"adapter_model\.bin, a pickle, which can run any code"),
        (_config(peft_type="IA3"), "peft_type is 'IA3'; it must be 'LORA'"),
        (_config(use_dora=True), "use_dora is True, which cannot be imported"),
        (_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'; it must be True"),
        (_config(something_new={"x": 1}), "something_new"),
        (_config(bias="all"), "bias is 'all'; it must be 'none'"),
        (_config(rank_pattern={"q_proj": 8}), "rank_pattern"),
        (_config(alpha_pattern={"q_proj": 8}), "alpha_pattern"),
        (_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (_config(layers_to_transform=[1]), "layers_to_transform"),
        (_config(r=0), "r must be a whole number from 1 to 1024, got 0"),
        (_config(r="4"), "r must be a whole number"),
        (_config(lora_alpha=None), "lora_alpha must be a positive number, got None"),
        (_config(r=8), r"has shape \[4, 64\], the base model wants \[8, 64\]"),
        (
            _config(target_modules=["q_proj", "v_proj", "o_proj"]),
            "lacks factors of model.layers.0.self_attn.o_proj",
        ),
        (
            _tensors(lambda tensors: tensors.pop(KEY)),
            "lacks factors of model.layers.0.self_attn.q_proj",
        ),
        (_tensors(lambda tensors: tensors.clear()), "lacks factors"),
        (_tensors(lambda t: t.update({KEY: torch.zeros(4, 63)})), r"has shape \[4, 63\]"),
        (
            _tensors(lambda t: t.update({KEY: torch.full((4, 64), float("nan"))})),
            "holds NaN or infinity",
        ),
        (
            _tensors(lambda t: t.update({KEY: torch.zeros(4, 64, dtype=torch.int8)})),
            "has type I8; expected one of",
        ),
        (
            _tensors(lambda t: t.update({"base_model.model.x.lora_A.weight": torch.zeros(1)})),
            "cannot be trained here",
        ),
        (
            _tensors(lambda t: t.update({KEY.replace("A", "magnitude"): torch.zeros(1)})),
            "is not a LoRA factor",
        ),
        (
            _tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(1)})),
            "save_embedding_layers=False",
        ),
        (
            _tensors(lambda t: t.update({KEY.replace("0", "7"): torch.zeros(4, 64)})),
            "layers.7.*cannot be trained here",
        ),
    ],
)
def test_incompatible_adapter_is_refused_without_a_trace(
    make: Make,
    store: SqliteDatabase,
    data_dir: Path,
    model_dir: Path,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    adapter = make()
    damage(adapter)
    with pytest.raises(EngineError, match=message):
        import_adapter(store, adapter, MODEL, model_dir)
    assert not [path for path in data_dir.rglob("*") if path.name.startswith("adapter")]
    assert store.connection.rows("SELECT count(*) FROM runs")[0][0] == 0


def test_invalid_base_model_is_refused(make: Make, store: SqliteDatabase, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is not a base model"):
        import_adapter(store, make(), MODEL, tmp_path)


def test_invalid_name_is_refused(make: Make, store: SqliteDatabase, model_dir: Path) -> None:
    with pytest.raises(EngineError, match="is not allowed"):
        import_adapter(store, make(), MODEL, model_dir, "../escape")


def test_conventions_are_the_engines() -> None:
    """Also for a family of its own names: adapters for its modules can be imported."""
    for family in families().values():
        for group, modules in family.names.groups.items():
            assert all(imports.KNOWN[module] == group for module in modules)
    fields = types.LoraConfig.__struct_fields__
    flags = {name.removeprefix("train_") for name in fields if name.startswith("train_")}
    assert set(imports.GROUPS) == flags


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def test_command_imports_beside_a_running_server(
    make: Make, model_dir: Path, data_dir: Path
) -> None:
    adapter = make()
    with (
        serving(TorchEngine({MODEL: model_dir}), data_dir) as url,
        ServiceClient(base_url=url) as service,
    ):
        arguments = [
            "--base-model",
            f"{MODEL}={model_dir}",
            "--name",
            "cli",
            "--data-dir",
            str(data_dir),
        ]
        result = CliRunner().invoke(cli, ["checkpoint", "import", str(adapter), *arguments])
        assert result.exit_code == 0, result.output
        path = result.output.strip()
        assert path.endswith("/weights/cli")
        client = service.create_training_client_from_state(path).result()
        assert_peft_agrees(client, types, model_dir, adapter)
        listed = RestClient(base_url=url).list_user_checkpoints().result(20).checkpoints
        assert [checkpoint.tinker_path for checkpoint in listed] == [path]


def test_command_errors_have_one_line(make: Make, model_dir: Path, data_dir: Path) -> None:
    adapter = make()
    _edit(adapter, use_dora=True)
    arguments = [
        "import",
        str(adapter),
        "--base-model",
        f"{MODEL}={model_dir}",
        "--data-dir",
        str(data_dir),
    ]
    program = "import sys; from tinkex.cli.main import main; sys.argv[0] = 'tinkex'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "checkpoint", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert "use_dora is True" in done.stderr
    assert done.stderr.count("\n") == 1


def test_command_asks_for_the_base_models_name_when_the_adapter_has_a_directory(
    make: Make, model_dir: Path, data_dir: Path
) -> None:
    adapter = make()
    _edit(adapter, base_model_name_or_path=str(model_dir))
    result = CliRunner().invoke(
        cli, ["checkpoint", "import", str(adapter), "--data-dir", str(data_dir)]
    )
    assert result.exit_code == 2
    assert "give --base-model NAME[=DIR]" in result.output


def test_scaling_is_exact_within_float_precision(
    make: Make, store: SqliteDatabase, model_dir: Path
) -> None:
    adapter = make(lora_alpha=16)
    saved = import_adapter(store, adapter, MODEL, model_dir)
    ours, theirs = (
        load_file(directory / "adapter_model.safetensors")
        for directory in (saved.directory, adapter)
    )
    for name, tensor in theirs.items():
        factor = 0.5 if "lora_B" in name else 1.0
        np.testing.assert_array_equal(ours[name].numpy(), (tensor * factor).numpy())
