"""Simulated workers: torch's SGD on the problem of reference.py, with an algorithm of lsgd."""

import numpy as np
import torch

from lsgd.collectives.topology import first_ranks
from lsgd.protocol.messages import Round
from lsgd.testing.simulation import SimulatedWorker, generation_of, simulate

from .reference import Exchange, Problem

SPLIT = 17
"""The model is held in two flat tensors: the first so many elements, and the rest."""


def make_round(node_sizes, id: int = 1, *, exchange: Exchange | None = None, number: int = 1, source: int = 0):
    """Return a round: that of the script, or a global one with leader 0."""
    exchange = exchange or Exchange(None, 0, tuple(first_ranks(node_sizes)), id - 1)
    return Round(
        id=id,
        generation=generation_of(node_sizes, number),
        scope="global" if exchange.node is None else "local",
        leader=exchange.leader,
        leaders=exchange.leaders,
        exchanges=exchange.exchanges,
        new=(),
        source=source,
        final=False,
    )


class TorchWorker(SimulatedWorker):
    """A model in two flat tensors, a torch SGD, and an algorithm, all at their start."""

    def __init__(self, settings, group, problem: Problem, *, lr=0.02, momentum=0.9, dtypes=(torch.float32,) * 2):
        self.problem = problem
        start = torch.from_numpy(problem.start)
        parts = zip((start[:SPLIT], start[SPLIT:]), dtypes, strict=True)
        self.flats = [part.to(dtype, copy=True).requires_grad_() for part, dtype in parts]
        for x in self.flats:
            x.grad = torch.zeros_like(x)
        parameters, gradients = [x.detach() for x in self.flats], [x.grad for x in self.flats]
        optimizer = torch.optim.SGD(self.flats, lr=lr, momentum=momentum)
        super().__init__(group, settings, parameters, gradients, optimizer)

    @property
    def model(self) -> np.ndarray:
        """All parameters in float64."""
        return torch.cat([x.double() for x in self.parameters]).numpy()

    def loss(self) -> torch.Tensor:
        features, targets = (torch.from_numpy(part) for part in self.problem.batch(self.group.rank, self.steps))
        x = torch.cat([x.float() for x in self.flats])
        return torch.nn.functional.mse_loss(features @ x, targets)

    def iterate(self, round: Round | None) -> float:
        """One whole iteration; returns its loss."""
        return super().iterate(round, self.loss)


class Recording:
    """A group that notes what this member sends to others, those of its subgroups included.

    ``log`` has (verb, group, tensors) for each call: ``all_to_all`` its inputs, the others what they send.
    """

    def __init__(self, group, log=None, name="world"):
        self._group, self._name = group, name
        self.log = [] if log is None else log

    def __getattr__(self, attribute):
        return getattr(self._group, attribute)

    @property
    def node(self):
        return Recording(self._group.node, self.log, "node")

    @property
    def across(self):
        across = self._group.across
        return across and Recording(across, self.log, "across")

    def _note(self, verb, tensors):
        if self._group.size > 1:
            self.log.append((verb, self._name, [x.detach().clone() for x in tensors]))

    def all_reduce(self, tensor):
        self._note("all_reduce", [tensor])
        return self._group.all_reduce(tensor)

    def broadcast(self, tensor, source):
        self._group.broadcast(tensor, source)
        self._note("broadcast", [tensor])

    def all_gather(self, outputs, tensor):
        self._note("all_gather", [tensor])
        return self._group.all_gather(outputs, tensor)

    def all_to_all(self, outputs, inputs):
        self._note("all_to_all", inputs)
        return self._group.all_to_all(outputs, inputs)

    def exchange(self, sends, receives):
        self._note("exchange", list(sends.values()))
        self._group.exchange(sends, receives)

    def sent(self, verb, name=None):
        """The tensors of each call of ``verb``, as arrays."""
        return [[x.numpy() for x in xs] for v, n, xs in self.log if v == verb and name in (None, n)]


def train(settings, node_sizes, steps, *, period=1, problem=None, record=False, **options):
    """Run workers in lockstep, with a global round before every ``period``-th iteration; return them."""
    problem = problem or Problem(sum(node_sizes))

    def member(group):
        worker = TorchWorker(settings, Recording(group) if record else group, problem, **options)
        worker.begin(make_round(node_sizes))
        for step in range(steps):
            due = step % period == 0
            worker.iterate(make_round(node_sizes, id=step // period + 1) if due else None)
        return worker

    return simulate(node_sizes, member)


def relative_error(x: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))
