"""Leader SGD's 8-bit leaders and delayed transfers, in lockstep, against a float64 reference."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from lsgd.algorithms.leader import LeaderSettings
from lsgd.errors import ExchangeError
from lsgd.testing.simulation import simulate
from tests import golden

from ..speed import scaled
from .reference import Exchange, Problem, Worker, close_to, decode, nodes_of
from .training import SPLIT, Recording, TorchWorker, make_round, relative_error

PULLS = {"pull_global": 0.2, "pull_local": 0.15, "proximal_global": 0.3, "proximal_local": 0.4}
C2, C1, P2, P1 = PULLS.values()
PARTS = (slice(0, SPLIT), slice(SPLIT, None))
STEPS = 96
NODES = [[1, 1], [3], [2, 2], [1, 2, 2], [3, 3]]


def script_of(node_sizes, settings, steps=STEPS):
    """A round (or None) before each step, with leaders that change in no simple order."""
    units = nodes_of(node_sizes)
    two_levels = len(units) > 1 and settings.local_period < settings.period
    rounds = []
    for step in range(steps):
        due = step % settings.period == 0 or (two_levels and step % settings.local_period == 0)
        leaders = tuple(unit[(step * 7 // 3 + u) % len(unit)] for u, unit in enumerate(units))
        leader = leaders[(step * 5 // 2) % len(units)]
        node = None if step % settings.period == 0 else -1  # -1: local, in every node at once
        rounds.append(Exchange(node, leader, leaders, step // settings.period) if due else None)
    return rounds, two_levels


def train(settings, node_sizes, *, steps=STEPS, dtype=torch.float32, **sgd):
    rounds, _ = script_of(node_sizes, settings, steps)

    def member(group):
        worker = TorchWorker(settings, Recording(group), Problem(group.size), dtypes=(dtype, torch.float32), **sgd)
        worker.begin(make_round(node_sizes))
        for id, exchange in enumerate(rounds, start=1):
            worker.iterate(exchange and make_round(node_sizes, id, exchange=exchange))
        worker.settle()
        return worker

    return simulate(node_sizes, member)


class Reference:
    """Leader SGD in lockstep: z replaced ``delay`` steps after its round, by what ``send`` makes of the leader's x."""

    def __init__(self, problem, node_sizes, settings, send):
        self.units = nodes_of(node_sizes)
        self.settings, self.send = settings, send
        self.workers = [Worker(problem, rank) for rank in range(sum(node_sizes))]
        self.z = problem.start.astype(float)
        self.z_local = [self.z.copy() for _ in self.units]
        self.rounds, self.two_levels = script_of(node_sizes, settings)
        self.arriving = None

    def run(self):
        for step, exchange in enumerate(self.rounds):
            if exchange is not None:
                local = [self.send(u, self.z_local[u], self.x(r)) for u, r in enumerate(exchange.leaders)]
                everywhere = self.send(None, self.z, self.x(exchange.leader)) if exchange.node is None else None
                self.arriving = (step + self.settings.delay, local if self.two_levels else None, everywhere)
            self.land(step)
            for rank, worker in enumerate(self.workers):
                worker.apply(worker.gradient())
                worker.x += P2 / self.settings.period * (self.z - worker.x)
                if self.two_levels:
                    worker.x += P1 / self.settings.local_period * (self.z_local[self.unit(rank)] - worker.x)
        self.land(len(self.rounds) + self.settings.delay)

    def land(self, step):
        if self.arriving is None or step < self.arriving[0]:
            return
        _, local, everywhere = self.arriving
        self.arriving = None
        if local is not None:
            self.z_local = local
            for rank, worker in enumerate(self.workers):
                worker.x = (1 - C1) * worker.x + C1 * local[self.unit(rank)]
        if everywhere is not None:
            self.z = everywhere
            for worker in self.workers:
                worker.x = (1 - C2) * worker.x + C2 * everywhere

    def x(self, rank):
        return self.workers[rank].x.copy()

    def unit(self, rank):
        return next(u for u, unit in enumerate(self.units) if rank in unit)


