"""A simulated worker does what the client does: rounds by the schedule, leaders by losses, means over all."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.base import Algorithm
from lsgd.algorithms.leader import LeaderSettings
from lsgd.errors import ConfigError
from lsgd.settings import AlgorithmSettings, Schedule
from lsgd.testing.simulation import SimulatedWorker, simulate, steps_at
from tests import golden

NODES = (2, 1)
LOSSES = (3.0, 1.0, 2.0)  # of each rank, in every step


class Noting(Algorithm):
    """Notes what it is called with."""

    def __init__(self):
        self.steps = 0
        self.rounds = {}
        self.notes = []

    def reset(self, parameters, group, round):
        self.notes.append(("reset", round.id))

    def before_forward(self, parameters, group, round):
        self.rounds[self.steps] = round

    def settle(self, parameters):
        self.notes.append(("settle", self.steps))

    def after_step(self, parameters):
        self.steps += 1


@dataclass(frozen=True)
class NotingSettings(AlgorithmSettings):
    name: ClassVar[str] = "noting"
    summary: ClassVar[str] = "notes what it is called with"

    def schedule(self):
        return Schedule(4, 2)

    def create(self, parameters, run=""):
        return Noting()


def worker_of(group, settings, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SimulatedWorker.of_model(group, settings, model, optimizer)


def test_rounds_come_by_the_schedule_and_the_lowest_losses_lead():
    def member(group):
        model = nn.Linear(3, 1)
        worker = worker_of(group, NotingSettings(), model)
        for _ in range(9):
            worker.step(lambda: LOSSES[group.rank] + 0.0 * model.bias.sum())
        return worker.algorithm

    for algorithm in simulate(NODES, member):
        assert {step: (r.id, r.scope, r.exchanges) for step, r in algorithm.rounds.items()} == {
            **{0: (1, "global", 0), 2: (2, "local", 1), 4: (3, "global", 1)},
            **{6: (4, "local", 2), 8: (5, "global", 2)},
        }
        first, *others = algorithm.rounds.values()
        assert (first.leader, first.leaders) == (0, (0, 2)), "before the first loss: the lowest ranks"
        assert {(r.leader, r.leaders) for r in others} == {(1, (1, 2))}
        assert algorithm.notes == [("reset", 1), *(("settle", n) for n in (2, 4, 6, 8))]


def test_a_loss_that_is_not_finite_never_leads():
    def member(group):
        model = nn.Linear(3, 1)
        worker = worker_of(group, NotingSettings(), model)
        for _ in range(3):
            worker.step(lambda: (float("nan") if group.rank == 0 else 1.0) + 0.0 * model.bias.sum())
        return worker.algorithm.rounds[2].leader

    assert simulate((3,), member) == [1, 1, 1]


def test_the_probe_elects_by_what_it_returns_and_not_by_the_losses():
    """Rank 0 has the lowest losses, rank 2 the best model; before the first step nobody is asked."""
    modes = []

    def member(group):
        model = nn.Linear(3, 1)
        nn.init.zeros_(model.weight)
        nn.init.constant_(model.bias, 3.0 - group.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def probe():
            modes.append((model.training, torch.is_grad_enabled()))
            return model.bias.sum()

        settings = LeaderSettings(period=2, local_period=2, election="probe", pull_global=0.0, proximal_global=0.0)
        worker = SimulatedWorker.of_model(group, settings, model, optimizer, probe=probe)
        leaders = []
        for _ in range(4):
            worker.step(lambda: LOSSES[group.rank] + 0.0 * model.weight.sum())
            leaders.append(worker.algorithm.global_leader[0].sum().item())
        assert model.training
        return leaders

    assert simulate((3,), member) == [[3.0, 3.0, 1.0, 1.0]] * 3
    assert modes == [(False, False)] * 3

    def without(group):
        worker_of(group, LeaderSettings(election="probe"), nn.Linear(3, 1))

    with pytest.raises(ConfigError, match=golden.pattern("simulation.pass_probe")):
        simulate((1,), without)


@pytest.mark.parametrize("lockstep", [False, True])
def test_buffers_are_averaged_in_global_rounds_unless_all_have_one_model(lockstep):
    def member(group):
        model = nn.Linear(3, 1)
        model.register_buffer("seen", torch.tensor(float(group.rank)))
        settings = AllReduceSettings() if lockstep else NotingSettings()
        worker_of(group, settings, model).step(lambda: model.bias.sum())
        return float(model.seen)

    assert simulate(NODES, member) == ([0.0, 1.0, 2.0] if lockstep else [1.0, 1.0, 1.0])


def test_a_faster_worker_makes_more_steps_between_the_same_rounds():
    def member(group):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        speed = 2.0 if group.rank == 0 else 0.5
        worker = SimulatedWorker.of_model(group, NotingSettings(), model, optimizer, speed=speed)
        for _ in range(int(8 * speed)):
            worker.step(lambda: model.bias.sum())
        return [*worker.algorithm.rounds], [r.id for r in worker.algorithm.rounds.values()]

    fast, *slow = simulate(NODES, member)
    assert fast == ([0, 4, 8, 12], [1, 2, 3, 4])
    assert slow == [([0, 1, 2, 3], [1, 2, 3, 4])] * 2


def test_a_speed_may_be_a_decimal_fraction():
    assert steps_at(0.29, 100) == 29 and steps_at(1.15, 100) == 115  # 28.999999999999996 and 114.99999999999999


def test_a_speed_that_fits_no_period_is_refused():
    def member(group):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        SimulatedWorker.of_model(group, NotingSettings(), model, optimizer, speed=0.75)

    with pytest.raises(ConfigError, match=golden.pattern("simulation.mean_speed")):
        simulate((1,), member)


def test_it_trains_the_model_with_the_mean_gradient():
    """All-reduced SGD of three workers is SGD on the batches of all."""
    x = torch.arange(9.0).view(3, 3) / 9
    alone = nn.Linear(3, 1)
    start = copy.deepcopy(alone.state_dict())

    def member(group):
        model = nn.Linear(3, 1)
        model.load_state_dict(start)
        worker = worker_of(group, AllReduceSettings(), model)
        for _ in range(5):
            worker.step(lambda: model(x[group.rank]).square().mean())
        return model.weight.detach().clone()

    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        optimizer.step()
    for weight in simulate(NODES, member):
        torch.testing.assert_close(weight, alone.weight.detach())
