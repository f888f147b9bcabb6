"""What is public says what it is: what it takes, gives and raises, with an example where programs begin."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from tinkex import events, metrics

MODULES = [
    "adapters.clients",
    "adapters.memory",
    "adapters.peft",
    "adapters.platforms",
    "auth",
    "config",
    "downloads",
    "errors",
    "events",
    "futures",
    "http",
    "huggingface",
    "local",
    "loss_graphs",
    "metrics",
    "recovery",
    "recovery_policies",
    "regularizers.divergences",
    "regularizers.execution",
    "regularizers.gradients",
    "regularizers.logs",
    "regularizers.penalties",
    "regularizers.pipeline",
    "regularizers.specs",
    "resilience",
    "responses",
    "rest",
    "retries",
    "sampling",
    "service",
    "telemetry",
    "tokenizers",
    "training",
    "transforms",
    "types.account",
    "types.checkpoints",
    "types.custom_losses",
    "types.futures",
    "types.inputs",
    "types.record",
    "types.sampling",
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
    "tinkex.config:maybe_set_level",
    "tinkex.config:mask_api_key",
    "tinkex.config:poll_delay",
    "tinkex.local:default_data_dir",
    "tinkex.local:make_engine",
    "tinkex.local:resolve_models",
    "tinkex.recovery:Executor",
    "tinkex.recovery:Monitor",
    "tinkex.recovery:best_checkpoint",
    "tinkex.recovery:metric_of",
    "tinkex.recovery:select_checkpoint",
    "tinkex.recovery_policies:metrics_metadata",
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
        for name in ("Metrics", "configure", "increment", "record_histogram", "set_gauge", "shared", "snapshot")
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

WITH_EXAMPLE = [
    "tinkex:AdminClient",
    "tinkex:Future",
    "tinkex:HttpClient",
    "tinkex:LocalBackend",
    "tinkex:RestClient",
    "tinkex:RetryConfig",
    "tinkex:SamplingClient.sample",
    "tinkex:SamplingClient.sample_stream",
    "tinkex:ServiceClient",
    "tinkex:ServiceClient.create_lora_training_client",
    "tinkex:ServiceClient.create_sampling_client",
    "tinkex:ServiceClient.create_training_client_from_state_with_optimizer",
    "tinkex:TrainingClient",
    "tinkex:TrainingClient.forward_backward",
    "tinkex:TrainingClient.forward_backward_custom",
    "tinkex:TrainingClient.optim_step",
    "tinkex:TrainingClient.save_state",
    "tinkex:TrainingClient.save_weights_and_get_sampling_client",
    "tinkex:Datum",
    "tinkex:ModelInput",
    "tinkex:SamplingParams",
    "tinkex:TensorData",
    "tinkex:await_many",
    "tinkex:configure",
    "tinkex:download",
    "tinkex:resilient",
    "tinkex.recovery:Monitor",
    "tinkex.regularizers:regularized",
]


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
def test_everything_public_in_a_module_says_what_it_is(name: str) -> None:
    assert module(name).__doc__
    silent = [label for label, value in own(name) if len((value.__doc__ or "").split()) < 2]
    # A class that says nothing of itself must not pass with the words of its base.
    silent += [label for label, value in own(name) if inspect.isclass(value) and not vars(value).get("__doc__")]
    assert not silent


# ── the whole rule ───────────────────────────────────────────────────────────────────────────────────────────────────


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring in Google's form."""
    parts = re.split(r"^(Args|Returns|Yields|Raises|Example):$", inspect.cleandoc(text), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def raised(function: Any) -> set[str]:
    """The errors that a function raises itself, not those of functions within it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    found, waiting = set[str](), list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found.add(node.exc.func.id)
        waiting += ast.iter_child_nodes(node)
    return found - {"AssertionError", "NotImplementedError"}


def faults(label: str, function: Any) -> Iterator[str]:
    """What is missing in a callable's docstring."""
    text = inspect.cleandoc(function.__doc__ or "")
    if re.match(r"(Like|Deprecated: use) `[\w.]+`", text) or re.match(r"`[\w.]+`; ", text):
        return  # it takes what the other takes, which is looked at by itself
    told, signature = sections(text), inspect.signature(function)
    parameters = [name for name in signature.parameters if name not in ("self", "cls") and not name.startswith("_")]
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
        value = inspect.getattr_static(value, part) if inspect.isclass(value) else getattr(value, part)
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def callables(label: str) -> Iterator[tuple[str, Any]]:
    value = resolve(label)
    if inspect.isclass(value):
        is_platform = isinstance(value, type) and label.endswith("Platform") and value is not tinkex.TrainingPlatform
        for name, item in members(value):
            # What the protocol says of a method holds for every platform that keeps it.
            if inspect.isfunction(item) and not (is_platform and hasattr(tinkex.TrainingPlatform, name)):
                yield f"{label}.{name}", item
    elif inspect.isfunction(value):
        yield label, value


@pytest.mark.parametrize("label", sorted(set(WITH_SECTIONS)))
def test_what_programs_call_says_what_it_takes_gives_and_raises(label: str) -> None:
    assert not [fault for name, function in callables(label) for fault in faults(name, function)]


@pytest.mark.parametrize("label", WITH_EXAMPLE)
def test_where_programs_begin_there_is_an_example(label: str) -> None:
    assert ">>>" in sections(resolve(label).__doc__)["Example"]


def test_a_twin_names_one_that_is_there() -> None:
    for name in MODULES:
        for label, value in own(name):
            twin = re.match(r"Like `(\w+)`", value.__doc__ or "")
            if twin is None:
                continue
            place = label.rpartition(".")[0]
            home = getattr(module(name), place) if place else module(name)
            assert hasattr(home, twin[1]), label


def test_the_rule_finds_what_is_missing() -> None:
    def silent(first: int, second: int) -> int:
        """Add.

        Args:
            first: One.
        """
        if first < 0:
            raise ValueError("no")
        return first + second

    assert list(faults("it", silent)) == ["it: Args has no second", "it: no Returns", "it: Raises has no ValueError"]


@pytest.mark.parametrize("name", [name for name in MODULES if name != "adapters.peft"])
def test_the_examples_in_docstrings_give_what_they_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = module(name)
    monkeypatch.setattr(metrics, "_shared", None)
    before = {known.handler_id for known in events.handlers()}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    globs = {**vars(tinkex.types), **{key: getattr(tinkex, key) for key in tinkex.__all__}, **vars(home)}
    for example in finder.find(home, home.__name__, extraglobs=globs):
        runner.run(example)
    for known in events.handlers():  # what an example has attached would be heard by all tests after it
        if known.handler_id not in before:
            events.detach(known.handler_id)
    assert runner.summarize(verbose=False).failed == 0
