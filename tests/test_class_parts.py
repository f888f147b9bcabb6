"""Classes made of parts: their methods are their own, by name too."""

from __future__ import annotations

import inspect
import warnings

import pytest

from tinkex import RestClient, SamplingClient, ServiceClient, TrainingClient
from tinkex.client.futures.twins import twin
from tinkex.client.http.request_headers import headers_of
from tinkex.client.session_client import made_of


class Part:
    """A part with a method, its twin, a property and a private method."""

    def ask(self) -> dict[str, str]:
        return headers_of("x")

    ask_async = twin(ask)

    @property
    def fact(self) -> int:
        return 1

    def _hidden(self) -> None: ...


@made_of(Part)
class Whole(Part):
    def own(self) -> dict[str, str]:
        return headers_of("x")


def test_class_has_the_public_methods_of_its_parts() -> None:
    assert {"ask", "ask_async", "fact", "own"} <= vars(Whole).keys()
    assert "_hidden" not in vars(Whole)
    assert Whole.ask.__qualname__ == "Whole.ask"


def test_methods_of_parts_name_requests_by_the_class() -> None:
    assert Whole().ask()["x-sdk-method"] == "Whole.ask"
    assert Whole().own()["x-sdk-method"] == "Whole.own"


def test_deprecation_of_a_part_names_the_class() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Whole().ask_async().close()
    assert str(caught[0].message) == (
        "DEPRECATED: Whole.ask_async() will be removed: await Whole.ask()"
    )


@pytest.mark.parametrize("kind", [TrainingClient, SamplingClient, RestClient, ServiceClient])
def test_public_methods_of_clients_are_in_the_class_itself(kind: type[object]) -> None:
    for name, member in inspect.getmembers_static(kind):
        if not name.startswith("_") and inspect.isfunction(member):
            assert name in vars(kind), name
