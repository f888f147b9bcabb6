"""`tinkex chat`: talk to a base model or a checkpoint, token by token."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tinkex.cli.options import Connection, connecting, option, text_or_json
from tinkex.cli.output import CommandError, counted, never_fail_to_write, plain_console
from tinkex.cli.progress import waiting
from tinkex.cli.sample_command import params_of, shaping_of, shaping_options, top_p_option
from tinkex.cli.servers import context_of, model_of, place_of, tokenizer_of
from tinkex.client.sampling_client import SamplingClient
from tinkex.client.service import ServiceClient
from tinkex.errors import TinkerError
from tinkex.text.chat_format import ASSISTANT, AnswerText, ChatFormat, Message
from tinkex.tokenizers import get_tokenizer_id
from tinkex.types.checkpoints import SCHEME
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SamplingParams

MAX_TOKENS = 1024
PROMPT, GOES_ON = "> ", "… "
COMMANDS = {
    "/reset": "forget the conversation, not the system message",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/undo": "take back the last message and its answer",
    "/save FILE": "write the conversation to a file, as a line that `tinkex train` takes",
    "/load FILE": "load a saved conversation",
    "/help": "show this",
    "/quit": "leave (so does Ctrl-D)",
}


@dataclass(frozen=True)
class Answer:
    """An answer of the model, and why it stopped: stop, length or interrupted."""

    text: str
    tokens: int
    reason: str


@dataclass
class Chat:
    """A conversation with a model."""

    sampler: SamplingClient
    format: ChatFormat
    params: SamplingParams
    messages: list[Message] = field(default_factory=list)
    context: int | None = None
    """The context length of the model, if known."""
    system: str | None = None
    raw: bool = False
    """True if each message is plain text to continue, without chat format and history."""
    tell: Callable[[str], object] = lambda text: None
    _left_out: int = field(default=0, init=False)

    def prompt(self) -> list[int]:
        """Return the tokens to answer; the oldest messages are dropped if there is no room."""
        if self.raw:
            return [
                int(token) for token in self.format.tokenizer.encode(self.messages[-1]["content"])
            ]
        system = self._system_message
        room = self.room
        for dropped in range(0, len(self.messages), 2):
            tokens: list[int] = self.format.prompt([*system, *self.messages[dropped:]]).tolist()
            if room is None or len(tokens) <= room:
                break
        if dropped > self._left_out:  # not again with each message
            self.tell(f"(the first {dropped} messages no longer fit and are left out)")
        self._left_out = dropped
        return tokens

    @property
    def _system_message(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def room(self) -> int | None:
        """The longest prompt that leaves room for an answer."""
        if self.context is None:
            return None
        return self.context - min(self.max_tokens, self.context // 4)

    @property
    def max_tokens(self) -> int:
        """The longest answer."""
        return self.params.max_tokens or MAX_TOKENS

    def ask(self, text: str, show: Callable[[str], object]) -> Answer:
        """Send a message, show the answer as it arrives, and remember it, even if interrupted."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._answer(show)
        except BaseException:
            self.messages.pop()  # as if nothing had been said
            raise
        if answer.text:
            self.messages.append({"role": ASSISTANT, "content": answer.text})
        else:
            self.messages.pop()
        return answer

    def _answer(self, show: Callable[[str], object]) -> Answer:
        prompt = self.prompt()
        if self.context is not None and len(prompt) >= self.context:
            raise ValueError(
                f"the message is too long: {len(prompt)} tokens, but the model takes "
                f"{self.context} in all"
            )
        most = self.max_tokens
        if self.context is not None:
            most = max(1, min(most, self.context - len(prompt)))
        stop = None if self.raw else self.format.stop
        params = self.params.model_copy(update={"max_tokens": most, "stop": stop})
        text = AnswerText(self.format, stop_texts=not self.raw)
        said, tokens, reason = "", 0, "length"

        def put(piece: str) -> None:
            nonlocal said
            piece = piece if said or self.raw else piece.lstrip()
            said += piece
            if piece:
                show(piece)

        try:
            with self.sampler.sample_stream(ModelInput.from_ints(prompt), params) as stream:
                for chunk in stream:
                    if chunk.token_id is not None:
                        tokens += 1
                        put(text.add(chunk.token_id))
                    if chunk.finish_reason:
                        reason = chunk.finish_reason
                    if text.ended:
                        reason = "stop"
                        break
        except KeyboardInterrupt:
            reason = "interrupted"
        put(text.end())
        return Answer(said if self.raw else said.rstrip(), tokens, reason)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────

    def command(self, line: str) -> str | None:
        """Run a chat command; return the text to print, or None to leave.

        Raises:
            CommandError: There is no such command, or it cannot be carried out.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return None
        if name == "/help":
            width = max(map(len, COMMANDS))
            return "\n".join(f"{one:{width}}  {what}" for one, what in COMMANDS.items())
        if name == "/reset":
            self.messages.clear()
            return "the conversation is forgotten"
        if name == "/system":
            self.system = rest or None
            return "the system message is set" if rest else "there is no system message"
        if name == "/undo":
            return self._undo()
        if name in ("/save", "/load"):
            if not rest:
                raise CommandError(f"{name} needs the name of a file")
            path = Path(rest).expanduser()
            return self._save(path) if name == "/save" else self._load(path)
        raise CommandError(f"there is no command {name}; /help lists them")

    def obey(self, line: str) -> bool:
        """Run a chat command and tell its text; return False to leave."""
        told = self.command(line)
        if told is not None:
            self.tell(told)
        return told is not None

    def _undo(self) -> str:
        if not self.messages:
            raise CommandError("there is nothing to take back")
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        return f"taken back; {counted(len(self.messages), 'message')} left"

    def _save(self, path: Path) -> str:
        if not self.messages:
            raise CommandError("there is nothing to save yet")
        messages = [*self._system_message, *self.messages]
        try:
            path.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror or error}") from None
        return f"saved {counted(len(self.messages), 'message')} to {path}"

    def _load(self, path: Path) -> str:
        from tinkex.finetune import Example

        try:
            lines = path.read_bytes().splitlines()
            loaded = [
                dict(message) for message in Example.parse(1, lines[0] if lines else b"").messages
            ]
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise CommandError(f"{path} holds no conversation: {error}") from None
        if not loaded:
            raise CommandError(f"{path} holds no conversation")
        self.system = loaded.pop(0)["content"] if loaded[0]["role"] == "system" else None
        self.messages = list(loaded)
        return f"loaded {counted(len(self.messages), 'message')} from {path}"


@click.command()
@click.argument("model_or_path", required=False)
@option("--system", "System message.")
@option(
    "--temperature",
    "Sampling temperature; 0 takes the likeliest token.",
    default=0.7,
    type=click.FloatRange(0),
)
@top_p_option
@shaping_options
@option("--max-tokens", "Longest answer, in tokens.", default=MAX_TOKENS, least=1)
@option("--seed", "Seed of the answers.", type=int)
@option("--raw", "Continue each message as plain text: no chat format, no history.", is_flag=True)
@connecting
@text_or_json(
    "Output format when standard input is not a terminal: text, or one JSON object per line."
)
def chat(
    model_or_path: str | None,
    system: str | None,
    raw: bool,
    connection: Connection,
    output_format: str,
    json: bool,
    **sampling: Any,
) -> None:
    """Talk to a base model or a checkpoint (tinker://RUN/sampler_weights/NAME).

    Without MODEL_OR_PATH and with nothing configured, it is the small model that comes with tinkex,
    inside this process. A model without a chat template sees the conversation as "User: …" and
    "Assistant: …".

    Each line is a message; a backslash at its end continues it on the next line. /help lists the
    commands. Ctrl-C stops an answer, Ctrl-D leaves. If standard input is not a terminal, each of
    its lines is answered in turn, as one conversation.
    """
    if raw and system:
        raise click.UsageError("--system has no effect with --raw")
    is_terminal, as_json = sys.stdin.isatty(), json or output_format == "json"
    if is_terminal and as_json:
        raise click.UsageError("--json needs a standard input that is not a terminal")
    params = params_of(sampling, shaping_of(sampling))
    notes = plain_console(stderr=True)

    def tell(text: str) -> None:
        notes.print(text, style="dim" if notes.is_terminal else None, soft_wrap=True, markup=False)

    never_fail_to_write()
    with connection.service() as service:
        with waiting("starting …"):
            sampler, base_model = _open(service, model_or_path)
            talk = Chat(
                sampler,
                ChatFormat(tokenizer_of(get_tokenizer_id(base_model))),
                params=params,
                context=context_of(service, base_model),
                system=system,
                raw=raw,
                tell=tell,
            )
        if is_terminal:
            tell(
                f"{model_or_path or base_model} {place_of(service)}; /help lists the commands, "
                "Ctrl-D leaves"
            )
            _converse(talk)
        else:
            try:
                _answer_lines(talk, as_json=as_json)
            except BrokenPipeError:  # the reader has gone: leave nothing to flush at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open(service: ServiceClient, model_or_path: str | None) -> tuple[SamplingClient, str]:
    """Return a sampler and the name of its base model."""
    if model_or_path is None or not model_or_path.startswith(SCHEME):
        model = model_of(service, model_or_path, "MODEL_OR_PATH")
        return service.create_sampling_client(base_model=model).result(), model
    # saved to be trained on: only a run of its own can say what it samples
    if "/weights/" in model_or_path:
        client = service.create_training_client_from_state(model_or_path).result()
        sampler = client.save_weights_and_get_sampling_client().result()
    else:
        sampler = service.create_sampling_client(model_path=model_or_path).result()
    return sampler, sampler.get_base_model()


def _typed() -> Iterator[str]:
    """Yield typed messages: a backslash at the end continues a line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):  # the arrow keys, where there is such a module
        import readline  # noqa: F401
    lines: list[str] = []
    while True:
        try:
            line = input(GOES_ON if lines else PROMPT)
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            lines.clear()
            click.echo("\n(Ctrl-D or /quit leaves)")
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(lines)
            lines.clear()


