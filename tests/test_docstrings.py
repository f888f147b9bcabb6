"""What is public says what it is: what it takes, gives and raises, with an example that gives what
it shows."""

from __future__ import annotations

import ast
import base64
import doctest
import importlib
import inspect
import json
import logging
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import hub
import tinkex
from tinkex import Datum, ModelInput, events, metrics

MODULES = [
    "adapters.memory",
    "adapters.peft",
    "adapters.platforms",
    "auth",
    "client.settings.config",
    "hub.downloads",
    "hub.fetches",
    "hub.repositories",
    "errors",
    "events",
    "client.futures.api_future",
    "client.futures.await_many",
    "client.futures.backcompat",
    "client.settings.delays",
    "client.http.http_client",
    "hub.pushes",
    "local",
    "client.losses.loss_graphs",
    "metrics",
    "recovery.monitor",
    "recovery.policies",
    "regularizers.divergences",
    "regularizers.execution",
    "regularizers.logs",
    "regularizers.penalties",
    "regularizers.pipeline",
    "regularizers.specs",
    "recovery.resilient",
    "client.http.responses",
    "client.rest",
    "client.http.retry",
    "client.sampling_client",
    "client.service",
    "telemetry",
    "tokenizers",
    "client.training_client",
    "client.training_parts.call_arguments",
    "wire.json_values",
    "types.account",
    "types.checkpoints",
    "types.custom_losses",
    "types.future_requests",
    "types.inputs",
    "types.record",
    "types.sampling",
    "types.server_facts",
    "types.sessions",
    "types.telemetry",
    "types.tensors",
    "types.training",
]
"""Where public names live; everything in them has a docstring."""


WITH_SECTIONS = [
    *(f"tinkex:{name}" for name in tinkex.__all__),
    "tinkex.errors:error_for",
    "tinkex.errors:is_retryable",
    "tinkex.client.settings.config:maybe_set_level",
    "tinkex.client.settings.config:mask_api_key",
    "tinkex.client.settings.config:poll_delay",
    "tinkex.local:default_data_dir",
    "tinkex.local:make_engine",
    "tinkex.local:resolve_models",
    "tinkex.recovery.monitor:Executor",
    "tinkex.recovery.monitor:Monitor",
    "tinkex.recovery.monitor:best_checkpoint",
    "tinkex.recovery.monitor:metric_of",
    "tinkex.recovery.monitor:select_checkpoint",
    "tinkex.recovery.policies:metrics_metadata",
    "tinkex.tokenizers:Tokenizer",
    "tinkex.tokenizers:decode",
    "tinkex.tokenizers:encode",
    "tinkex.tokenizers:get_or_load_tokenizer",
    "tinkex.tokenizers:get_tokenizer_id",
    "tinkex.tokenizers:load_tokenizer",
    "tinkex.events:attach",
    "tinkex.events:detach",
    "tinkex.events:emit",
    "tinkex.events:handlers",
    "tinkex.events:is_heard",
    *(f"tinkex.regularizers:{name}" for name in tinkex.regularizers.__all__),
    *(
        f"tinkex.metrics:{name}"
        for name in (
            "Metrics",
            "configure",
            "increment",
            "record_histogram",
            "set_gauge",
            "shared",
            "snapshot",
        )
    ),
    "tinkex.telemetry:Reporter",
    "tinkex.telemetry:async_capture",
    "tinkex.telemetry:attach_logger",
    "tinkex.telemetry:detach",
    "tinkex.telemetry:flush",
    "tinkex.telemetry:init",
    "tinkex.telemetry:log",
    "tinkex.telemetry:log_exception",
    "tinkex.telemetry:log_fatal_exception",
    "tinkex.telemetry:stop",
    "tinkex.telemetry:wait_until_drained",
    *(f"tinkex.types:{name}" for name in tinkex.types.__all__),
]
"""What is held to the whole rule: arguments, what it gives and what it raises."""

SKIPPED = {
    "src/tinkex/adapters/peft.py": (1, "loading a model with peft takes seconds"),
    "src/tinkex/client/http/http_client.py": (
        1,
        "the server has nothing that sends events in answer to a GET",
    ),
}
"""How many lines of examples are not run, by file, and why."""


def module(name: str) -> Any:
    return importlib.import_module(f"tinkex.{name}")


