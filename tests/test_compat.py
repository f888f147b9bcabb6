"""tinkex under the name of tinker: what is found, that it is the very same, how it is put in place
and taken away."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pickle
import re
import site
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest

import tinkex
from support import is_coroutine_function

if TYPE_CHECKING:
    from tinkex import ServiceClient

OFFICIAL = Path(str(importlib.metadata.distribution("tinker").locate_file("tinker")))
GUIDE = Path(__file__).parent.parent / "docs" / "moving-from-tinker.md"


NAMES = re.compile(r"(tinker|tinkex\.compat)(\.|$)")


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """A process that has not heard of tinker yet, and is afterwards as it was."""
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if NAMES.match(name)}
    meta_path, path, environment = list(sys.meta_path), list(sys.path), os.environ.copy()
    # Other tests import every module, and this one installs itself.
    sys.meta_path[:] = [
        finder for finder in meta_path if type(finder).__module__ != "tinkex.compat"
    ]
    yield
    sys.meta_path[:], sys.path[:] = meta_path, path
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if NAMES.match(name)]:
        del sys.modules[name]
    sys.modules.update(known)


@pytest.fixture
def compat() -> ModuleType:
    """The module, imported for the first time."""
    return importlib.import_module("tinkex.compat")


def official_tree(*parts: str) -> ast.Module:
    """A file of the official package, which is not imported for it."""
    return ast.parse(OFFICIAL.joinpath(*parts).read_text())


def imported_names(tree: ast.Module) -> dict[str, set[str]]:
    """Return the names that a module imports from its siblings."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            found.setdefault(node.module, set()).update(
                alias.asname or alias.name for alias in node.names
            )
    return found


