"""`tinkex train`: files of examples, what is learned of them, runs that are broken off and taken up
again."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from support import MODEL, serving
from tinkex import LocalBackend, RestClient, ServiceClient, configure
from tinkex.cli.charts import chart, plot
from tinkex.cli.main import cli
from tinkex.cli.options import server_url
from tinkex.cli.train_report import Pruning
from tinkex.client.futures.api_future import Future
from tinkex.engine.api import BaseModel, EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.errors import TinkerError
from tinkex.finetune import Example, FineTune, Plan, RunFolder, fit, hold_out, read_examples, render
from tinkex.text.chat_format import ChatFormat
from tinkex.tokenizers import Tokenizer, load_tokenizer
from tinkex.types import ForwardBackwardOutput, OptimStepResponse, SaveWeightsResponse, TensorData

TINY = "tinkex/tiny"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    """An engine under the bundled model's name, so that its tokenizer and template are real."""
    return FakeEngine((BaseModel(TINY, context_length=512, vocab_size=2048, arch="fake"),))


@pytest.fixture(scope="module")
def url(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalBackend(data_dir=tmp_path_factory.mktemp("data"), engine=engine) as backend:
        yield backend.base_url


@pytest.fixture(autouse=True)
def _own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    engine.fail = lambda method, subject: None


@pytest.fixture
def train(url: str) -> Callable[..., Result]:
    """Runs the command in this process."""

    def run(*arguments: object) -> Result:
        given = ["train", *map(str, arguments)]
        if "--base-url" not in given and "--resume" not in given:
            given += ["--base-url", url]
        return CliRunner().invoke(cli, given, env={"COLUMNS": "200"})

    return run


@pytest.fixture
def chat() -> ChatFormat:
    return ChatFormat(load_tokenizer(TINY, backend="tokenizers"))


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]}


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(
        tmp_path / "sums.jsonl",
        *(talk(f"{a} and {a + 3}?", f"It is {2 * a + 3}.") for a in range(10, 30)),
    )


def metrics(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def learned(chat: ChatFormat, rendered: Any) -> str:
    tokens = rendered.tokens[1:][rendered.weights[1:] > 0]
    return str(chat.tokenizer.decode(tokens.tolist()))


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def test_run_leaves_its_metrics_its_options_its_checkpoints_and_a_plot(
    train: Callable[..., Result], data: Path, url: str
) -> None:
    result = train(
        data, "--steps", 7, "--batch-size", 4, "--save-every", 3, "--eval-split", 0.2, "--json"
    )
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["status"] == "finished"
    assert (summary["steps"], summary["examples"]) == (7, 16)
    folder = Path(summary["output"])
    assert folder == Path("runs/sums")
    steps = [record for record in metrics(folder) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 8))
    assert [record["epoch"] for record in steps] == [1, 1, 1, 1, 2, 2, 2]
    evaluated = {
        record["step"]: record["eval_loss"] for record in metrics(folder) if "eval_loss" in record
    }
    assert list(evaluated) == [0, 4, 7]
    assert evaluated[7] < evaluated[4] < evaluated[0]
    config = json.loads((folder / "config.json").read_text())
    assert config["data"] == str(data)
    assert (config["base_model"], config["base_url"], config["steps"]) == (TINY, url, 7)
    facts = json.loads((folder / "run.json").read_text())
    assert [saved["step"] for saved in facts["checkpoints"]] == [3, 6, 7]
    assert facts["checkpoints"][-1]["path"] == summary["state_path"]
    with ServiceClient(base_url=url) as service:
        assert (
            service.create_sampling_client(model_path=summary["sampler_path"])
            .result()
            .get_base_model()
            == TINY
        )
    lines = ElementTree.parse(folder / "loss.svg").findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [7, 3]


def test_progress_goes_to_stderr_and_the_summary_to_stdout(
    train: Callable[..., Result], data: Path
) -> None:
    result = train(data, "--steps", 6, "--name", "my sums!")
    assert result.exit_code == 0, result.output
    assert (
        f"{TINY} inside this process: 20 examples, 6 steps of 16, rank 32, into runs/my-sums"
        in result.stderr
    )
    assert "step 1/6  loss " in result.stderr
    assert "step 6/6  loss " in result.stderr
    assert "tokens/s" in result.stderr
    assert "loss per token" in result.stdout
    assert "finished: 6 of 6 steps" in result.stdout
    assert "talk to it: tinkex chat tinker://" in result.stdout
    again = train(data, "--steps", 6, "--name", "my sums!")
    assert "into runs/my-sums-2" in again.stderr


def test_key_is_not_written_down(train: Callable[..., Result], data: Path) -> None:
    assert train(data, "--steps", 1, "--api-key", "tml-secret").exit_code == 0
    assert not any("tml-secret" in file.read_text() for file in Path("runs/sums").iterdir())


