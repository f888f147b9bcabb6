"""Arguments of a datum are checked at construction, not when it is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinkex import Datum, ModelInput, TensorData

INPUT = ModelInput.from_ints([1, 2])


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ([1, 2, 3], "got a list: use ModelInput.from_ints"),
        ("hello", "got a str: use ModelInput.from_text"),
        (None, "got a NoneType"),
        (np.array([1, 2]), "got a ndarray: use ModelInput.from_ints"),
    ],
    ids=["list", "text", "none", "array"],
)
def test_datum_takes_a_model_input(given: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        Datum(given, {"target_tokens": [1, 2]})


@pytest.mark.parametrize(
    "given", [[1, 2], "hello", {1: [1, 2]}], ids=["list", "text", "number-as-name"]
)
def test_datum_takes_a_mapping_of_names(given: Any) -> None:
    with pytest.raises(TypeError, match="loss_fn_inputs must map names to tensors"):
        Datum(INPUT, given)


def test_datum_takes_its_input_in_json_form() -> None:
    given: Any = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    assert Datum(given, {"target_tokens": [1, 2]}) == Datum(INPUT, {"target_tokens": [1, 2]})


def test_number_that_no_tensor_holds_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="numbers that int64 can hold"):
        TensorData([2**70], "int64")
