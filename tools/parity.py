"""Compares tinkex with the official package, name by name, and writes `docs/parity.md`.

Run `python tools/parity.py` to write the table, with `--check` to fail when the written one is out
of date. Both packages are introspected, nothing is listed by hand: names, parameters with their
order, kind and default, return values, fields, attributes and base classes. A method whose body
does nothing counts as absent, and so does a parameter that is accepted and never read (unless the
official package does not read it either).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "parity.md"

CLIENTS = ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"]
CLIENT_FUTURES = ["BackcompatTrainingClientFuture", "BackcompatSamplingClientFuture"]
# What `tinker` has outside its top level and `tinker.types`, and is nevertheless part of what users
# are told about.
ELSEWHERE = {
    "AwaitableConcurrentFuture": "tinker.lib.public_interfaces",
    "RetryConfig": "tinker.lib.retry_handler",
    "types.GenericEvent": "tinker.types.generic_event",
    "types.OptimParamsBase": "tinker.types.optimizer",
    "types.OptimizerConfigBase": "tinker.types.optimizer",
    "types.TopkLogprobs": "tinker.types.topk_logprobs",
    "types.TryAgainResponse": "tinker.types.try_again_response",
}
# The same thing under another name: one class is every kind of future here.
RENAMED = {"AwaitableConcurrentFuture": "Future"}
# Parameters of another name that are no user's to pass: the object behind a client.
INTERNAL_PARAMETERS = {"holder": "session"}
# Methods that pydantic needs on a class and no user calls.
VALIDATORS = {"validate_dmel", "serialize_dmel", "validate_data", "serialize_data"}
# Public by their names only: what is behind them are objects of the official package's own
# machinery.
INTERNAL = {"feature_gates", "get_telemetry", "holder", "retry_handler"}
FUTURES = (
    r"(?:concurrent\.futures\.)?\b(?:APIFuture|AwaitableConcurrentFuture|ConcurrentFuture|Future)\b"
)
INTERNAL_NOTE = " (internal: an object of the official package's own machinery)"
VARIADIC = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}


# ── one package ───────────────────────────────────────────────────────────────────────────────────


def spelt(annotation: Any) -> str:
    """An annotation in one spelling, whichever way it was written."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, typing.ForwardRef):
        return spelt(annotation.__forward_arg__)
    if isinstance(annotation, str):
        text = annotation.strip("'\"").replace("'torch", "torch").replace("Tensor'", "Tensor")
        text = re.sub(r"\b(?:typing|types|dt|losses|np)\.(?=[A-Za-z])", "", text)
        for old, new in (("List[", "list["), ("Dict[", "dict["), ("Tuple[", "tuple[")):
            text = text.replace(old, new)
        text = re.sub(r"\b(?:(?:npt\.)?NDArray\[Any\]|Array\b)", "ndarray", text)
        return re.sub(r"Optional\[([\w.]+(?:\[[\w., ]*\])?)\]", r"\1 | None", text)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return spelt(arguments[0])
    if origin in (typing.Union, types.UnionType):
        members = [spelt(member) for member in arguments]
        return " | ".join(
            [*(m for m in members if m != "None"), *(m for m in members if m == "None")]
        )
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None and arguments:
        name = getattr(origin, "__name__", str(origin))
        return f"{name}[{', '.join('...' if a is ... else spelt(a) for a in arguments)}]"
    if isinstance(annotation, list | tuple):
        return f"[{', '.join(map(spelt, annotation))}]"
    return str(getattr(annotation, "__name__", annotation)).replace("typing.", "")


def plain(value: Any) -> str:
    """A default as text that is the same for equal values of the two packages."""
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if hasattr(value, "model_dump"):
        return f"{type(value).__name__}()"
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, int | float):
        return f"{value:g}"
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return f"({', '.join(kind.__name__ for kind in value)})"
    if isinstance(value, Mapping):
        return repr(dict(value))
    return repr(list(value)) if isinstance(value, tuple | list) else repr(value)