def test_two_runs_with_one_seed_are_equal_and_another_seed_is_another_order(
    train: Callable[..., Result], data: Path
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert (
            train(data, "--steps", 6, "--batch-size", 3, "--seed", seed, "--output", name).exit_code
            == 0
        )
    assert metrics("a") == metrics("b")
    assert metrics("a") != metrics("c")


# ── files ─────────────────────────────────────────────────────────────────────────────────────────

BAD = [
    ('{"messages": []}', "messages must be a list with at least one message"),
    ("nonsense", "it is not JSON: Expecting value at character 1"),
    ("[1]", "it is a JSON array, not an object"),
    ('{"text": "x"}', "it is neither a chat nor a pair; its keys are 'text'"),
    ('{"prompt": "x", "completion": ""}', "completion is empty"),
    ('{"prompt": 1, "completion": "x"}', "prompt must be text, not a JSON number"),
    ('{"messages": [{"content": "x"}]}', "message 1 has no role"),
    ('{"messages": [{"role": "user"}]}', "message 1, of the user, has no text"),
    (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "message 1 holds parts that are not text",
    ),
    ('{"messages": [{"role": "user", "content": "x"}]}', "no message is the assistant's"),
]


def test_bad_lines_are_listed_and_stop_training(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    good = talk("a", "b")
    file = write(tmp_path / "mixed.jsonl", good, "", *(line for line, _ in BAD), good)
    result = train(file)
    assert result.exit_code == 1
    for number, (_, reason) in enumerate(BAD, 3):
        assert f"line {number}: {reason}" in result.stderr
    assert "10 of 12 lines" in result.stderr
    assert "--skip-bad" in result.stderr
    assert not Path("runs").exists()
    skipped = train(file, "--skip-bad", "--steps", 1)
    assert skipped.exit_code == 0, skipped.output
    assert "2 examples" in skipped.stderr


def test_line_refused_by_the_template_is_bad(train: Callable[..., Result], tmp_path: Path) -> None:
    odd = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}
    result = train(write(tmp_path / "odd.jsonl", talk("a", "b"), odd))
    assert result.exit_code == 1
    assert "line 2: the model's chat template refuses it: Unknown role: tool" in result.stderr
    assert not Path("runs").exists()


def test_invalid_utf8_is_a_bad_line_and_byte_order_mark_is_ignored(
    tmp_path: Path,
) -> None:
    file = tmp_path / "bytes.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\n{"prompt": "\xff", "completion": "b"}\n'
    )
    examples, bad = read_examples(file)
    assert examples == [Example(1, prompt="a", completion="b")]
    assert [str(one) for one in bad] == ["line 2: it is not UTF-8: byte 13 is 0xff"]


def test_file_in_another_encoding_is_called_that(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "wide.jsonl"
    file.write_text("".join(json.dumps(talk("a", "b")) + "\n" for _ in range(3)), encoding="utf-16")
    result = train(file)
    assert result.exit_code == 1
    assert result.stderr.endswith("nothing was trained (it looks like UTF-16: save it as UTF-8)\n")


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file", 1),
        (["empty.jsonl"], "empty.jsonl is empty", 1),
        ([], "give a file of examples", 2),
        (
            ["sums.jsonl", "--steps", "3", "--epochs", "2"],
            "--epochs and --steps exclude each other",
            2,
        ),
        (["sums.jsonl", "--eval-every", "2"], "--eval-every has no effect without", 2),
        (["sums.jsonl", "--learning-rate", "0"], "must be a number above zero", 2),
        (["sums.jsonl", "--model", "some/other"], "some/other", 1),
    ],
)
def test_invalid_options_give_one_error_line(
    train: Callable[..., Result], data: Path, arguments: list[str], words: str, code: int
) -> None:
    Path("empty.jsonl").write_text("\n\n")
    result = train(*arguments)
    assert words in (result.stderr + str(result.exception))
    assert result.exit_code == code
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("handling", "words", "examples"),
    [
        ("cut", "1 example longer than 12 tokens cut (line 2)", 2),
        ("skip", "1 example longer than 12 tokens left out (line 2)", 1),
        ("refuse", "nothing was trained", None),
    ],
)
def test_long_examples_are_cut_left_out_or_refused_and_counted(
    train: Callable[..., Result], tmp_path: Path, handling: str, words: str, examples: int | None
) -> None:
    file = write(tmp_path / "long.jsonl", talk("a", "b"), talk("a", "word " * 50))
    result = train(
        file, "--steps", 1, "--max-length", 12, "--too-long", handling, "--format", "json"
    )
    assert words in result.stderr
    assert result.exit_code == (0 if examples else 1)
    if examples:
        assert json.loads(result.stdout)["examples"] == examples


