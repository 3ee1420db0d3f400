"""The digits of the installed scikit-learn, without its import, which takes as long as torch's."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np


def load_digits() -> SimpleNamespace:
    """Return the images and their labels as scikit-learn does."""
    places = (Path(path) / "sklearn/datasets/data/digits.csv.gz" for path in sys.path)
    rows = np.loadtxt(next(place for place in places if place.exists()), delimiter=",")
    images = rows[:, :-1]
    return SimpleNamespace(data=images, target=rows[:, -1].astype(int), images=images.reshape(-1, 8, 8))
