"""The formulas of bytes sent, against what simulated workers send in one round."""

import pytest
import torch

from lsgd.algorithms import ALGORITHMS
from lsgd.testing.simulation import land, simulate

from .training import make_round

NUMEL = 204_800  # whole chunks of every codec
ROUNDS = 6  # in which byes of 2, 3 and 5 workers come equally often
EIGHT_BITS = {"compression": "minmax8"}
CASES = [(name, {}) for name in ALGORITHMS] + [
    ("leader", EIGHT_BITS),
    ("local", EIGHT_BITS),
    ("local", {"compression": "levels2", "fragments": 2}),
    ("decentralized", {"peers": "all"}),
    ("decentralized", {"peers": "shift_one"}),
    ("low_precision_decentralized", {"topology": "all"}),
]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_bytes_of_one_iteration(name, options, workers):
    """Per round, times the period: the mean over workers and rounds agrees to 2 %, with headers."""
    settings = ALGORITHMS[name](**options)
    node_sizes = [1] * workers

    def member(group):
        group = Rings(group)
        model = [torch.randn(NUMEL)]
        algorithm = settings.create(model)
        algorithm.reset(model, group, make_round(node_sizes))
        before = group.sent_nbytes
        for id in range(1, ROUNDS + 1):
            land(algorithm.before_forward(model, group, make_round(node_sizes, id)))
            land(algorithm.after_backward(model, [torch.randn(NUMEL)], group, make_round(node_sizes, id)))
        return (group.sent_nbytes - before) / ROUNDS

    mean = sum(simulate(node_sizes, member)) / workers
    expected = settings.sent_nbytes(NUMEL, workers) * settings.schedule().period
    assert mean == pytest.approx(expected, rel=0.02)


class Rings:
    """A group whose all_reduce counts as a ring's, 2 (n - 1) / n of the tensor: the simulation's sends all to all."""

    def __init__(self, group):
        self._group, self._ring_nbytes = group, 0.0

    def __getattr__(self, name):
        return getattr(self._group, name)

    @property
    def across(self):
        return self

    @property
    def sent_nbytes(self):
        return self._group.sent_nbytes + self._ring_nbytes

    def all_reduce(self, tensor):
        size = self._group.size
        self._ring_nbytes += 2 * (size - 1) / size * tensor.nbytes - (size - 1) * tensor.nbytes
        return self._group.all_reduce(tensor)