def made_defaults(kind: Any) -> dict[str, Any]:
    """Defaults that are made anew for each instance, by field."""
    if dataclasses.is_dataclass(kind):
        factories: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(kind)}
        return {name: make() for name, make in factories.items() if make is not dataclasses.MISSING}
    if hasattr(kind, "__struct_fields__"):
        import msgspec

        factories = {f.name: f.default_factory for f in msgspec.structs.fields(kind)}
        return {name: make() for name, make in factories.items() if callable(make)}
    return {}


def body_of(function: Any) -> list[ast.stmt] | None:
    """The statements of a function after its docstring; None when there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    body = definition.body
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if documented and isinstance(body[0].value.value, str) else body  # type: ignore[attr-defined]


def does_nothing(body: Sequence[ast.stmt] | None) -> bool:
    """Return True if a body is only a placeholder."""
    if body is None:
        return False
    for statement in body:
        if isinstance(statement, ast.Raise) and statement.exc is not None:
            return "NotImplementedError" in ast.dump(statement.exc)
        if not isinstance(statement, ast.Pass) and not (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        ):
            return False
    return True


def read_names(body: Sequence[ast.stmt]) -> set[str]:
    """The names that a body reads."""
    found = (node for statement in body for node in ast.walk(statement))
    return {
        node.id for node in found if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def describe_call(function: Any, owner: Any = None) -> dict[str, Any]:
    """The parameters and the outcome of something that is called."""
    signature = inspect.signature(function)
    made = made_defaults(function) if isinstance(function, type) else {}
    body = body_of(
        inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
    )
    read = read_names(body) if body else None
    parameters = []
    for name, given in signature.parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        default = made.get(name, given.default)
        parameters.append(
            {
                "name": name,
                "kind": given.kind.name,
                "type": "" if given.annotation is given.empty else spelt(given.annotation),
                "default": None if default is given.empty else plain(default),
                "read": read is None or name in read,
            }
        )
    called = inspect.unwrap(function)
    returns = (
        "" if signature.return_annotation is signature.empty else spelt(signature.return_annotation)
    )
    awaited = re.fullmatch(r"(?:Coroutine\[Any, Any, |Awaitable\[)(.*)\]", returns)
    found = {
        "parameters": parameters,
        "returns": re.sub(FUTURES, "Future", awaited[1] if awaited else returns),
        "async": any(map(inspect.iscoroutinefunction, (function, called)))
        or hasattr(function, "_is_coroutine")  # the mark before Python 3.12
        or awaited is not None,
        "stub": not isinstance(function, type) and does_nothing(body),
    }
    kinds = [parameter["kind"] for parameter in parameters]
    if (
        owner is not None
        and kinds == list(VARIADIC)
        and (client := forwarded_to(owner, function.__name__))
    ):
        # A future of a client hands everything to the method of the client.
        return found | {"parameters": describe_call(client)["parameters"]}
    if owner is not None and kinds == list(VARIADIC) and function.__name__.endswith("_async"):
        # What such a method takes is what the one takes that it hands everything to.
        twin = getattr(owner, function.__name__.removesuffix("_async"), None)
        if twin is not None:
            found |= {"parameters": describe_call(twin)["parameters"], "passes_to": twin.__name__}
    return found


def forwarded_to(owner: type[Any], name: str) -> Any:
    """Return the method of a base class, if it names its parameters; else None."""
    for base in owner.__mro__[1:]:
        if name in vars(base):
            method = getattr(base, name)
            kinds = [
                one.kind.name
                for one in inspect.signature(method).parameters.values()
                if one.name != "self"
            ]
            return None if kinds == list(VARIADIC) else method
    return None


def attributes_of(kinds: Sequence[type[Any]]) -> list[str]:
    """Return the attributes of instances: declared in the class, or set by its constructor."""
    found: dict[str, None] = {}
    for kind in (kind for kind in kinds if kind is not object):
        found |= dict.fromkeys(inspect.get_annotations(kind))
        found |= dict.fromkeys(
            name for name, value in vars(kind).items() if isinstance(value, property)
        )
        for statement in body_of(vars(kind).get("__init__")) or []:
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Attribute))
            found |= dict.fromkeys(node.attr for node in stored if isinstance(node.ctx, ast.Store))
    return [name for name in found if not name.startswith("_")]


def describe_exception(kind: type[Any], package: str) -> dict[str, Any]:
    """An exception: its constructor, what it is, and what it carries.

    Of the official ones only what each adds to its base, so that what is absent is named once; of
    ours everything.
    """
    bases = [base.__name__ for base in kind.__mro__[1:] if base is not object]
    if package != "tinker":
        return {
            "kind": "exception",
            "bases": bases,
            "attributes": attributes_of(kind.__mro__),
            **describe_call(kind),
        }
    found = {"kind": "exception", "bases": bases, "attributes": attributes_of([kind])}
    return found | (describe_call(kind) if "__init__" in vars(kind) else {"parameters": None})


def member_names(kind: type[Any], package: str) -> list[str]:
    """The public members that a class of this package has beyond its fields."""
    fields = {*getattr(kind, "model_fields", {}), *getattr(kind, "__dataclass_fields__", {})}
    fields |= set(getattr(kind, "__struct_fields__", ()))
    names: dict[str, None] = {}
    for ancestor in reversed(kind.__mro__):
        if ancestor.__module__.split(".")[0] == package:
            names |= dict.fromkeys(vars(ancestor))
    hidden = fields | VALIDATORS | {"model_config"}
    return [name for name in names if not name.startswith("_") and name not in hidden]


def describe_member(kind: type[Any], name: str) -> dict[str, Any]:
    """A method or property of a class."""
    value = inspect.getattr_static(kind, name)
    if isinstance(value, property | functools.cached_property) or not callable(getattr(kind, name)):
        getter = getattr(value, "fget", None) or getattr(value, "func", None)
        return {"kind": "property", "stub": does_nothing(body_of(getter)) if getter else False}
    return {"kind": "method", **describe_call(getattr(kind, name), kind)}


def describe(value: Any, package: str) -> dict[str, Any]:
    """Anything that has a name at the top of a package or among its types."""
    if inspect.ismodule(value):
        return {"kind": "module"}
    if isinstance(value, str):
        return {"kind": "value", "text": repr(value)}
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return {"kind": "enumeration", "text": ", ".join(f"{m.name} = {m.value!r}" for m in value)}
    # any TypedDict
    if isinstance(value, type) and issubclass(value, dict) and hasattr(value, "__total__"):
        text = ", ".join(f"{name}: {spelt(of)}" for name, of in value.__annotations__.items())
        return {"kind": "alias", "text": f"TypedDict({text})"}
    if (
        isinstance(value, type)
        and typing.get_origin(value) is None
        and value.__module__ != "builtins"
    ):
        if issubclass(value, Warning):
            return {"kind": "warning", "bases": [base.__name__ for base in value.__mro__[1:]]}
        if issubclass(value, BaseException):
            return describe_exception(value, package)
        return {"kind": "class", "members": member_names(value, package), **describe_call(value)}
    if inspect.isfunction(value):
        return {"kind": "function", **describe_call(value)}
    return {"kind": "alias", "text": spelt(value)}


def official() -> dict[str, Any]:
    """The whole surface of the official package (call this in a process of its own)."""
    tinker = importlib.import_module("tinker")
    names = {name: getattr(tinker, name) for name in tinker.__all__}
    for name, value in vars(tinker.types).items():
        if not name.startswith("_") and name != "annotations" and not inspect.ismodule(value):
            names[f"types.{name}"] = value
    for path, home in ELSEWHERE.items():
        names[path] = getattr(importlib.import_module(home), path.removeprefix("types."))
    names |= {f"auth.{name}": getattr(tinker.auth, name) for name in tinker.auth.__all__}
    entries = {}
    for path, value in names.items():
        # A class of another library under a name of this package is one name, not a surface to
        # copy.
        entries[path] = (
            {"kind": "class of httpx"} if path == "Timeout" else describe(value, "tinker")
        )
        for member in entries[path].get("members", ()):
            entries[f"{path}.{member}"] = describe_member(value, member)
        if path in CLIENTS:
            entries |= {f"{path}.{name}": {"kind": "attribute"} for name in attributes_of([value])}
    models = [
        path
        for path, value in names.items()
        if path.startswith("types.") and hasattr(value, "model_fields")
    ]
    inherited = [
        name
        for name in dir(importlib.import_module("pydantic").BaseModel)
        if name.startswith("model_")
    ]
    top = list(tinker.__all__)
    return {
        "version": tinker.__version__,
        "top": top,
        "entries": entries,
        "models": models,
        "inherited": inherited,
    }


def ask_official() -> dict[str, Any]:
    """The same, from a process of its own: importing the package leaves sockets and warnings
    behind.
    """
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--describe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"the official package could not be read:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Absent(Exception):
    """There is nothing of that name."""


def ours(path: str) -> tuple[str, dict[str, Any]]:
    """The name and the description of what tinkex has for an official name."""
    head, *rest = path.split(".")
    parts = [RENAMED.get(head, head), *rest]
    owner: Any = None
    value: Any = importlib.import_module("tinkex")
    for part in parts:
        owner = value
        try:
            value = getattr(owner, part)
        except AttributeError:
            if inspect.ismodule(owner):
                try:
                    value = importlib.import_module(f"{owner.__name__}.{part}")
                    continue
                except ModuleNotFoundError:
                    pass
            if isinstance(owner, type) and part in attributes_of(owner.__mro__):
                return ".".join(["tinkex", *parts]), {"kind": "attribute"}
            raise Absent(path) from None
    name = ".".join(["tinkex", *parts])
    if isinstance(owner, type):
        return name, describe_member(owner, parts[-1])
    return name, describe(value, "tinkex")


# ── both ──────────────────────────────────────────────────────────────────────────────────────────


class Row(NamedTuple):
    """One line of the table."""

    name: str
    signature: str
    where: str
    status: str
    parameters: int
    missing: tuple[str, ...]
    """What is absent: the name itself, or parameters and attributes of it."""

    @property
    def verdict(self) -> str:
        """The status without its reasons."""
        return self.status.split(":")[0]


def parameter_text(parameters: Sequence[Mapping[str, Any]]) -> str:
    """Parameters as they are written in a definition."""
    written, keywords = [], False
    for one in parameters:
        if one["kind"] == "VAR_POSITIONAL":
            keywords = True
        if one["kind"] == "KEYWORD_ONLY" and not keywords:
            written.append("*")
            keywords = True
        kind = f": {one['type']}" if one["type"] else ""
        default = "" if one["default"] is None else f" = {one['default']}"
        written.append(VARIADIC.get(one["kind"], "") + one["name"] + kind + default)
    return ", ".join(written)


def signature_text(entry: Mapping[str, Any]) -> str:
    """The official side of a row."""
    if entry["kind"] == "exception":
        called = "" if entry["parameters"] is None else f"({parameter_text(entry['parameters'])}) "
        carried = ", ".join(f".{name}" for name in entry["attributes"])
        return f"{called}below {entry['bases'][0]}" + (f", has {carried}" if carried else "")
    if entry["kind"] in ("method", "function", "class"):
        called = f"({parameter_text(entry['parameters'])})"
        result = f" -> {entry['returns']}" if entry["returns"] and entry["kind"] != "class" else ""
        return ("async " if entry["async"] else "") + called + result
    return str(entry.get("text") or entry["kind"])


def fixed(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The named parameters, without *args and **kwargs."""
    return [one for one in entry.get("parameters") or () if one["kind"] not in VARIADIC]