def check(workers, reference):
    reference.run()
    errors = [relative_error(w.model, r.x) for w, r in zip(workers, reference.workers, strict=True)]
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("node_sizes", NODES)
def test_delay(node_sizes, delay):
    settings = LeaderSettings(period=16, local_period=4, delay=delay, **PULLS)
    check(
        train(settings, node_sizes),
        Reference(Problem(sum(node_sizes)), node_sizes, settings, lambda u, z, x: x),
    )


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("node_sizes", NODES)
def test_compression(node_sizes, delay):
    """The reference changes z by the decoded payload, which must be x - z of the leader, rounded."""
    settings = LeaderSettings(period=16, local_period=4, compression="minmax8", block=5, delay=delay, **PULLS)
    workers = train(settings, node_sizes)
    queues = {}
    for u, unit in enumerate(nodes_of(node_sizes)):
        queues[u] = iter(workers[unit[0]].group.sent("broadcast", "node"))
    skip = len(workers[0].algorithm.shared_state())  # the shared state, when the generation began
    queues[None] = iter(workers[0].group.sent("broadcast", "world")[skip:])
    changes = []

    def send(unit, z, x):
        if unit is not None and (not reference.two_levels or len(reference.units[unit]) == 1):
            return x  # alone on the node, or one level only: nothing travels
        decoded = [decode(payload[0]) for payload in (next(queues[unit]), next(queues[unit]))]
        for part, d in zip(PARTS, decoded, strict=True):
            assert close_to(d, (x - z)[part], "nearest")
        changes.append(np.abs(x - z).max())
        return z + np.concatenate([d.values for d in decoded])

    reference = Reference(Problem(sum(node_sizes)), node_sizes, settings, send)

    check(workers, reference)
    assert len(changes) > 4 and max(changes) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_8_bit_leaders_stay_identical(dtype):
    """250 steps: all members hold the same bits, and z is close to a leader's model: errors do not build up."""
    settings = LeaderSettings(period=10, local_period=5, compression="minmax8", **PULLS)
    workers = train(settings, [2, 3], steps=250, dtype=dtype, lr=0.01, momentum=0.0)
    for worker in workers[1:]:
        assert all(map(torch.equal, worker.algorithm.global_leader, workers[0].algorithm.global_leader))
    for node in (workers[:2], workers[2:]):
        for worker in node:
            assert all(map(torch.equal, worker.algorithm.local_leader, node[0].algorithm.local_leader))
    z = torch.cat([z.double() for z in workers[0].algorithm.global_leader]).numpy()
    assert min(relative_error(z, worker.model) for worker in workers) < 0.05


@pytest.mark.parametrize("compression", ["none", "minmax8"])
def test_a_leader_that_is_not_finite_is_refused(compression, caplog):
    settings = LeaderSettings(period=8, local_period=8, compression=compression, **PULLS)

    def member(group):
        worker = TorchWorker(settings, group, Problem(3))
        worker.begin(make_round([2, 1]))
        if group.rank == 1:
            worker.parameters[0][3] = torch.nan
        exchange = Exchange(None, 1, (1, 2), 0)
        worker.algorithm.before_forward(worker.parameters, group, make_round([2, 1], exchange=exchange)).apply()
        return worker

    workers = simulate([2, 1], member)
    for worker in workers:
        assert torch.equal(torch.cat(worker.algorithm.global_leader), torch.from_numpy(worker.problem.start))
    assert caplog.text.count(golden.text("exchange.nonfinite_global_leader")) == 3


def test_a_delayed_transfer_runs_beside_training():
    """Workers go on while the leader has not sent yet, and wait only when the delay is over."""
    settings = LeaderSettings(period=8, local_period=8, delay=3, **PULLS)
    leader_may_send = threading.Event()

    def member(group):
        worker = TorchWorker(settings, group, Problem(2))
        worker.begin(make_round([2]))
        start = [z.clone() for z in worker.algorithm.global_leader]
        round = make_round([2], exchange=Exchange(None, 1, (1,), 0))
        if group.rank == 1:
            worker.iterate(None)
            assert leader_may_send.wait(scaled(20))
        worker.iterate(round)
        worker.iterate(None)
        leader_may_send.set()
        unchanged = all(map(torch.equal, start, worker.algorithm.global_leader))
        worker.iterate(None)
        return unchanged, not any(map(torch.equal, start, worker.algorithm.global_leader))

    assert simulate([2], member) == [(True, True)] * 2


def test_a_delayed_transfer_that_fails():
    """Training goes on with the old leader; the next round says what happened."""
    settings = LeaderSettings(period=8, local_period=8, delay=2, **PULLS)

    def member(group):
        worker = TorchWorker(settings, group, Problem(2))
        worker.begin(make_round([2]))
        round = make_round([2], exchange=Exchange(None, 1, (1,), 0))
        start = [z.clone() for z in worker.algorithm.global_leader]
        if group.rank == 1:
            raise ExchangeError("lost")
        for step in range(4):
            lands = step == 1
            with pytest.raises(ExchangeError, match="has failed") if lands else nullcontext():
                worker.iterate(round if step == 0 else None)
        assert all(map(torch.equal, start, worker.algorithm.global_leader))
        with pytest.raises(ExchangeError, match="lost"):
            worker.settle()
        worker.settle()  # once only
        survivors.append(group.rank)

    survivors = []
    with pytest.raises(ExchangeError, match="lost"):
        simulate([2], member, timeout_s=10)
    assert survivors == [0]


def test_bytes_sent():
    """A leader sends a quarter, and 8 bytes per block."""
    numel = 100_000

    def member(group):
        settings = LeaderSettings(period=8, local_period=8, compression="minmax8")
        algorithm = TorchWorker(settings, group, Problem(4)).algorithm
        algorithm = type(algorithm)(settings, [torch.zeros(numel)])
        algorithm.reset([], group, make_round([4]))
        model = [torch.randn(numel)]
        algorithm.before_forward(model, group, make_round([4], exchange=Exchange(None, 2, (2,), 0))).apply()
        return group.sent_nbytes

    sent = simulate([4], member)  # the simulation's broadcast sends to each of the three
    assert [sent[rank] for rank in (0, 1, 3)] == [0, 0, 0]
    assert sent[2] == pytest.approx(3 * numel * (1 + 8 / 2048), rel=0.001)