def listed_names(tree: ast.Module) -> set[str]:
    """Return the names in a module's `__all__`."""
    nodes = (
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(ast.literal_eval(next(nodes).value))


# ── what is found ─────────────────────────────────────────────────────────────────────────────────


def test_every_name_of_the_table_is_the_very_same_in_tinkex(compat: ModuleType) -> None:
    from tinkex.compat.names import MODULES

    for name, held in MODULES.items():
        module = importlib.import_module(name)
        for attribute, home in held.items():
            place, _, inner = home.partition(":")
            assert getattr(module, attribute) is getattr(importlib.import_module(place), inner), (
                name,
                attribute,
            )
            assert attribute in dir(module)


def test_programs_import_it_in_every_form(compat: ModuleType) -> None:
    program = """
import tinker
import tinker.types.image_chunk
from tinker import types, ModelInput, TinkerError as Error
from tinker.types import LossFnType
from tinker.types.tensor_data import TensorData
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.public_interfaces.service_client import RetryConfig
from tinker._exceptions import RequestFailedError
everything = {}
exec("from tinker import *", everything)
"""
    known: dict[str, Any] = {}
    exec(program, known)
    assert known["tinker"].Datum is tinkex.Datum
    assert known["tinker"].types.image_chunk.ImageChunk is tinkex.types.ImageChunk
    assert known["TensorData"] is tinkex.TensorData
    assert known["APIFuture"] is tinkex.APIFuture
    assert known["RestClient"] is tinkex.RestClient
    assert known["RetryConfig"] is tinkex.RetryConfig
    assert known["RequestFailedError"] is tinkex.RequestFailedError
    assert known["Error"] is tinkex.TinkerError
    assert "cross_entropy" in get_args(known["LossFnType"])
    assert known["everything"]["ServiceClient"] is tinkex.ServiceClient
    assert known["everything"]["types"].Datum is tinkex.Datum
    assert known["tinker"].__version__ == "0.38.0"


def test_table_is_that_of_the_official_package() -> None:
    from tinkex.compat.names import APART, MODULES, TOP

    assert listed_names(official_tree("__init__.py")) == {
        *TOP,
        "auth",
        "types",
        "__title__",
        "__version__",
    }
    interfaces = ("lib", "public_interfaces", "__init__.py")
    assert (
        listed_names(official_tree(*interfaces)) == MODULES["tinker.lib.public_interfaces"].keys()
    )
    assert (
        imported_names(official_tree("__init__.py"))["_exceptions"]
        == MODULES["tinker._exceptions"].keys()
    )
    types = imported_names(official_tree("types", "__init__.py"))
    assert MODULES["tinker.types"].keys() == {name for names in types.values() for name in names}
    for module, names in types.items():
        assert MODULES[f"tinker.types.{module}"].keys() - {*APART} == names - {*APART}, module
    for name in APART:
        homes = [module for module, held in MODULES.items() if name in held]
        assert len(homes) == 1
        assert name in ast.unparse(
            official_tree(*homes[0].split(".")[1:-1], homes[0].rpartition(".")[2] + ".py")
        )


def test_missing_attribute_is_an_attribute_error(compat: ModuleType) -> None:
    tinker: Any = importlib.import_module("tinker")
    with pytest.raises(ModuleNotFoundError, match=r"tinker\.lib\.internal_client_holder"):
        importlib.import_module("tinker.lib.internal_client_holder")
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = tinker.Nothing
    with pytest.raises(ImportError, match="Nothing"):
        exec("from tinker.types import Nothing")


class _Absent:
    """Stands in the way of the official package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "tinker":
            raise ModuleNotFoundError("No module named 'tinker'", name=name)
        return None


def test_official_package_need_not_be_installed() -> None:
    sys.meta_path.insert(0, _Absent())
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tinker")
    importlib.import_module("tinkex.compat").install()
    assert importlib.import_module("tinker.types").Datum is tinkex.Datum


# ── put in place and taken away ───────────────────────────────────────────────────────────────────


def test_compat_can_be_removed_and_installed_again(compat: ModuleType) -> None:
    before = importlib.import_module("tinker.types")
    assert compat.installed()
    compat.uninstall()
    assert not compat.installed()
    assert not [name for name in sys.modules if name.startswith("tinker.")]
    spec = importlib.util.find_spec("tinker")
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.endswith(os.path.join("tinker", "__init__.py"))  # the official one
    assert before.Datum is tinkex.Datum  # whoever has it, keeps it
    compat.uninstall()
    compat.install()
    compat.install()
    assert sum(one is compat._finder for one in sys.meta_path) == 1
    assert importlib.import_module("tinker").Datum is tinkex.Datum


def test_compat_after_tinker_is_refused() -> None:
    there = ModuleType("tinker")
    there.__file__ = "/somewhere/tinker/__init__.py"
    sys.modules["tinker"] = there
    with pytest.raises(
        ImportError, match=r"already been imported, from /somewhere.*import tinkex\.compat before"
    ):
        importlib.import_module("tinkex.compat")
    assert sys.modules["tinker"] is there


def test_version_of_tinker_is_installed(compat: ModuleType, tmp_path: Path) -> None:
    from tinkex.wire.protocol import PROTOCOL_VERSION

    assert importlib.metadata.version("tinker") == PROTOCOL_VERSION
    assert importlib.metadata.metadata("Tinker")["Summary"] == "tinkex under the name of tinker"
    assert [one.name for one in importlib.metadata.distributions(path=[str(tmp_path)])] == []
    assert importlib.metadata.version("tinkex")
    compat.uninstall()
    assert importlib.metadata.metadata("tinker")["Summary"] != "tinkex under the name of tinker"


PROGRAM = """
import multiprocessing, sys
import tinker

def work(number):
    import tinker
    return tinker.ModelInput.from_ints([number])

if __name__ == "__main__":
    import importlib.metadata
    assert importlib.metadata.version("tinker") == "0.38.0"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        name = type(pool.map(work, [1])[0]).__module__
        print(tinker.ServiceClient.__module__, name, sys.argv[1:])
    import tinkex.compat
    tinkex.compat.uninstall()
    import importlib.util, os
    spec = importlib.util.find_spec("tinker")
    ours = tinkex.compat.SHIM, "tinkex.compat"
    assert spec is None or not spec.origin.startswith(ours), spec
    assert tinkex.compat.SHIM not in os.environ["PYTHONPATH"]
    sys.exit(7 if "torch" in sys.modules else 5)
"""


def run_compat(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(tinkex.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": source, **environment}
    command = [sys.executable, "-m", "tinkex.compat", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_program_and_its_children_run_on_tinkex(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_compat(str(tmp_path / "program.py"), "a", "--b")
    assert done.stdout == "tinkex.client.service tinkex.types.inputs ['a', '--b']\n", done.stderr
    assert done.returncode == 5


def test_code_runs_without_unused_imports() -> None:
    code = (
        "import tinker, sys; print(sys.argv, sorted({'numpy', 'msgspec', 'aiohttp'} & "
        "sys.modules.keys()))"
    )
    assert run_compat("-c", code, "x").stdout == "['-c', 'x'] []\n"


def test_modules_run_and_help_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinkex.compat import SHIM, __main__

    became: list[tuple[str, list[str], Mapping[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    monkeypatch.setenv("PYTHONPATH", "here")
    __main__.main(["-m", "package.module", "x"])
    ((program, command, environment),) = became
    assert program == command[0] == sys.executable
    assert command[-3:] == ["-m", "package.module", "x"]
    assert environment["PYTHONPATH"].split(os.pathsep) == [SHIM, "here"]
    assert __main__.main([]) == 2
    assert __main__.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m tinkex.compat PROGRAM")


# ── the hook ──────────────────────────────────────────────────────────────────────────────────────


def test_hook_is_put_in_place_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinkex.compat import __main__, hook

    monkeypatch.setattr(hook, "place", lambda: tmp_path / "tinkex-compat.pth")
    assert __main__.main(["--remove-hook"]) == 0
    assert __main__.main(["--install-hook"]) == 0
    assert __main__.main(["--install-hook"]) == 0
    assert (tmp_path / "tinkex-compat.pth").read_text() == hook.LINE
    assert __main__.main(["--remove-hook"]) == 0
    assert not any(tmp_path.iterdir())
    said = capsys.readouterr().out
    assert "there was no hook" in said
    assert "TINKEX_COMPAT=1 lets" in said
    monkeypatch.setattr(hook, "place", lambda: tmp_path / "nowhere" / "tinkex-compat.pth")
    assert __main__.main(["--install-hook"]) == 1
    assert "cannot change" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "works"), [("1", True), ("0", False), ("", False), (None, False)]
)
def test_hook_heeds_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, works: bool
) -> None:
    (tmp_path / "tinkex-compat.pth").write_text(_line())
    if value is not None:
        monkeypatch.setenv("TINKEX_COMPAT", value)
    site.addsitedir(str(tmp_path))  # as Python does for its own directories when it starts
    assert ("tinkex.compat" in sys.modules) is works
    spec = importlib.util.find_spec("tinker")
    assert spec is not None
    assert (spec.origin == "tinkex.compat") is works


def _line() -> str:
    """The hook's line, read without importing the package that it is about."""
    tree = ast.parse((Path(tinkex.__file__).parent / "compat" / "hook.py").read_text())
    known: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            exec(ast.unparse(node), known)
    line: str = known["LINE"]
    return line


def test_hook_does_not_break_a_python_without_tinkex() -> None:
    code = f"exec({_line()!r}); print('started')"
    env = {**os.environ, "TINKEX_COMPAT": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert done.stderr == "TINKEX_COMPAT has no effect: No module named 'tinkex'\n"


# ── what programs rely on ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["TrainingClient", "SamplingClient"])
def test_client_has_only_the_official_coroutine_functions(name: str) -> None:
    module = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    tree = official_tree("lib", "public_interfaces", f"{module}.py")
    theirs = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    )
    wanted = {
        node.name
        for node in theirs.body
        if isinstance(node, ast.AsyncFunctionDef) and node.name[0] != "_"
    }
    client = getattr(tinkex, name)
    have = {
        method
        for method in dir(client)
        if method[0] != "_" and is_coroutine_function(getattr(client, method))
    }
    assert have == wanted


def test_own_methods_are_awaitable_too(
    fake_service: Callable[..., ServiceClient],
) -> None:
    training = fake_service().create_lora_training_client("fake", rank=4).result()
    given = SimpleNamespace(encode=list, decode=str)
    load: Any = {"load_fun": lambda name, options: given}

    async def both() -> list[Any]:
        sampler = await training.save_weights_and_get_sampling_client()
        return [
            await training.get_tokenizer_async(**load),
            await sampler.get_tokenizer_async(**load),
        ]

    assert asyncio.run(both()) == [given, given]


def test_output_can_be_captured(
    fake_service: Callable[..., ServiceClient],
) -> None:
    training = fake_service().create_lora_training_client("fake", rank=4).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    assert sampler._sampling_session_id == sampler.sampling_session_id
    done: list[Any] = []
    future = training.save_state("captured")
    future.add_done_callback(done.append)
    concurrent.futures.wait([future], timeout=10)
    assert done == [future]


def test_values_of_both_names_are_equal(compat: ModuleType) -> None:
    tinker: Any = importlib.import_module("tinker")
    datum = tinker.Datum(
        tinker.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.5, 1.0]}
    )
    assert isinstance(datum, tinkex.Datum)
    assert pickle.loads(pickle.dumps(datum)) == datum
    with pytest.raises(tinker.TinkerError):
        raise tinkex.RequestFailedError("no", "id", "user")


