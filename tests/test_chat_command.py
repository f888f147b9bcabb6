"""`tinkex chat`: answers as they come, commands, interruptions, and text that is never half a
character."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tinkex
from support import MODEL
from tinkex import LocalBackend, ServiceClient, types
from tinkex.cli import chat as command
from tinkex.cli.chat import Chat
from tinkex.cli.main import cli
from tinkex.cli.output import CommandError
from tinkex.client.futures.streams import SampleStream
from tinkex.engine.api import BaseModel
from tinkex.engine.fake import FakeEngine
from tinkex.finetune import read_examples
from tinkex.text.chat_format import AnswerText, ChatFormat
from tinkex.tokenizers import Tokenizer, load_tokenizer

TINY = "tinkex/tiny"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(
        (BaseModel(TINY, context_length=512, vocab_size=2048, arch="fake"),), longest_prompt=512
    )


@pytest.fixture(scope="module")
def service(
    engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceClient]:
    with (
        LocalBackend(data_dir=tmp_path_factory.mktemp("data"), engine=engine) as backend,
        ServiceClient(base_url=backend.base_url) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    engine.fail = lambda method, subject: None


class Words:
    """A tokenizer of the simplest kind: text goes in as bytes, and what comes out are words."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" w{token}" for token in tokens)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def talk(service: ServiceClient, told: list[str]) -> Chat:
    """A conversation with made-up answers of twelve tokens, which never end by themselves."""
    sampler = service.create_sampling_client(base_model=TINY).result()
    params = types.SamplingParams(max_tokens=12, temperature=0.7, seed=1)
    return Chat(sampler, ChatFormat(Words()), params=params, context=512, tell=told.append)


@pytest.fixture
def piped(service: ServiceClient) -> Callable[..., Result]:
    """Runs the command in this process, with text for its standard input."""

    def run(text: str, *arguments: str) -> Result:
        given = [
            "chat",
            "--base-url",
            service.holder.config.base_url,
            "--max-tokens",
            "12",
            *arguments,
        ]
        return CliRunner().invoke(cli, given, input=text)

    return run


def plain_format() -> ChatFormat:
    usual = load_tokenizer(TINY, backend="tokenizers")
    return ChatFormat(Tokenizer(usual._tokenizer, usual._config, None))


# ── text as it comes ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text", ["naïve 日本語 😀👩‍👩‍👧 done", "é", "😀", "plain words, and\nlines", "ends so: 😀"]
)
def test_pieces_are_whole_characters_and_make_up_the_text(text: str) -> None:
    chat = ChatFormat(load_tokenizer(TINY, backend="tokenizers"))
    tokens, shown = chat.encode(text), AnswerText(chat)
    assert any("\ufffd" in chat.decode([token]) for token in tokens) == (not text.isascii())
    pieces = [shown.add(token) for token in tokens]
    pieces.append(shown.end())
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 1 or len(text) == 1


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    chat = ChatFormat(load_tokenizer(TINY, backend="tokenizers"))
    shown = AnswerText(chat)
    half = chat.encode("😀")[:-1]
    assert [shown.add(token) for token in half] == [""] * len(half)
    assert set(shown.end()) == {"\ufffd"}


def test_answer_ends_at_the_end_of_its_turn() -> None:
    chat = ChatFormat(load_tokenizer(TINY, backend="tokenizers"))
    assert chat.stop == [1, 6]
    shown = AnswerText(chat)
    assert "".join(shown.add(token) for token in chat.encode("Yes.<|end|>And more")) == "Yes."
    assert shown.ended
    assert shown.end() == ""


@pytest.mark.parametrize("following", ["User: And you?", "System: no"])
def test_answer_without_a_template_ends_at_the_next_speaker(following: str) -> None:
    chat = plain_format()
    shown = AnswerText(chat)
    pieces = [shown.add(token) for token in chat.encode(f" Yes,\nUse it.\n\n{following}")]
    assert "".join(pieces).strip() == "Yes,\nUse it."
    assert shown.ended
    assert not any("User" in piece or "Sys" in piece for piece in pieces)


def test_partial_stop_text_is_shown() -> None:
    chat = plain_format()
    shown = AnswerText(chat)
    pieces = [shown.add(token) for token in chat.encode("Yes\nUser")]
    assert "".join(pieces) == "Yes"
    assert shown.end() == "\nUser"


# ── a conversation ────────────────────────────────────────────────────────────────────────────────


def test_answer_is_shown_piece_by_piece_and_remembered(talk: Chat) -> None:
    pieces: list[str] = []
    answer = talk.ask("Hello", pieces.append)
    assert len(pieces) > 3
    assert "".join(pieces).rstrip() == answer.text
    assert (answer.tokens, answer.reason) == (12, "length")
    assert [message["content"] for message in talk.messages] == ["Hello", answer.text]
    assert talk.prompt() == talk.format.prompt(talk.messages).tolist()