def members(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """The public methods that a class has of its own; properties are told apart by their type."""
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) or isinstance(function, property):
            yield name, function


def own(name: str) -> Iterator[tuple[str, Any]]:
    """Every public class, function, method and property of a module."""
    home = module(name)
    for label, value in vars(home).items():
        if label.startswith("_") or getattr(value, "__module__", None) != home.__name__:
            continue
        if inspect.isclass(value):
            yield label, value
            yield from ((f"{label}.{member}", function) for member, function in members(value))
        elif inspect.isfunction(value):
            yield label, value


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name: str) -> None:
    assert module(name).__doc__
    silent = [label for label, value in own(name) if len((value.__doc__ or "").split()) < 2]
    # A class that says nothing of itself must not pass with the words of its base.
    silent += [
        label
        for label, value in own(name)
        if inspect.isclass(value) and not vars(value).get("__doc__")
    ]
    assert not silent


# ── the whole rule ────────────────────────────────────────────────────────────────────────────────


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring in Google's form."""
    parts = re.split(
        r"^(Args|Returns|Yields|Raises|Example):$", inspect.cleandoc(text), flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def raised(function: Any) -> set[str]:
    """The errors that a function raises itself, not those of functions within it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    found, waiting = set[str](), list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
        ):
            found.add(node.exc.func.id)
        waiting += ast.iter_child_nodes(node)
    return found - {"AssertionError", "NotImplementedError"}


def is_twin(text: str) -> bool:
    """Return True if a docstring refers to an existing twin."""
    return (
        re.match(r"(Like|Deprecated: use) `[\w.]+`|`[\w.]+`; ", inspect.cleandoc(text)) is not None
    )


def faults(label: str, function: Any) -> Iterator[str]:
    """List the faults of a callable's docstring."""
    text = inspect.cleandoc(function.__doc__ or "")
    if is_twin(text):
        return  # it takes what the other takes, which is looked at by itself
    told, signature = sections(text), inspect.signature(function)
    parameters = [
        name
        for name in signature.parameters
        if name not in ("self", "cls") and not name.startswith("_")
    ]
    for name in parameters:
        if not re.search(rf"^    \*{{0,2}}{name}:", told.get("Args", ""), re.MULTILINE):
            yield f"{label}: Args has no {name}"
    gives = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    if gives and parameters and "Returns" not in told and "Yields" not in told:
        yield f"{label}: no Returns"
    for error in raised(function):
        if not re.search(rf"^    ([\w., ]+, )?{error}[,:]", told.get("Raises", ""), re.MULTILINE):
            yield f"{label}: Raises has no {error}"


def resolve(label: str) -> Any:
    home, _, path = label.partition(":")
    value: Any = importlib.import_module(home)
    for part in path.split("."):
        value = (
            inspect.getattr_static(value, part) if inspect.isclass(value) else getattr(value, part)
        )
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def callables(label: str) -> Iterator[tuple[str, Any]]:
    value = resolve(label)
    if inspect.isclass(value):
        is_platform = (
            isinstance(value, type)
            and label.endswith("Platform")
            and value is not tinkex.TrainingPlatform
        )
        for name, item in members(value):
            # What the protocol says of a method holds for every platform that keeps it.
            if inspect.isfunction(item) and not (
                is_platform and hasattr(tinkex.TrainingPlatform, name)
            ):
                yield f"{label}.{name}", item
    elif inspect.isfunction(value):
        yield label, value


@pytest.mark.parametrize("label", sorted(set(WITH_SECTIONS)))
def test_public_callables_document_arguments_returns_and_raises(label: str) -> None:
    assert not [fault for name, function in callables(label) for fault in faults(name, function)]


def test_twin_names_an_existing_method() -> None:
    for name in MODULES:
        for label, value in own(name):
            twin = re.match(r"Like `(\w+)`", value.__doc__ or "")
            if twin is None:
                continue
            place = label.rpartition(".")[0]
            home = getattr(module(name), place) if place else module(name)
            assert hasattr(home, twin[1]), label


def test_rule_finds_missing_sections() -> None:
    def silent(first: int, second: int) -> int:
        """Add.

        Args:
            first: One.
        """
        if first < 0:
            raise ValueError("no")
        return first + second

    assert list(faults("it", silent)) == [
        "it: Args has no second",
        "it: no Returns",
        "it: Raises has no ValueError",
    ]


# ── examples ──────────────────────────────────────────────────────────────────────────────────────

MODEL = "tinkex/tiny"
ROOT = Path(__file__).parent.parent


def is_ours(value: Any) -> bool:
    """Whether something is a class or function of the package; an alias, a constant or a module has
    no docstring."""
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(
        "tinkex"
    )


def methods(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield a class's public methods that no public base documents, its parts' included."""
    bases = [base for base in kind.__mro__[1:] if is_ours(base)]
    told = [
        base
        for base in bases
        if not base.__name__.startswith("_")
        and not re.search(r"_parts\.|session_client$", base.__module__)
    ]
    if kind.__name__.endswith("Platform") and kind is not tinkex.TrainingPlatform:
        told.append(tinkex.TrainingPlatform)  # which they keep without deriving from it
    for home in [kind, *(base for base in bases if base not in told)]:
        for name, item in members(home):
            if inspect.isfunction(item) and not any(name in vars(base) for base in told):
                yield name, item


def without_example(label: str) -> Iterator[str]:
    """What should have an example under a label and has none: a class and its methods, or a
    function."""
    value = resolve(label)
    if not is_ours(value):
        return
    told = {label: value}
    if inspect.isclass(value):
        told |= {f"{label}.{name}": item for name, item in methods(value)}
    for name, item in told.items():
        text = item.__doc__ or ""
        if not is_twin(text) and ">>>" not in sections(text).get("Example", ""):
            yield name


@pytest.mark.parametrize("label", sorted(set(WITH_SECTIONS)))
def test_public_callables_have_an_example(label: str) -> None:
    assert not list(without_example(label))


def test_rule_finds_missing_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Base:
        def inherited(self) -> None:
            """Has none."""

    class Silent(_Base, tinkex.RetryConfig):
        """Has none.

        Returns:
            >>> "what is shown elsewhere does not count"
        """

        def shown(self) -> None:
            """Has one.

            Example:
                >>> Silent().shown()
            """

        def silent(self) -> None:
            """Has none."""

        def shown_async(self) -> None:
            """Like `shown`."""

        def delay(self, attempt: int, jitter: float | None = None) -> float:
            """Is told of by the base."""
            return 0.0

        @property
        def fact(self) -> str:
            """Needs none."""
            return ""

    for item in (Silent, _Base, Silent.silent):
        monkeypatch.setattr(item, "__module__", "tinkex.client.service")
    for name, value in (("Silent", Silent), ("silent", Silent.silent), ("NAME", "tinkex")):
        monkeypatch.setattr(tinkex, name, value, raising=False)
    found = list(without_example("tinkex:Silent"))
    assert found == ["tinkex:Silent", "tinkex:Silent.silent", "tinkex:Silent.inherited"]
    assert list(without_example("tinkex:silent")) == ["tinkex:silent"]
    assert list(without_example("tinkex:NAME")) == []


def sources() -> dict[str, str]:
    """The package's files by path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted((ROOT / "src").rglob("*.py"))
    }


def dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_hardly_an_example_is_left_out() -> None:
    skip = re.compile(r"(?:>>>|\.\.\.).*\+SKIP")
    skipped = {name: len(skip.findall(text)) for name, text in sources().items()}
    assert {name: count for name, count in skipped.items() if count} == {
        name: count for name, (count, _) in SKIPPED.items()
    }


class Ready:
    """What an example may name without making it: made for each docstring anew, when that docstring
    names it."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    @cached_property
    def service(self) -> tinkex.ServiceClient:
        return self.stack.enter_context(tinkex.ServiceClient(base_url="local"))

    @cached_property
    def client(self) -> tinkex.TrainingClient:
        return self.service.create_lora_training_client(MODEL, rank=4, seed=1).result()

    @cached_property
    def sampler(self) -> tinkex.SamplingClient:
        return self.service.create_sampling_client(base_model=MODEL).result()

    @cached_property
    def rest(self) -> tinkex.RestClient:
        return self.stack.enter_context(tinkex.RestClient(base_url="local"))

    @cached_property
    def admin(self) -> tinkex.AdminClient:
        return self.stack.enter_context(tinkex.AdminClient(base_url="local"))

    @cached_property
    def http(self) -> tinkex.HttpClient:
        return self.stack.enter_context(tinkex.HttpClient(base_url="local"))

    @cached_property
    def tokenizer(self) -> Any:
        return self.sampler.get_tokenizer()

    @cached_property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.tokenizer.encode("12+34=46")
        return tokens

    @cached_property
    def prompt(self) -> ModelInput:
        return ModelInput.from_ints(self.tokenizer.encode("12+34="))

    @cached_property
    def data(self) -> list[Datum]:
        inputs = {"target_tokens": self.tokens[1:], "weights": [1.0] * (len(self.tokens) - 1)}
        return [Datum(ModelInput.from_ints(self.tokens[:-1]), inputs)]

    @cached_property
    def path(self) -> str:
        return self.client.save_state("step-100").result().path

    @cached_property
    def token(self) -> str:
        facts = {
            "iss": "passport-1",
            "sub": "tml:user:ada",
            "org_id": "1",
            "email": "ada@example.org",
        }
        parts: tuple[dict[str, str], ...] = ({"alg": "none"}, facts, {})
        return ".".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
            for part in parts
        )


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One embedded server behind all clients of "local"."""
    places = mock.patch.dict(os.environ, {"TINKEX_DATA_DIR": str(tmp_path_factory.mktemp("data"))})
    with places, tinkex.ServiceClient(base_url="local") as service:
        service.get_server_capabilities()
        yield


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub on this machine."""
    # this hub stores large files the older way
    for name, value in (("OFFLINE", False), ("DISABLE_XET", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.HF_HUB_{name}", value)
    with hub.hub_server() as made:
        for name, text in (
            ("TOKEN", hub.TOKEN),
            ("ENDPOINT", made.url),
            ("HUB_DISABLE_PROGRESS_BARS", "1"),
        ):
            monkeypatch.setenv(f"HF_{name}", text)
        yield


@pytest.fixture
def surroundings(backend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory to write into; what an example sets for the whole process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "_shared", None)
    before = {known.handler_id for known in events.handlers()}
    level = logging.getLogger("tinkex").level
    with warnings.catch_warnings():
        # of calls that are shown all the same
        for category in (FutureWarning, tinkex.ExperimentalWarning):
            warnings.simplefilter("ignore", category)
        # of httpx, about huggingface_hub
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
        yield
    logging.getLogger("tinkex").setLevel(level)
    # what an example has attached would be heard by all tests after it
    for known in events.handlers():
        if known.handler_id not in before:
            events.detach(known.handler_id)


def needed(lines: list[str]) -> set[str]:
    """The names that the lines of an example use before they give them a value."""
    used, given = set[str](), set[str]()
    for line in lines:
        names = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)]
        used |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - given
        given |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return used


def failures(home: Any, out: Callable[[str], object]) -> int:
    """Count the lines of a module's examples with another output than they show."""
    names = {
        **vars(tinkex.types),
        **{key: getattr(tinkex, key) for key in tinkex.__all__},
        **vars(home),
    }
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder(exclude_empty=True).find(
        home, home.__name__, extraglobs=names
    ):
        ready = Ready()
        with mock.patch.dict(os.environ), ready.stack:
            wanted = needed([line.source for line in example.examples]) - vars(home).keys()
            example.globs.update(
                {name: getattr(ready, name) for name in sorted(wanted) if hasattr(Ready, name)}
            )
            runner.run(example, out=out)
        tinkex.configure()
    return runner.summarize(verbose=False).failed


def test_example_that_gives_something_else_is_found() -> None:
    home = ModuleType("home")
    home.__doc__ = "Example:\n    >>> 1 + 1, os.getpid()\n    (2, ...)\n    >>> 1 + 1\n    3\n"
    vars(home)["os"] = os
    told: list[str] = []
    assert failures(home, told.append) == 1
    assert "Expected:\n    3\nGot:\n    2\n" in told[-1]


@pytest.mark.parametrize(
    "name", [dotted(path) for path, text in sources().items() if re.search(r"^ *>>>", text, re.M)]
)
def test_docstring_examples_run(
    name: str, surroundings: None, request: pytest.FixtureRequest
) -> None:
    if name == "tinkex.hub.pushes":  # nothing else may ask for a hub
        request.getfixturevalue("hugging_face")
    told: list[str] = []
    assert failures(importlib.import_module(name), told.append) == 0, "".join(told)