def _converse(talk: Chat) -> None:
    """Talk to the user at the terminal."""
    for text in _typed():
        if not text.strip():
            continue
        try:
            if text.startswith("/"):
                if not talk.obey(text):
                    return
                continue
            answer = talk.ask(text, _write)
            click.echo()
            if answer.reason == "interrupted":
                talk.tell("(stopped)")
            elif not answer.text:
                talk.tell("(no answer; your message is removed)")
            elif answer.reason == "length":
                talk.tell("(cut off: --max-tokens, or the model's longest text)")
        except KeyboardInterrupt:
            click.echo("\n(stopped)")
        except CommandError as error:
            talk.tell(str(error))
        except (TinkerError, ValueError) as error:
            click.echo()
            talk.tell(f"Error: {error}")


def _write(text: str) -> None:
    """Print a piece of an answer, without control characters."""
    sys.stdout.write("".join(sign for sign in text if sign in "\n\t" or sign.isprintable()))
    sys.stdout.flush()


def _piped() -> Iterator[str]:
    lines: list[str] = []
    for line in sys.stdin:
        line = line.rstrip("\r\n")
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(lines)
            lines.clear()
    if lines:
        yield "\n".join(lines)


def _answer_lines(talk: Chat, *, as_json: bool) -> None:
    """Answer every line of standard input; stop at the first failure."""
    for text in _piped():
        if not text.strip():
            continue
        if text.startswith("/"):
            if not talk.obey(text):
                return
            continue
        shown = (lambda piece: None) if as_json else _pass_on
        try:
            answer = talk.ask(text, shown)
        except ValueError as error:
            if isinstance(error, TinkerError):
                raise
            raise click.ClickException(str(error)) from None
        if as_json:
            fields = {
                "message": text,
                "answer": answer.text,
                "tokens": answer.tokens,
                "finish_reason": answer.reason,
            }
            _pass_on(json.dumps(fields) + "\n")
        else:
            _pass_on("\n")
        if answer.reason == "interrupted":
            raise KeyboardInterrupt


def _pass_on(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
