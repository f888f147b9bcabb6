"""The demo runs embedded and against a server, and its full form teaches what it says."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from support import serving
from tinkex.cli.charts import plot
from tinkex.cli.demo import Demo
from tinkex.cli.main import cli
from tinkex.models.addition import MAX_ANSWER_TOKENS


def test_quick_demo_runs_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path))
    result = CliRunner().invoke(cli, ["demo", "--quick"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for line in (
        "the base model tells a story: Once upon",
        "accuracy after the examples",
        "accuracy after the rewards",
        "tokens/s",
    ):
        assert line in result.output
    run = re.search(r"tinker://(\S+)/weights/demo", result.output)
    assert run
    saved = tmp_path / "checkpoints" / run[1].replace(":", "_") / "weights" / "demo"
    assert {file.name for file in saved.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert str(tmp_path / "checkpoints") in result.output


def test_quick_demo_runs_against_a_server(tmp_path: Path) -> None:
    from tinkex.local import make_engine

    with serving(make_engine(), tmp_path) as url:
        result = CliRunner().invoke(
            cli, ["demo", "--quick", "--base-url", url], env={"COLUMNS": "200"}
        )
    assert result.exit_code == 0, result.output
    assert f"tinkex/tiny at {url}" in result.output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_whole_demo_teaches(seed: int) -> None:
    result = CliRunner().invoke(cli, ["demo", "--seed", str(seed)], env={"COLUMNS": "200"})
    base, examples, rewards = (
        float(x) for x in re.findall(r"accuracy: .*?│ +([\d.]+)%", result.output)
    )
    assert result.exit_code == 0, result.output
    assert 10 <= base <= 40
    assert base + 20 < examples < rewards
    assert rewards > 80


def test_plot_shows_the_range_and_the_shape() -> None:
    lines = plot([4.0, 2.0, 1.0], width=6, height=3, label="loss").splitlines()
    assert lines[0].strip() == "loss"
    assert lines[1].startswith("4 │")
    assert lines[3].startswith("1 │")
    assert plot([]) == ""
    rising = plot([0.0, 1.0], width=4, height=2).splitlines()
    assert rising[0].rstrip().endswith("⠚⠁") or ord(rising[0].rstrip()[-1]) > 0x2800
    assert rising[1][3] != chr(0x2800)


def test_every_demo_prompt_has_its_own_seed() -> None:
    demo = Demo.__new__(Demo)  # the run that a whole one begins with has nothing to do with it
    demo.random, demo.stop = random.Random(0), [1]
    draws = demo.draws(16, 1.0)
    assert len({params.seed for params in draws}) == 16
    assert {(params.temperature, params.max_tokens) for params in draws} == {
        (1.0, MAX_ANSWER_TOKENS)
    }
