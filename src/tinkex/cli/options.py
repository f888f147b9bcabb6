"""Options that commands share, and the clients opened with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from tinkex.cli.output import CommandError, Outcome, invocation_of, reason_of, wants_json

if TYPE_CHECKING:
    from tinkex.client.futures.api_future import APIFuture
    from tinkex.client.http.http_client import HttpClient
    from tinkex.client.rest import AdminClient, RestClient
    from tinkex.client.service import ServiceClient
    from tinkex.client.session import Session
    from tinkex.client.settings.config import Config

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

SUMMARY = 100
"""Longest summary that a shell shows beside a command."""
REST_PATIENCE = 10.0
"""Seconds during which a failed request is retried: a user is waiting."""
HINTS = {"pass api_key=…": "give --api-key", 'pass base_url="local"': "give --base-url local"} | {
    'base_url="local"': "--base-url local",
    "the api_key that was passed": "--api-key",
}


# ── declaring ─────────────────────────────────────────────────────────────────────────────────────


def option(
    names: str,
    told: str,
    *,
    least: int | None = None,
    choices: Sequence[str] = (),
    **attributes: Any,
) -> Callable[[F], F]:
    """Add an option; the help shows its default, if it has one.

    Args:
        names: The names, separated by spaces.
        told: The help.
        least: Makes the value a whole number that is not below this.
        choices: The values to choose from.
        attributes: Attributes of `click.option`.
    """
    if least is not None:
        attributes["type"] = click.IntRange(least)
    if choices:
        attributes["type"] = click.Choice(choices)
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(*names.split(), help=told, **attributes)


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Add several options, in this order."""

    def add(function: F) -> F:
        for one in reversed(options):
            function = one(function)
        return function

    return add


class NoSuchCommand(click.UsageError):
    """A word that names no command of a group."""


class CommandGroup(click.Group):
    """A group that records the called command and completes with whole summaries."""

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands and options."""
        named = [(name, self.get_command(context, name)) for name in self.list_commands(context)]
        found = [
            CompletionItem(name, help=command.get_short_help_str(SUMMARY))
            for name, command in named
            if command is not None and name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, context, incomplete)]

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command and record its name; suggest the nearest name for a wrong word."""
        if self.get_command(context, args[0]) is None and not args[0].startswith("-"):
            from difflib import get_close_matches

            meant = get_close_matches(args[0], self.list_commands(context), n=1)
            advice = f" Did you mean {meant[0]!r}?" if meant else ""
            raise NoSuchCommand(f"No such command {args[0]!r}.{advice}", context)
        name, command, rest = super().resolve_command(context, args)
        path = f"{context.command_path} {name}" if name else context.command_path
        invocation_of(context).command = path.partition(" ")[2]
        return name, command, rest


class Switch(click.Option):
    """A flag whose `--no-` form is accepted, but not shown if the default is no."""

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        """Return the option without its negative form."""
        hidden, self.secondary_opts = self.secondary_opts, []
        try:
            return super().get_help_record(context)
        finally:
            self.secondary_opts = hidden


def switch(name: str, *short: str, **attributes: Any) -> Callable[[F], F]:
    """Add a flag that is off by default; `--no-NAME` is accepted too."""
    negative = f"--no-{name.removeprefix('--')}"
    forms = "/".join([name, negative])
    return click.option(
        forms, *(f"{form}/" for form in short), cls=Switch, default=False, **attributes
    )


