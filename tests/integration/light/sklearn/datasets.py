"""The digits of the installed scikit-learn, without its import, which takes as long as torch's."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def load_digits(*, return_X_y: bool = False) -> Any:  # noqa: N803
    """Return the images and their labels as scikit-learn does."""
    places = (Path(path) / "sklearn/datasets/data/digits.csv.gz" for path in sys.path)
    rows = np.loadtxt(next(place for place in places if place.exists()), delimiter=",")
    data, target = rows[:, :-1], rows[:, -1].astype(int)
    return (data, target) if return_X_y else SimpleNamespace(data=data, target=target, images=data.reshape(-1, 8, 8))