def test_commands_change_the_conversation(talk: Chat) -> None:
    talk.ask("One", lambda piece: None)
    talk.ask("Two", lambda piece: None)
    talk.command("/system Be kind.")
    assert talk.command("/save talk.jsonl") == "saved 4 messages to talk.jsonl"
    ((example,), bad) = read_examples("talk.jsonl")
    assert not bad
    assert [message["role"] for message in example.messages] == [
        "system",
        *["user", "assistant"] * 2,
    ]
    kept = list(talk.messages)
    talk.command("/undo")
    assert talk.messages == kept[:2]
    talk.command("/reset")
    talk.command("/system")
    assert (talk.messages, talk.system) == ([], None)
    talk.command("/load talk.jsonl")
    assert (talk.messages, talk.system) == (kept, "Be kind.")
    assert "/undo" in (talk.command("/help") or "")
    assert talk.command("/quit") is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/frob", "there is no command /frob"),
        ("/undo", "nothing to take back"),
        ("/save", "needs the name of a file"),
        ("/save conversation", "nothing to save"),
        ("/load nowhere", "cannot be read"),
        ("/load empty", "holds no conversation"),
        ("/load pair", "holds no conversation"),
    ],
)
def test_failed_command_reports_the_reason(talk: Chat, line: str, words: str) -> None:
    Path("empty").write_text("")
    Path("pair").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(CommandError, match=words):
        talk.command(line)


def test_unwritable_conversation_is_reported(talk: Chat) -> None:
    talk.messages.append({"role": "user", "content": "one"})
    with pytest.raises(CommandError, match="cannot be written"):
        talk.command("/save nowhere/at/all")
    assert talk.command("/save here") == "saved 1 message to here"


def test_interrupt_ends_the_answer_and_keeps_the_conversation(
    talk: Chat, engine: FakeEngine
) -> None:
    steps = 0

    def interrupt(method: str, subject: str) -> None:
        nonlocal steps
        if method == "sample_step":
            steps += 1
            if steps == 5:
                os.kill(os.getpid(), signal.SIGINT)

    talk.params = talk.params.model_copy(update={"max_tokens": 400})
    engine.fail = interrupt
    engine.step_delay = 0.02
    try:
        answer = talk.ask("Hello", lambda piece: None)
    finally:
        engine.step_delay = 0.0
    assert answer.reason == "interrupted"
    assert 3 <= answer.tokens < 20
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}
    talk.params = talk.params.model_copy(update={"max_tokens": 12})
    engine.fail = lambda method, subject: None
    assert talk.ask("Again", lambda piece: None).tokens == 12


def test_failure_leaves_the_conversation_as_it_was(talk: Chat, engine: FakeEngine) -> None:
    def fail(method: str, subject: str) -> None:
        if method == "sample_step":
            raise ValueError("broken")

    engine.fail = fail
    with pytest.raises(tinkex.TinkerError):
        talk.ask("Hello", lambda piece: None)
    assert talk.messages == []


def test_oldest_messages_make_room(talk: Chat, told: list[str]) -> None:
    talk.context = 300
    for number in range(6):
        assert talk.ask(f"message {number} " + "word " * 8, lambda piece: None).text
        assert len(talk.prompt()) <= 300 - 12
    assert any("no longer fit" in text for text in told)
    assert len(told) == len(set(told))
    assert len(talk.messages) == 12


@pytest.mark.parametrize("raw", [False, True])
def test_message_that_fits_in_no_case_is_refused_with_its_length(
    talk: Chat, told: list[str], raw: bool
) -> None:
    talk.context, talk.raw = 40, raw
    with pytest.raises(
        ValueError, match=r"^the message is too long: \d+ tokens, but the model takes 40 in all$"
    ):
        talk.ask("word " * 40, lambda piece: None)
    assert (talk.messages, told) == ([], [])
    assert talk.ask("word", lambda piece: None).text


# ── at a terminal, and piped ──────────────────────────────────────────────────────────────────────


