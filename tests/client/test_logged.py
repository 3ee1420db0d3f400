"""Numbers of the user's own: which are taken, and what is said of others."""

import math

import numpy as np
import pytest
import torch

from lsgd.client.iteration.reports import Logged
from lsgd.errors import ConfigError
from tests import golden


def test_the_last_of_each_name_counts() -> None:
    logged = Logged()
    logged.add({"accuracy": 0.5, "grad/norm": torch.tensor([2.0])})
    logged.add({"accuracy": np.float32(0.75), "tokens": 3})
    assert logged.numbers == {"accuracy": 0.75, "grad/norm": 2.0, "tokens": 3.0}
    logged.add({"accuracy": math.nan, "tokens": 10**400})
    assert logged.numbers == {"grad/norm": 2.0}


def test_lsgd_s_own_numbers_take_none_of_the_script_s_names() -> None:
    logged = Logged()
    logged.note({"lsgd/agreement": 0.5, "lsgd/agreement/h.0": None})
    logged.add({f"n{i}": float(i) for i in range(32)})
    assert len(logged.numbers) == 33 and next(iter(logged.numbers)) == "lsgd/agreement"
    logged.note({"lsgd/agreement/h.0": 0.25})
    logged.add({"n0": 1.0})
    assert [*logged.numbers][:2] == ["lsgd/agreement/h.0", "n0"] and len(logged.numbers) == 33


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"": 1.0}, "not ''"),
        ({"a" * 65: 1.0}, "1 to 64 letters"),
        ({"two words": 1.0}, golden.pattern("logged.such_as")),
        ({7: 1.0}, "not 7"),
        ({"a": "0.5"}, "'a' is a str"),
        ({"a": None}, "'a' is a NoneType"),
        ({"a": torch.zeros(2)}, r"'a' is a tensor of \(2,\)"),
        ({f"n{i}": 1.0 for i in range(33)}, golden.pattern("logged.too_many_names")),
    ],
)
def test_what_cannot_be_used_is_refused_in_words_and_changes_nothing(numbers, said) -> None:
    logged = Logged()
    logged.add({"known": 1.0} if len(numbers) == 1 else {})
    before = logged.numbers
    with pytest.raises(ConfigError, match=said):
        logged.add({"fine": 2.0, **numbers} if len(numbers) == 1 else numbers)
    assert logged.numbers == before
