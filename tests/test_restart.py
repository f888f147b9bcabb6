"""A server that is killed and started again on the same data directory: its clients carry on and
notice nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supervision import Death, files_of, run_loop, supervised

STEPS = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    data_dir = tmp_path_factory.mktemp("undisturbed")
    with supervised(data_dir, []) as server:
        given = run_loop(server.base_url, "tinkex", "fake", STEPS)
        assert server.lives == 1
    return given, files_of(data_dir)


@pytest.mark.covers("S44")
@pytest.mark.timeout(120)
def test_killed_server_loses_and_repeats_no_operation(
    undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path
) -> None:
    deaths = [Death("flush", 12), Death("write", 14), Death("flush", 45), Death("write", 26)]
    with supervised(tmp_path, deaths) as server:
        assert run_loop(server.base_url, "tinkex", "fake", STEPS) == undisturbed[0]
        # how much is written at once, and how often, depends on the machine's load
        assert server.toll.kills >= 2
        assert server.toll.mid_write >= 1
    assert files_of(tmp_path) == undisturbed[1]


@pytest.mark.covers("S44")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("client", ["tinkex", pytest.param("tinker", marks=pytest.mark.slow)])
def test_stopping_server_loses_nothing(
    undisturbed: tuple[dict[str, Any], dict[str, str]], tmp_path: Path, client: str
) -> None:
    with supervised(tmp_path, [Death("stop", 0.3)] * 3) as server:
        assert run_loop(server.base_url, client, "fake", STEPS) == undisturbed[0]
        assert server.lives >= 2
    assert files_of(tmp_path) == undisturbed[1]