def converse(talk: Chat, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    command._converse(talk)


def test_backslash_continues_a_message_and_the_end_of_input_leaves(
    talk: Chat, told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(talk, "one\\\ntwo\n\n/frob\n/undo\nthree\n", monkeypatch)
    assert [message["content"] for message in talk.messages if message["role"] == "user"] == [
        "three"
    ]
    assert told[1].startswith("there is no command /frob")
    assert told[2] == "taken back; 0 messages left"
    assert told[-1].startswith("(cut off: --max-tokens")
    assert talk.messages[-1]["content"] in capsys.readouterr().out


def test_error_in_an_answer_does_not_end_the_conversation(
    talk: Chat, told: list[str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([True])

    def fail(method: str, subject: str) -> None:
        if method == "sample_start" and next(failures, False):
            raise ValueError("broken")

    engine.fail = fail
    converse(talk, "one\ntwo\n/quit\nthree\n", monkeypatch)
    assert any(text.startswith("Error: ") for text in told)
    assert [message["content"] for message in talk.messages if message["role"] == "user"] == ["two"]


def test_answers_cannot_move_the_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command._write("a\x1b[2Jb\r\n\tc\x9bd")
    assert capsys.readouterr().out == "a[2Jb\n\tcd"


def test_each_piped_line_is_answered_in_one_conversation(piped: Callable[..., Result]) -> None:
    result = piped("one\n\ntwo\n", "--format", "json", "--seed", "3")
    assert result.exit_code == 0, result.output
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["message"], first["tokens"], first["finish_reason"]) == ("one", 12, "length")
    alone = json.loads(piped("two\n", "--format", "json", "--seed", "3").stdout)
    assert second["answer"] != alone["answer"]
    again = json.loads(
        piped("one\n/reset\ntwo\n", "--format", "json", "--seed", "3").stdout.splitlines()[1]
    )
    assert again["answer"] == alone["answer"]
    plain = piped("two\n", "--seed", "3")
    assert plain.stdout.rstrip() == alone["answer"]


def test_changes_of_logits_reach_the_server(talk: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[types.SamplingParams] = []
    stream = talk.sampler.sample_stream

    def spy(prompt: types.ModelInput, params: types.SamplingParams) -> SampleStream:
        seen.append(params)
        return stream(prompt, params)

    monkeypatch.setattr(talk.sampler, "sample_stream", spy)
    talk.params = talk.params.model_copy(update={"min_p": 0.1, "bad_words": ["no"]})
    talk.ask("hello", lambda piece: None)
    assert (seen[0].min_p, seen[0].bad_words) == (0.1, ["no"])


def test_changes_of_logits_are_options_of_chat(piped: Callable[..., Result]) -> None:
    assert piped("one\n", "--presence-penalty", "1", "--logit-bias", "5=1").exit_code == 0
    refused = piped("one\n", "--presence-penalty", "3")
    assert refused.exit_code == 2
    assert "presence_penalty must be between -2 and 2" in refused.output


def test_raw_text_is_continued_without_memory(piped: Callable[..., Result]) -> None:
    result = piped("one\none\n", "--raw", "--seed", "3", "--format", "json")
    first, second = (json.loads(line)["answer"] for line in result.stdout.splitlines())
    assert first == second
    assert piped("", "--raw", "--system", "x").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope/model"], "nope/model"),
        (["tinker://nope/sampler_weights/x"], "there is no checkpoint"),
    ],
)
def test_chat_with_a_missing_checkpoint_fails(
    piped: Callable[..., Result], arguments: list[str], words: str
) -> None:
    result = piped("hello\n", *arguments)
    assert result.exit_code == 1
    assert words in str(result.exception)


def test_checkpoint_of_either_kind_can_be_talked_to(
    piped: Callable[..., Result], service: ServiceClient
) -> None:
    client = service.create_lora_training_client(TINY, rank=4).result()
    for path in (
        client.save_state("a").result().path,
        client.save_weights_for_sampler("a").result().path,
    ):
        result = piped("hello\n", path)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()


def test_stream_that_is_left_does_not_disturb_later_samples(embedded_url: str) -> None:
    prompt = types.ModelInput.from_ints([5, 6, 7])
    with ServiceClient(base_url=embedded_url) as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        params = types.SamplingParams(max_tokens=100, seed=1, stop=[])
        expected = sampler.sample(prompt, 1, params).result(20).sequences[0].tokens
        for _ in range(2):
            with sampler.sample_stream(prompt, params) as stream:
                next(iter(stream))
        assert sampler.sample(prompt, 1, params).result(20).sequences[0].tokens == expected


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_bundled_model_answers_and_stops(tmp_path: Path) -> None:
    shown = subprocess.run(
        [
            str(Path(sys.executable).with_name("tinkex")),
            "chat",
            "--temperature",
            "0",
            "--format",
            "json",
        ],
        input="Who is the mayor of Talmere?\n12 plus 30?\n",
        env={**os.environ, "TINKEX_DATA_DIR": str(tmp_path / "data"), "TINKEX_HUB_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert shown.returncode == 0, shown.stderr
    first, second = (json.loads(line) for line in shown.stdout.splitlines())
    assert "Pike" in first["answer"]
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "stop")
    assert "<|" not in first["answer"]