@pytest.mark.parametrize("cause", ["too-long", "split", "folder", "unwritable"])
def test_refused_training_leaves_no_run(
    cause: str, train: Callable[..., Result], data: Path, tmp_path: Path, url: str
) -> None:
    def runs() -> int:
        with RestClient(base_url=url) as rest:
            cursor = rest.list_training_runs().result(20).cursor
            assert cursor is not None
            return cursor.total_count

    words: list[object] = [data]
    if cause == "too-long":
        words = [data, "--max-length", 3, "--too-long", "refuse"]
    elif cause == "split":
        words = [write(tmp_path / "one.jsonl", talk("a", "b")), "--eval-split", 0.5]
    elif cause == "folder":
        write(tmp_path / "config.json", {})
        words = [data, "-o", tmp_path]
    else:
        words = [data, "-o", data / "below"]
    before = runs()
    result = train(*words, "--steps", 1)
    assert result.exit_code == 1, result.output
    assert runs() == before


def test_longest_input_of_the_model_is_the_limit(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    file = write(
        tmp_path / "long.jsonl", talk("word " * 600, "never reached"), talk("a", "word " * 600)
    )
    result = train(file, "--steps", 1)
    assert "1 example longer than 512 tokens cut (line 2)" in result.stderr
    assert "1 example longer than 512 tokens left out (line 1)" in result.stderr


def test_evaluation_can_use_its_own_file(
    train: Callable[..., Result], data: Path, tmp_path: Path
) -> None:
    held_out = write(tmp_path / "held.jsonl", talk("x", "y"))
    result = train(
        data, "--eval-file", held_out, "--eval-every", 2, "--steps", 5, "--format", "json"
    )
    assert json.loads(result.stdout)["examples"] == 20
    assert [record["step"] for record in metrics("runs/sums") if "eval_loss" in record] == [
        0,
        2,
        4,
        5,
    ]


# ── what is learned ───────────────────────────────────────────────────────────────────────────────


def test_answers_of_a_chat_are_learned_with_the_end_of_their_turn(chat: ChatFormat) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *talk("Hi?", "Yes.", "Why?", "So.")["messages"],
    ]
    (one,) = chat.conversation(messages)
    assert learned(chat, one) == "Yes.<|end|>So.<|end|>"
    (last,) = chat.conversation(messages, "last")
    assert learned(chat, last) == "So.<|end|>"
    assert last.tokens.tolist() == one.tokens.tolist()
    (everything,) = chat.conversation(messages, "all")
    assert everything.learned == everything.tokens.size - 1


def test_answer_follows_the_very_tokens_that_prompt_for_it(chat: ChatFormat) -> None:
    messages = talk("Hi?", "Yes.", "Why?", "So.")["messages"]
    (one,) = chat.conversation(messages)
    prompt = chat.prompt(messages[:3])
    assert one.tokens[: prompt.size].tolist() == prompt.tolist()
    assert one.weights[prompt.size] == 1


def test_pair_learns_the_completion_and_its_end(chat: ChatFormat) -> None:
    example = Example(1, prompt="2+2=", completion="4\n")
    ((_, text),), _ = render([example], chat)
    assert learned(chat, text) == "4\n<|eos|>"
    assert chat.decode(text.tokens) == "2+2=4\n"
    ((_, asked),), _ = render([example], chat, pairs="chat")
    assert learned(chat, asked) == "4\n<|end|>"
    ((_, everything),), _ = render([example], chat, train_on="all")
    assert everything.learned == everything.tokens.size - 1


def _with_template(template: str | None) -> ChatFormat:
    usual = load_tokenizer(TINY, backend="tokenizers")
    return ChatFormat(Tokenizer(usual._tokenizer, usual._config, template))