class CheckpointPath(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A `tinker://` path, checked before anything is sent."""

    name = "path"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> str:
        """Return a valid path, or fail."""
        return checked_path(str(value))


def checked_path(path: str) -> str:
    """Return a checkpoint's path; raise a one-line error for anything else."""
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    with in_one_line(ValueError):
        return ParsedCheckpointTinkerPath.from_tinker_path(path).tinker_path


def path_argument(name: str = "path", **attributes: Any) -> Callable[[F], F]:
    """Add the argument that names a checkpoint."""
    return click.argument(name, metavar=name.upper(), type=CheckpointPath(), **attributes)


def refuse_before(context: click.Context) -> bool:
    """Return True if a subcommand or the help runs in place of a group that is a command.

    An option before that subcommand would have no effect, and is refused.
    """
    given = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name
        and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if context.invoked_subcommand is None:
        if not given:
            click.echo(context.get_help())
        return not given
    if given:
        raise click.UsageError(
            f"{given[0]} has no effect in front of `{context.invoked_subcommand}`", context
        )
    return True


# ── format ────────────────────────────────────────────────────────────────────────────────────────


def format_option(told: str) -> Callable[[F], F]:
    """Add --format, of tables or JSON."""
    choice = click.Choice(["table", "json"], case_sensitive=False)
    return option("-f --format form", told, type=choice)


def formatted(function: F) -> F:
    """Add --format and --json, and print the outcome that the command returns."""

    @format_option("How to print it.  [default: table]")
    @switch("--json", help="The same as --format json.")
    @click.pass_context
    @functools.wraps(function)
    def call(
        context: click.Context, /, *args: Any, form: str | None, json: bool, **named: Any
    ) -> Outcome:
        invocation = invocation_of(context)
        invocation.format = "json" if json else form or invocation.format
        outcome: Outcome = function(*args, **named)
        outcome.print(as_json=wants_json())
        return outcome

    return call  # type: ignore[return-value]


def text_or_json(told: str) -> Callable[[F], F]:
    """Add --format and --json to a command without tables."""
    return together(
        option("--format output_format", told, default="text", choices=["text", "json"]),
        switch("--json", help="Same as --format json."),
    )


paged = together(
    option("--limit", "Number to list; 0 means all.", type=int, default=20),
    option("--offset", "Number to skip.", type=int, default=0),
)
"""Adds --limit and --offset to a command that lists things."""


# ── connection ────────────────────────────────────────────────────────────────────────────────────


def server_url(base_url: str | None, api_key: str | None) -> str | None:
    """Return the requested server; None leaves it to the configuration, else this process."""
    from tinkex.client.settings import environment
    from tinkex.client.settings.config import LOCAL
    from tinkex.client.settings.credentials import stored_key

    if base_url:
        return base_url
    found = environment.snapshot()
    if (
        api_key
        or any(found.get(name) for name in ("base_url", "api_key", "credential_cmd"))
        or stored_key()
    ):
        return None
    return LOCAL


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection that the options ask for; the environment supplies the rest."""

    api_key: str | None = None
    base_url: str | None = None
    timeout: float | None = None
    """Seconds."""
    is_for_accounts: bool = False
    """True for commands about keys. This process has none, so the default is the hosted service."""

    def config(self, **settings: Any) -> Config:
        """Return the complete settings; ConfigurationError names what is missing."""
        from tinkex.client.settings.config import Config
        from tinkex.errors import ConfigurationError

        base_url = self.base_url
        if not self.is_for_accounts:
            base_url = server_url(self.base_url, self.api_key)
        if self.timeout is not None:
            settings = {"first_contact_patience": min(REST_PATIENCE, self.timeout), **settings}
        try:
            return Config.resolve(
                api_key=self.api_key, base_url=base_url, timeout=self.timeout, **settings
            )
        except ConfigurationError as error:
            for argument, option in HINTS.items():  # said in the words of programs
                error.hint = error.hint and error.hint.replace(argument, option)
            raise

    @contextmanager
    def session(self, **settings: Any) -> Iterator[Session]:
        """Yield a session, closed at the end; the first use opens it on the server."""
        from tinkex.client.futures.api_future import start
        from tinkex.client.session import Session

        session = Session(self.config(**settings))
        try:
            yield session
        finally:
            start(session.finish("success", None)).result(timeout=10)

    @contextmanager
    def rest(self) -> Iterator[RestClient]:
        """Yield a client for stored things; it waits seconds, not minutes, for a server."""
        from tinkex.client.rest import RestClient

        patience = REST_PATIENCE if self.timeout is None else min(REST_PATIENCE, self.timeout)
        with self.session(patience=patience) as session:
            yield RestClient(session)

    @contextmanager
    def http(self) -> Iterator[HttpClient]:
        """Yield a client for any path of the server."""
        from tinkex.client.http.http_client import HttpClient

        with HttpClient(config=self.config()) as http:
            yield http

    @contextmanager
    def admin(self) -> Iterator[AdminClient]:
        """Yield a client for administrators."""
        from tinkex.client.rest import AdminClient

        with self.rest() as rest:
            yield AdminClient(rest.holder)

    def service(self, display_name: str | None = None, **settings: Any) -> ServiceClient:
        """Return a client to train and sample with, which is closed by leaving its block."""
        from tinkex.client.service import ServiceClient

        return ServiceClient(config=self.config(**settings), display_name=display_name)


timeout_option = option(
    "--timeout", "Milliseconds to wait for an answer.  [default: 60000]", metavar="MS", least=1
)
api_key_option = option(
    "--api-key",
    "API key of the server; local needs none.  [default: TINKER_API_KEY]",
    metavar="KEY",
)
server_options = together(
    option(
        "--base-url",
        'Server: a URL, or "local" to compute inside this process.  '
        "[default: TINKER_BASE_URL; the hosted service where there is an API key; else local]",
        metavar="URL",
    ),
    api_key_option,
    timeout_option,
)


def seconds_of(timeout: int | None) -> float | None:
    """Return --timeout in seconds."""
    return None if timeout is None else timeout / 1000


def connecting(function: F) -> F:
    """Add --api-key, --base-url and --timeout; the command is called with a `connection`."""

    @server_options
    @functools.wraps(function)
    def call(
        *args: Any, base_url: str | None, api_key: str | None, timeout: int | None, **named: Any
    ) -> Any:
        return function(
            *args, connection=Connection(api_key, base_url, seconds_of(timeout)), **named
        )

    return call  # type: ignore[return-value]


reporting = together(formatted, connecting)
"""Makes a command that reports on things of a server."""


def wait(call: APIFuture[T], seconds: float | None = None) -> T:
    """Return the result of a call; cancel it when it is late or interrupted.

    Raises:
        APITimeoutError: It took longer than so many seconds.
    """
    from tinkex.errors import APITimeoutError

    future = call.future()
    try:
        return call.result(seconds)
    except TimeoutError:
        if future.done():  # its own
            raise
        future.cancel()
        message = f"no result within {seconds:g} s"
        raise APITimeoutError(message=message, hint="--timeout MS waits longer") from None
    except KeyboardInterrupt:
        future.cancel()
        raise


@contextmanager
def in_one_line(*expected: type[Exception]) -> Iterator[None]:
    """Report expected errors in one line."""
    try:
        yield
    except expected as error:
        raise CommandError(reason_of(error), error) from None


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Add advice to a failure: an error to fix, or one that may pass."""
    from tinkex.errors import TinkerError

    try:
        yield
    except TinkerError as error:
        advice = (
            "please check your inputs"
            if error.is_user_error
            else "the server or the network; try again"
        )
        # once is enough
        told = re.sub(rf"^{re.escape(what)} failed \(\w+ error\): ", "", str(error))
        raise CommandError(f"{what} failed ({advice}): {told}", error) from error
    except (ValueError, AssertionError) as error:
        raise CommandError(f"{what} failed (please check your inputs): {error}", error) from error