def is_empty(default: str | None) -> bool:
    """Return True if a default is an empty collection of any kind."""
    return default in ("[]", "{}", "()", "frozenset()", "set()")


def listed(names: Sequence[str]) -> str:
    """Names in code style."""
    return ", ".join(f"`{name}`" for name in names)


def compare_parameters(
    theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """How our parameters differ, which are absent (or accepted and never read), and which are only
    ours.
    """
    differs: list[str] = []
    absent: list[str] = []
    ignored: list[str] = []
    here = {one["name"]: (place, one) for place, one in enumerate(fixed(mine))}
    for place, one in enumerate(fixed(theirs)):
        name = one["name"]
        if name not in here and INTERNAL_PARAMETERS.get(name) in here:
            differs.append(f"`{name}` is `{INTERNAL_PARAMETERS[name]}`")
            name = INTERNAL_PARAMETERS[name]
        if name not in here:
            absent.append(name)
            continue
        at, own = here.pop(name)
        if one["read"] and not own["read"]:
            ignored.append(name)
            continue
        if one["kind"] != "KEYWORD_ONLY" and own["kind"] == "KEYWORD_ONLY":
            differs.append(f"`{name}` by keyword only")
        elif one["kind"] != "KEYWORD_ONLY" and at != place:
            differs.append(f"`{name}` at another position")
        if one["default"] is None and own["default"] is not None:
            differs.append(f"`{name}` is optional ({own['default']})")
        elif one["default"] != own["default"] and not (
            is_empty(one["default"]) and is_empty(own["default"])
        ):
            differs.append(f"`{name}` has the default {own['default']}")
    extra = [name for name, (_, own) in here.items() if own["default"] is not None]
    differs += [f"needs `{name}`" for name in here if name not in extra]
    kinds = {one["kind"] for one in mine.get("parameters", ())}
    differs += [
        f"no `{VARIADIC[one['kind']]}{one['name']}`"
        for one in theirs["parameters"]
        if one["kind"] in VARIADIC and one["kind"] not in kinds
    ]
    reasons = [
        f"{verb} {listed(names)}"
        for verb, names in (("lacks", absent), ("ignores", ignored))
        if names
    ]
    return reasons + differs, absent + ignored, extra


def compare(path: str, theirs: Mapping[str, Any]) -> Row:
    """The row of one official name."""
    count = len(fixed(theirs)) + len(theirs.get("attributes", ()))
    signature = signature_text(theirs)
    try:
        where, mine = ours(path)
    except Absent:
        return Row(path, signature, "–", "MISSING", count, (path,))
    if mine.get("stub") and not theirs.get("stub"):
        return Row(path, signature, where, "MISSING", count, (path,))
    differs: list[str] = []
    missing: list[str] = []
    extra: list[str] = []
    if where != f"tinkex.{path}":
        differs.append(f"it is `{where.removeprefix('tinkex.')}`")
    if theirs["kind"] != mine["kind"] and {theirs["kind"], mine["kind"]} != {
        "attribute",
        "property",
    }:
        differs.append(f"{mine['kind']} instead of {theirs['kind']}")
    elif "text" in theirs and theirs["kind"] != "value":
        if sorted(theirs["text"].split(" | ")) != sorted(mine["text"].split(" | ")):
            differs.append(f"{mine['text']}")
    elif theirs.get("parameters") is not None:
        wrong, absent, extra = compare_parameters(theirs, mine)
        differs += wrong
        missing += [f"{path}({name})" for name in absent]
        if mine.get("passes_to"):
            differs.append(f"hands `*args, **kwargs` to `{mine['passes_to']}`")
        if theirs["async"] != mine["async"]:
            differs.append("is not async" if theirs["async"] else "is async")
        if theirs["kind"] not in ("class", "exception") and theirs["returns"] != mine["returns"]:
            known = mine["returns"] and theirs["returns"] and mine["returns"] != "Any"
            if known and "Self" not in mine["returns"]:
                differs.append(f"returns {mine['returns']}")
    if "bases" in theirs and theirs["bases"][0] not in mine.get("bases", ()):
        differs.append(f"is no {theirs['bases'][0]}")
    lacking = [
        name for name in theirs.get("attributes", ()) if name not in mine.get("attributes", ())
    ]
    if lacking:
        differs.append(f"has no {listed([f'.{name}' for name in lacking])}")
        missing += [f"{path}.{name}" for name in lacking]
    if differs:
        more = [f"takes {listed(extra)} too"] if extra else []
        status = "differs: " + "; ".join(differs + more)
    elif extra:
        status = f"extra keywords: {listed(extra)}"
    else:
        status = "same"
    return Row(path, signature, where, status, count, tuple(missing))


def name_row(name: str, entry: Mapping[str, Any], public: Sequence[str]) -> Row:
    """The row of a top-level name: only whether it is there; what it is follows further down."""
    kind = entry["kind"]
    here = RENAMED.get(name, name)
    if name in public:
        return Row(name, kind, f"tinkex.{name}", "same", 0, ())
    if here in public:
        return Row(name, kind, f"tinkex.{here}", f"differs: it is `{here}`", 0, ())
    return Row(name, kind, "–", "MISSING", 0, (name,))


def sections(surface: Mapping[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """The parts of the table, in the order a reader looks for them."""
    public = importlib.import_module("tinkex").__all__
    entries: dict[str, dict[str, Any]] = surface["entries"]
    yield (
        "Names at the top level",
        [name_row(name, entries[name], public) for name in sorted(surface["top"])],
    )

    def below(name: str) -> list[Row]:
        found = [path for path in entries if path == name or path.startswith(f"{name}.")]
        return [compare(path, entries[path]) for path in found]

    for client in CLIENTS:
        yield client, below(client)
    yield "Futures of clients", [row for name in CLIENT_FUTURES for row in below(name)]
    others = (
        "APIFuture",
        "AwaitableConcurrentFuture",
        "LossHandle",
        "PerDatumLossFn",
        "RetryConfig",
        "RequestOptions",
    )
    yield "Futures, losses, options", [row for name in others for row in below(name)]
    yield "auth", [compare(path, entries[path]) for path in entries if path.startswith("auth.")]
    errors = [name for name in surface["top"] if entries[name]["kind"] in ("exception", "warning")]
    yield "Exceptions and warnings", [compare(name, entries[name]) for name in sorted(errors)]
    kinds = sorted(path for path in entries if path.startswith("types."))
    yield "Types", [compare(path, entries[path]) for path in kinds if path.count(".") == 1]
    yield (
        "Methods of the types",
        [compare(path, entries[path]) for path in kinds if path.count(".") == 2],
    )


def pydantic_note(surface: Mapping[str, Any]) -> str:
    """Return the methods of pydantic that our types offer."""
    own = importlib.import_module("tinkex.types")
    kinds = [
        getattr(own, path.removeprefix("types."))
        for path in surface["models"]
        if path in surface["entries"]
    ]
    here = [name for name in surface["inherited"] if all(hasattr(kind, name) for kind in kinds)]
    gone = [name for name in surface["inherited"] if name not in here]
    return (
        f"{len(kinds)} of the official types are pydantic models, ours are not. Of what all of "
        f"them inherit, all of ours have {listed(here)}; not {listed(gone)}. These are not counted."
    )


def missing_names(parts: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Everything that is absent, once each, in order."""
    found = dict.fromkeys(name for _, rows in parts for row in rows for name in row.missing)
    return sorted(found, key=lambda name: (name.startswith("types."), name.lower()))


# ── the document ──────────────────────────────────────────────────────────────────────────────────


def cell(text: str) -> str:
    """Text that cannot end a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def code(text: str) -> str:
    """Text in code style, unless it is a dash."""
    return text if text == "–" else f"`{cell(text)}`"


def percent(part: int, whole: int) -> str:
    """A share, rounded down so that only everything is 100 %."""
    return f"{part * 1000 // whole / 10:g} %" if whole else "–"


def summary(parts: Sequence[tuple[str, Sequence[Row]]]) -> Iterator[str]:
    """The counts, by section and in all."""
    yield "| | official | same | extra keywords | differs | MISSING | present |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    everything = [row for _, rows in parts for row in rows]
    for title, rows in [*parts, ("**All names**", everything)]:
        count = Counter(row.verdict for row in rows)
        figures = [count[verdict] for verdict in ("same", "extra keywords", "differs", "MISSING")]
        share = percent(len(rows) - count["MISSING"], len(rows))
        yield f"| {title} | {len(rows)} | {' | '.join(map(str, figures))} | {share} |"
    total = sum(row.parameters for row in everything)
    lacking = sum(
        row.parameters if row.verdict == "MISSING" else len(row.missing) for row in everything
    )
    yield (
        f"| **Parameters, fields, attributes** | {total} | | | | {lacking} | "
        f"{percent(total - lacking, total)} |"
    )


def document(surface: Mapping[str, Any], parts: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """The whole text."""
    absent = missing_names(parts)
    lines = [
        f"# tinkex beside `tinker` {surface['version']}",
        "",
        "Every public name of the official package, and whether tinkex has it with the same "
        "signature. Written by `python tools/parity.py`, which introspects both packages; do not "
        "edit. "
        "Compared are names, the "
        "order, kind and default of parameters, return values, fields, attributes and base "
        "classes. The types of "
        "parameters are shown as the official package has them and are not compared. A method "
        "whose body does nothing, "
        "and a parameter that is accepted but never read, count as missing. Import paths below the "
        "top level, other "
        "than `types` and `auth`, are not compared.",
        "",
        "* **same**: the same signature, or the same members; whether it does the same is for the "
        "tests to say.",
        "* **extra keywords**: the same, and there are further optional parameters.",
        "* **differs**: it is there, and the text says what is not the same.",
        "* **MISSING**: it is not there.",
        "",
        "## Summary",
        "",
        *summary(parts),
        "",
        pydantic_note(surface),
        "",
        f"## What is missing ({len(absent)})",
        "",
        "`name(parameter)` is a parameter, `name.attribute` a method or an attribute.",
        "",
        *(
            f"* `{name}`" + (INTERNAL_NOTE if name.rpartition(".")[2] in INTERNAL else "")
            for name in absent
        ),
    ]
    for title, rows in parts:
        lines += [
            "",
            f"## {title}",
            "",
            "| official name | signature | tinkex name | status |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {code(r.name)} | {code(r.signature)} | {code(r.where)} | {cell(r.status)} |"
            for r in rows
        ]
    return "\n".join(map(wrapped, lines)).replace("\n\n\n", "\n\n") + "\n"


def wrapped(line: str) -> str:
    """A line of prose, wrapped; a row of a table stays one line."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("* ") else ""
    return textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or say whether the written one is current."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail when docs/parity.md is out of date",
    )
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.describe:
        json.dump(official(), sys.stdout)
        return 0
    surface = ask_official()
    parts = list(sections(surface))
    text = document(surface, parts)
    if options.check:
        current = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
        print(
            "docs/parity.md is "
            + ("current" if current else "out of date: run python tools/parity.py")
        )
        return 0 if current else 1
    TABLE.write_text(text, encoding="utf-8")
    print(f"wrote docs/parity.md; {len(missing_names(parts))} names are missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