def test_template_that_rewrites_earlier_answers_gives_an_example_for_each() -> None:
    thoughts_once = (
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.role == 'assistant' and loop.last %}(thought){% endif %}{{ message.content "
        "}}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = _with_template(thoughts_once)
    examples = chat.conversation(talk("Hi?", "Yes.", "Why?", "So.")["messages"])
    assert [learned(chat, one) for one in examples] == [
        "(thought)Yes.<|end|>",
        "(thought)So.<|end|>",
    ]
    assert chat.decode(examples[1].tokens) == "Hi?\nYes.\nWhy?\n(thought)So.\n"


def test_chat_without_a_template_is_plain_text() -> None:
    chat = _with_template(None)
    assert not chat.has_template
    messages = [{"role": "system", "content": "Be brief."}, *talk("Hi?", "Yes.")["messages"]]
    (one,) = chat.conversation(messages)
    assert chat.tokenizer.decode(one.tokens.tolist()).endswith(
        "System: Be brief.\n\nUser: Hi?\n\nAssistant: Yes.<|eos|>\n\n"
    )
    assert learned(chat, one) == " Yes.<|eos|>"
    assert (
        one.tokens[: chat.prompt(messages[:2]).size].tolist() == chat.prompt(messages[:2]).tolist()
    )


# ── the plan ──────────────────────────────────────────────────────────────────────────────────────


def test_each_epoch_shuffles_all_examples() -> None:
    plan = Plan(examples=10, steps=9, batch_size=4, seed=3)
    epochs = [
        [int(at) for step in range(3 * n, 3 * n + 3) for at in plan.batch(step)] for n in range(3)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert [plan.batch(step).size for step in range(3)] == [4, 4, 2]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_rises_and_then_follows_its_schedule(
    schedule: Any, rates: list[float]
) -> None:
    plan = Plan(examples=1, steps=6, learning_rate=1.0, schedule=schedule, warmup_steps=2)
    assert [plan.rate(step) for step in range(6)] == pytest.approx(rates, abs=1e-6)


def test_held_out_examples_are_not_trained_on(chat: ChatFormat) -> None:
    rendered, _ = render([Example(n, prompt=str(n), completion="x") for n in range(20)], chat)
    rows = fit(rendered, None).rendered
    trained, held_out = hold_out(rows, 0.25, seed=1)
    assert len(held_out) == 5
    assert Counter(map(id, [*trained, *held_out])) == Counter(map(id, rows))
    assert [id(one) for one in hold_out(rows, 0.25, seed=1)[1]] == [id(one) for one in held_out]
    assert [id(one) for one in hold_out(rows, 0.25, seed=2)[1]] != [id(one) for one in held_out]


class _Recorder:
    """A training client that answers at once, and notes when it is asked and when its answers are
    read."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def _future(self, name: str, value: Any) -> Future[Any]:
        log = self.log
        log.append(f"{name} sent")

        class _Noted(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                log.append(f"{name} read")
                return value

        return _Noted()

    def forward_backward(self, data: list[Any], loss_fn: str) -> Future[Any]:
        rows = [
            {"logprobs": TensorData.from_numpy(np.full(datum.model_input.length, -1.0, "f4"))}
            for datum in data
        ]
        return self._future("pass", ForwardBackwardOutput("ArrayRecord", rows, {}))

    def optim_step(self, params: Any) -> Future[Any]:
        return self._future("step", OptimStepResponse())

    def save_state(self, name: str) -> Future[Any]:
        return self._future("save", SaveWeightsResponse(path=f"tinker://run/weights/{name}"))


def test_next_batch_is_sent_before_the_result_of_the_last_is_read(
    chat: ChatFormat, tmp_path: Path
) -> None:
    rows = [chat.pair("a", "b"), chat.pair("c", "d")]
    client: Any = _Recorder()
    assert FineTune(
        client, Plan(examples=2, steps=3), rows, RunFolder.create(tmp_path / "run", {}, {})
    ).run()
    sent, read = (["pass sent", "step sent"], ["pass read", "step read"])
    assert client.log == [*sent, *sent, *read, *sent, "save sent", *read, *read, "save read"]


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────


def kept(folder: str) -> list[int]:
    return [
        saved["step"]
        for saved in json.loads((Path(folder) / "run.json").read_text())["checkpoints"]
    ]


def there(url: str, folder: str) -> list[str]:
    """The training checkpoints of a folder's run that the server has."""
    path = json.loads((Path(folder) / "run.json").read_text())["checkpoints"][-1]["path"]
    with RestClient(base_url=url) as rest:
        found = rest.list_checkpoints(path.split("/")[2]).result().checkpoints
    return sorted(one.tinker_path for one in found if one.checkpoint_type == "training")


def paths(folder: str) -> list[str]:
    return [
        saved["path"]
        for saved in json.loads((Path(folder) / "run.json").read_text())["checkpoints"]
    ]


def test_run_keeps_its_last_checkpoints_and_deletes_the_others(
    train: Callable[..., Result], data: Path, url: str
) -> None:
    result = train(data, "--steps", 9, "--batch-size", 4, "--save-every", 2, "--output", "few")
    assert result.exit_code == 0, result.output
    assert kept("few") == [6, 8, 9]
    assert there(url, "few") == paths("few")
    assert "checkpoints kept: 3 of 5 (--keep)" in result.stdout
    Path("options.toml").write_text("keep = 1\n")
    options = ("--steps", 9, "--batch-size", 4, "--save-every", 2, "--config", "options.toml")
    assert train(data, *options, "--output", "one").exit_code == 0
    assert kept("one") == [9]
    assert there(url, "one") == paths("one")
    for number, every in enumerate(("all", "0")):
        assert train(data, *options, "--keep", every, "--output", f"all{number}").exit_code == 0
        assert kept(f"all{number}") == [2, 4, 6, 8, 9]
    wrong = train(data, "--keep", "some")
    assert wrong.exit_code == 2
    assert "'some' is neither a whole number (0 or more) nor 'all'" in wrong.stderr


def test_best_checkpoint_is_kept_besides_the_last(
    train: Callable[..., Result], data: Path, url: str
) -> None:
    evaluated = ("--eval-split", 0.2, "--eval-every", 2, "--learning-rate", 1e-9, "--keep", 1)
    result = train(
        data,
        "--steps",
        8,
        "--batch-size",
        4,
        "--save-every",
        2,
        *evaluated,
        "--output",
        "run",
        "--json",
    )
    assert result.exit_code == 0, result.output
    losses = {
        record["step"]: record["eval_loss"] for record in metrics("run") if "eval_loss" in record
    }
    del losses[0]  # before there was a checkpoint
    best = min(losses, key=lambda step: losses[step])
    assert kept("run") == sorted({best, 8})
    assert there(url, "run") == paths("run")
    assert json.loads(result.stdout)["best_path"] == paths("run")[0]


def test_best_of_a_folder_is_by_its_loss_and_not_by_its_age(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, {})
    for step, loss in enumerate([None, 2.0, math.nan, 1.0, 3.0, 4.0], 1):
        folder.add_checkpoint(step, f"tinker://r/weights/{step}", loss)
    assert folder.best == (4, "tinker://r/weights/4")
    assert folder.surplus(1) == [f"tinker://r/weights/{step}" for step in (1, 2, 3, 5)]
    assert folder.surplus(9) == []
    folder.forget("tinker://r/weights/1")
    again = RunFolder.open(tmp_path / "run")
    assert (again.surplus(1), again.checkpoint) == (folder.surplus(1), (6, "tinker://r/weights/6"))


def test_resumed_run_deletes_its_older_checkpoints(
    train: Callable[..., Result], data: Path, engine: FakeEngine, url: str
) -> None:
    _at_step(engine, 5, _interrupt)
    few = ("--steps", 12, "--batch-size", 3, "--save-every", 2)
    assert train(data, *few, "--keep", 2, "--output", "run").exit_code == 130
    before = paths("run")
    assert len(before) == 2
    resumed = train("--resume", "run", "--keep", 1)
    assert resumed.exit_code == 0, resumed.output
    assert kept("run") == [12]
    with RestClient(base_url=url) as rest:
        left = rest.list_checkpoints(before[0].split("/")[2]).result().checkpoints
    assert left == []


def test_run_that_kept_all_checkpoints_keeps_them_on_resume(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    _at_step(engine, 9, _interrupt)
    few = ("--steps", 12, "--batch-size", 3, "--save-every", 2)
    assert train(data, *few, "--keep", "all", "--output", "run").exit_code == 130
    before = paths("run")
    assert len(before) > 3
    config = json.loads(Path("run/config.json").read_text())
    del config["keep"]  # as the versions before the option wrote it
    Path("run/config.json").write_text(json.dumps(config))
    resumed = train("--resume", "run")
    assert resumed.exit_code == 0, resumed.output
    assert paths("run")[: len(before)] == before
    assert kept("run")[-1] == 12


def test_run_without_the_option_prints_how_many_it_keeps(
    train: Callable[..., Result], data: Path
) -> None:
    assert train(data, "--steps", 1, "--output", "run").exit_code == 0
    assert json.loads(Path("run/config.json").read_text())["keep"] == 3


def test_undeletable_checkpoint_is_reported_once_and_retried(
    tmp_path: Path,
) -> None:
    folder, said = RunFolder.create(tmp_path / "run", {}, {}), list[str]()
    tried, refused = list[str](), {"1", "2"}

    def delete(path: str) -> None:
        tried.append(path)
        if path in refused:
            raise TinkerError("it is somebody's")

    pruning = Pruning(folder, 1, delete, said.append)
    for step in range(1, 5):
        folder.add_checkpoint(step, str(step))
        pruning.look()
        pruning.look()
        if step == 3:
            refused.clear()
    assert tried == ["1", "1", "1", "2", "3"]
    assert said == ["1 was not deleted; a later checkpoint tries again: it is somebody's"]
    assert [saved["path"] for saved in folder.facts["checkpoints"]] == ["4"]


def test_full_server_disk_ends_a_run_with_advice(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    saves = 0

    def fail(method: str, subject: str) -> None:
        nonlocal saves
        saves += method == "save"
        if method == "save" and saves > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert train(data, *OPTIONS, "--output", "straight").exit_code == 0
    engine.fail = fail
    result = train(data, *OPTIONS, "--output", "full")
    assert result.exit_code == 1
    assert saves == 2
    assert (
        "was not saved: the server's disk is full\nsaved after step 5: tinker://" in result.stderr
    )
    assert (
        "make room where the server keeps checkpoints (`tinkex checkpoint delete`), then go on"
        in result.stderr
    )
    assert "going on from the last checkpoint" not in result.stderr
    engine.fail = lambda method, subject: None
    assert train("--resume", "full").exit_code == 0
    assert metrics("full") == metrics("straight")


def test_full_local_disk_ends_a_run_with_its_record(
    train: Callable[..., Result], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, written = Path.replace, 0

    def replace(draft: Path, path: Path) -> Path:
        nonlocal written
        written += path.name == "run.json"
        # the first is the folder's beginning, the second a checkpoint
        if path.name == "run.json" and written > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(draft, path)

    monkeypatch.setattr(Path, "replace", replace)
    result = train(data, *OPTIONS, "--output", "full")
    assert result.exit_code == 1
    assert (
        "full cannot be written to: No space left on device\nsaved after step 5: tinker://"
        in result.stderr
    )
    assert kept("full") == [5]


# ── broken off, and taken up ──────────────────────────────────────────────────────────────────────


def _at_step(engine: FakeEngine, number: int, act: Callable[[], None]) -> None:
    """Do something when the engine is about to make its so many-th optimizer step from now."""
    left = [number]

    def fail(method: str, subject: str) -> None:
        if method == "optim_step":
            left[0] -= 1
            if left[0] == 0:
                act()

    engine.fail = fail


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_second_command_in_a_folder_is_refused(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    few = ("--steps", 6, "--batch-size", 3, "--save-every", 1, "--keep", 1, "--output", "run")
    _at_step(engine, 3, _interrupt)
    assert train(data, *few).exit_code == 130
    folder, was = os.open("run", os.O_RDONLY), Path("run/run.json").read_bytes()
    fcntl.flock(folder, fcntl.LOCK_EX)
    for words in (("--resume", "run"), (data, *few)):
        second = train(*words)
        assert (second.exit_code, second.stderr.splitlines()[-1]) == (
            1,
            "Error: another `tinkex train` is running in run",
        )
    assert Path("run/run.json").read_bytes() == was
    os.close(folder)
    resumed = train("--resume", "run")
    assert resumed.exit_code == 0, resumed.output
    assert (
        train(data, *few).stderr.splitlines()[-1]
        == "Error: run holds a finished run: give another --output"
    )


OPTIONS = (
    "--steps",
    12,
    "--batch-size",
    3,
    "--eval-split",
    0.1,
    "--save-every",
    5,
    "--eval-every",
    4,
)


def test_interrupted_run_resumes_to_the_same_result(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    assert train(data, *OPTIONS, "--output", "straight").exit_code == 0
    _at_step(engine, 7, _interrupt)
    broken = train(data, *OPTIONS, "--output", "broken", "--format", "json")
    assert broken.exit_code == 130, broken.output
    assert "stopping after this step" in broken.stderr
    summary = json.loads(broken.stdout)
    assert summary["status"] == "interrupted"
    assert 7 <= summary["steps"] <= 9
    assert f"{summary['steps']:06d}" in summary["state_path"]
    assert summary["resume"] == "tinkex train --resume broken"
    resumed = train("--resume", "broken", "--format", "json")
    assert resumed.exit_code == 0, resumed.output
    assert f"after step {summary['steps']} of 12" in resumed.stderr
    assert metrics("broken") == metrics("straight")
    finished = train("--resume", "broken")
    assert finished.exit_code == 1
    assert "is finished" in finished.stderr


def test_steps_after_the_last_checkpoint_are_made_again(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    def die() -> None:
        raise EngineError("this cannot be", "user")

    assert train(data, *OPTIONS, "--output", "straight").exit_code == 0
    _at_step(engine, 8, die)
    broken = train(data, *OPTIONS, "--output", "broken")
    assert broken.exit_code == 1
    assert "this cannot be" in broken.stderr
    assert "saved after step 5: tinker://" in broken.stderr
    assert "go on with: tinkex train --resume broken" in broken.stderr
    assert max(record["step"] for record in metrics("broken")) > 5
    assert train("--resume", "broken").exit_code == 0
    assert metrics("broken") == metrics("straight")


def test_lost_run_is_restored_automatically(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    def lose() -> None:
        raise EngineError("a cable was cut", "server")

    assert train(data, *OPTIONS, "--output", "straight").exit_code == 0
    _at_step(engine, 8, lose)
    result = train(data, *OPTIONS, "--output", "lost")
    assert result.exit_code == 0, result.output
    assert "going on from the last checkpoint" in result.stderr
    assert metrics("lost") == metrics("straight")


def test_repeatedly_lost_run_fails(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    def fail(method: str, subject: str) -> None:
        if method == "optim_step":
            raise EngineError("a cable was cut", "server")

    engine.fail = fail
    result = train(data, *OPTIONS)
    assert result.exit_code == 1
    assert result.stderr.count("going on from the last checkpoint") == 3
    assert "no checkpoint was saved; `tinkex train --resume runs/sums` starts over" in result.stderr
    engine.fail = lambda method, subject: None
    assert train("--resume", "runs/sums").exit_code == 0
    assert len([record for record in metrics("runs/sums") if "loss" in record]) == 12


def test_second_interrupt_ends_the_run_at_once(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    def insist() -> None:
        heeded = signal.getsignal(signal.SIGINT)
        for _ in range(50):  # signals of one kind that come together are one
            if signal.getsignal(signal.SIGINT) is not heeded:
                return
            _interrupt()
            time.sleep(0.1)

    _at_step(engine, 7, insist)
    result = train(data, *OPTIONS)
    assert result.exit_code != 0
    assert "Ctrl-C again: at once" in result.stderr
    assert "saved after step 5: tinker://" in result.stderr
    assert "finished" not in result.stdout
    assert "interrupted" not in result.stdout


def test_resume_needs_the_same_options_and_examples(
    train: Callable[..., Result], data: Path, engine: FakeEngine
) -> None:
    _at_step(engine, 2, _interrupt)
    assert train(data, *OPTIONS, "--output", "run").exit_code == 130
    assert (
        "already holds a run: continue it with `tinkex"
        in train(data, *OPTIONS, "--output", "run").stderr
    )
    other = train("--resume", "run", "--steps", 3)
    assert other.exit_code == 2
    assert "--steps has no effect with --resume" in other.stderr
    data.rename("moved.jsonl")
    gone = train("--resume", "run").stderr
    assert gone.endswith(
        "No such file or directory (if it was moved: tinkex train --resume run FILE)\n"
    )
    with Path("moved.jsonl").open("a") as file:
        file.write(json.dumps(talk("a", "b")) + "\n")
    changed = train("moved.jsonl", "--resume", "run")
    assert changed.exit_code == 1
    assert "can only resume with the same examples" in changed.stderr
    Path("moved.jsonl").write_text(
        "".join(Path("moved.jsonl").read_text().splitlines(keepends=True)[:-1])
    )
    assert train("moved.jsonl", "--resume", "run").exit_code == 0
    assert "holds no run" in train("--resume", "nowhere").stderr
    assert "holds a finished run" in train("moved.jsonl", "--output", "run").stderr


def test_weights_of_a_resumed_run_equal_an_uninterrupted_run_exactly(
    model_dir: Path, tmp_path: Path, data: Path
) -> None:
    store = tmp_path / "store"

    def train(*arguments: object) -> dict[str, Any]:
        result = CliRunner().invoke(cli, ["train", *map(str, arguments), "--format", "json"])
        assert result.exit_code in (0, 130), result.output
        summary: dict[str, Any] = json.loads(result.stdout)
        return summary

    def tensors(summary: dict[str, Any]) -> dict[str, Any]:
        run, _, name = summary["state_path"].removeprefix("tinker://").partition("/weights/")
        place = store / "checkpoints" / run.replace(":", "_") / "weights" / name
        return load_file(place / "adapter_model.safetensors") | load_file(
            place / "optimizer.safetensors"
        )

    with LocalBackend({MODEL: model_dir}, data_dir=store) as backend:
        options = (
            data,
            "--model",
            MODEL,
            "--base-url",
            backend.base_url,
            "--rank",
            4,
            "--steps",
            6,
            "--batch-size",
            4,
        )
        straight = train(*options, "--output", "straight")
        saw = tmp_path / "broken" / "metrics.jsonl"

        def wait_and_interrupt() -> None:
            while not saw.exists() or len(saw.read_text().splitlines()) < 2:
                time.sleep(0.005)
            _interrupt()

        watcher = Thread(target=wait_and_interrupt)
        watcher.start()
        broken = train(*options, "--output", "broken")
        watcher.join()
        assert 2 <= broken["steps"] < 6
        resumed = train("--resume", "broken")
    assert resumed["loss"] == straight["loss"]
    assert metrics("broken") == metrics("straight")
    there, here, before = tensors(resumed), tensors(straight), tensors(broken)
    assert len(there) > 20
    assert there.keys() == here.keys()
    assert all(np.array_equal(there[name], here[name]) for name in here)
    assert not all(np.array_equal(before[name], here[name]) for name in here)


# ── options from files, and servers ───────────────────────────────────────────────────────────────


def test_options_may_come_from_a_file_and_the_command_line_wins(
    train: Callable[..., Result], data: Path
) -> None:
    Path("options.toml").write_text(
        f'data = "{data}"\nepochs = 2\nbatch-size = 5\nlearning_rate = 0.01\nrank = 8\n'
    )
    assert train("--config", "options.toml", "--rank", 4, "--output", "a").exit_code == 0
    config = json.loads(Path("a/config.json").read_text())
    assert (config["epochs"], config["batch_size"], config["learning_rate"], config["rank"]) == (
        2,
        5,
        0.01,
        4,
    )
    assert train("--config", "options.toml", "--steps", 3, "--output", "b").exit_code == 0
    assert "epochs" not in json.loads(Path("b/config.json").read_text())
    assert train("--config", "a/config.json", "--output", "c").exit_code == 0
    assert json.loads(Path("c/config.json").read_text()) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rnak = 3", "there is no option 'rnak'"),
        ("rank = [3]", "rank must be one value"),
        ("rank = 'many'", "'many' is not a valid integer"),
        ("rank", "options.toml"),
        ('resume = "x"', "there is no option 'resume'"),
    ],
)
def test_malformed_options_file_gives_one_error_line(
    train: Callable[..., Result], data: Path, text: str, words: str
) -> None:
    Path("options.toml").write_text(text + "\n")
    result = train(data, "--config", "options.toml")
    assert result.exit_code == 2
    assert words in result.stderr


def test_default_target_is_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert server_url(None, None) == "local"
    assert server_url("http://localhost:1", None) == "http://localhost:1"
    assert server_url(None, "tml-key") is None
    monkeypatch.setenv("TINKER_BASE_URL", "http://localhost:1")
    assert server_url(None, None) is None
    monkeypatch.delenv("TINKER_BASE_URL")
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    assert server_url(None, None) is None
    monkeypatch.delenv("TINKER_API_KEY")
    (tmp_path / ".tinker").mkdir()
    (tmp_path / ".tinker" / "credentials.json").write_text(
        '{"default": "a", "keys": {"a": {"key": "tml-x"}}}'
    )
    assert server_url(None, None) is None


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ('[{"prompt": "a", "completion": "b"},\n{}]', "one JSON array"),
        ("a,b\nc,d", "tinkex train -h"),
    ],
)
def test_file_without_examples_gets_advice(
    train: Callable[..., Result], text: str, advice: str
) -> None:
    Path("examples").write_text(text)
    result = train("examples")
    assert result.exit_code == 1
    assert advice in result.stderr.splitlines()[-1]
    assert "--skip-bad" not in result.stderr


def test_server_elsewhere_needs_the_name_of_a_model(
    train: Callable[..., Result], data: Path, tmp_path: Path, engine: FakeEngine
) -> None:
    with serving(FakeEngine(engine.base_models), tmp_path / "server") as address:
        result = train(data, "--base-url", address)
        assert result.exit_code == 2
        assert f"--base-model is required with a server: {address}; it has {TINY}" in result.stderr
        named = train(data, "--base-url", address, "--model", TINY, "--steps", 2)
        assert named.exit_code == 0, named.output
        assert f"tinkex/tiny at {address}" in named.stderr
        assert f"--base-url {address}" in named.stdout


def test_chart_of_no_points_and_of_one_point_is_drawn() -> None:
    for points in ([], [(1.0, 2.0)]):
        assert ElementTree.fromstring(chart({"loss": points}, "a < b")).tag.endswith("svg")


@pytest.mark.parametrize(
    ("first", "last", "labels"),
    [
        (1, 3, [1, 2, 3]),
        (1, 40, [10, 20, 30, 40]),
        (7, 7, [7]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
    ],
)
def test_chart_labels_steps_at_their_positions(first: int, last: int, labels: list[int]) -> None:
    points = [(float(step), 1.0 / (step + 1)) for step in range(first, last + 1)]
    drawn = ElementTree.fromstring(chart({"loss": points}, "title"))
    svg = "{http://www.w3.org/2000/svg}"
    (line,) = drawn.findall(f"{svg}polyline")
    places = [place.split(",")[0] for place in line.get("points", "").split()]
    at_axis = [text for text in drawn.findall(f"{svg}text") if text.get("text-anchor") == "middle"][
        1:
    ]
    assert [text.text for text in at_axis] == [str(label) for label in labels]
    assert [text.get("x") for text in at_axis] == [places[label - first] for label in labels]


def test_plot_names_the_steps_at_its_ends() -> None:
    assert plot([3.0, 2.0, 1.0], width=20, height=2, ends=("step 5", 40)).splitlines()[
        -1
    ].split() == [
        "step",
        "5",
        "40",
    ]


@pytest.mark.slow
def test_lost_server_reports_the_last_checkpoint(
    train: Callable[..., Result], data: Path, tmp_path: Path, engine: FakeEngine
) -> None:
    own, server = FakeEngine(engine.base_models), ExitStack()
    _at_step(own, 8, lambda: Thread(target=server.close).start())
    configure(patience=0.2)
    try:
        address = server.enter_context(serving(own, tmp_path / "server"))
        own.delay = 0.05
        result = train(
            data,
            "--base-url",
            address,
            "--model",
            TINY,
            *OPTIONS,
            "--steps",
            60,
            "--output",
            "gone",
        )
    finally:
        configure()
        server.close()
    assert result.exit_code == 1
    assert f"cannot reach {address.removeprefix('http://')}" in result.stderr
    assert "saved after step " in result.stderr
    assert "go on with: tinkex train --resume gone" in result.stderr
    with serving(FakeEngine(engine.base_models), tmp_path / "server") as elsewhere:
        done = train("--resume", "gone", "--base-url", elsewhere, "--format", "json")
    assert json.loads(done.stdout)["status"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_bundled_model_learns_and_a_real_interrupt_is_heeded(data: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tinkex")), "train", str(data), "--steps", "200"]
    environment = {**os.environ, "TINKEX_DATA_DIR": str(tmp_path / "data"), "TINKEX_HUB_CACHE": "0"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told = ""
    while "step 1/" not in told:
        told += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    shown, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after this step" in rest
    assert "go on with: tinkex train --resume runs/sums" in shown
    assert "Traceback" not in rest