# ── the guide ─────────────────────────────────────────────────────────────────────────────────────


def rows() -> list[tuple[str, str, str]]:
    """The table of differences: an expression, what it gives there, what it gives here."""
    table = GUIDE.read_text().split("## What differs")[1].split("\n## ")[0]
    found = [
        re.findall(r"\| `(.+?)` (?=\|)", line)[:3]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    assert len(found) >= 15
    return [(expression, theirs, ours) for expression, theirs, ours in found]


EVALUATE = """
def evaluate(expression):
    import concurrent.futures, httpx, importlib.util, inspect, logging, pickle, pydantic, tinker
    known = {**locals(), "request": httpx.Request("GET", "http://example.invalid")}
    try:
        return repr(eval(expression, known))
    except Exception as error:
        return type(error).__name__
"""


def test_listed_differences_hold_in_tinkex(compat: ModuleType) -> None:
    known: dict[str, Any] = {}
    exec(EVALUATE, known)
    logging.getLogger("httpx").setLevel(logging.NOTSET)
    assert {row[0]: known["evaluate"](row[0]) for row in rows()} == {
        expression: ours for expression, _, ours in rows()
    }


@pytest.mark.slow
def test_listed_differences_hold_in_tinker() -> None:
    code = (
        f"{EVALUATE}\nimport json, sys; print(json.dumps([evaluate(one) for one in "
        "json.loads(sys.argv[1])]))"
    )
    expressions = json.dumps([row[0] for row in rows()])
    done = subprocess.run(
        [sys.executable, "-c", code, expressions], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [theirs for _, theirs, _ in rows()]
