"""Rounds on real groups: who takes what from whom, the consensus, and that a failed round changes nothing."""

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from threading import Barrier

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from lsgd.algorithms import ALGORITHMS
from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.decentralized import DecentralizedSettings
from lsgd.algorithms.elastic import ElasticSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import DiLoCoSettings, LocalSettings, SparseSettings
from lsgd.algorithms.low_precision_decentralized import LowPrecisionDecentralizedSettings
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.checkpoint.file import holds
from lsgd.client.control.island import Island
from lsgd.client.iteration import chunks, following, handover
from lsgd.client.iteration.replica import Replica, wide
from lsgd.client.iteration.rounds import Rounds
from lsgd.client.iteration.step import Step, StepState
from lsgd.errors import EvictedError, ExchangeError, LsgdError, ServerLostError
from lsgd.flat import FlatParameters, describe
from lsgd.plan.plan import Phase, Plan, table_of
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import Completed, Generation, Round, Stop
from lsgd.run_folder import checkpoint_path, counts
from lsgd.scattered import Scattered
from tests import golden

from ..integration.running import until
from ..speed import scaled
from .bench import Switchboard, generation, together


@pytest.fixture
def switchboard(tmp_path):
    """A switchboard; at its end all members leave their groups, so that the next tests find none of their threads."""
    with Switchboard(tmp_path) as made, ExitStack() as made.members:
        yield made


class Odd(nn.Module):
    """Two dtypes, a frozen layer, buffers of numbers and of counts."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.wide = nn.Linear(2, 2, dtype=torch.float64)
        self.low = nn.Linear(2, 2, dtype=torch.bfloat16)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        with torch.no_grad():
            for x in (*self.parameters(), *self.buffers()):
                x.fill_(value)


LEADER = LeaderSettings(period=4, local_period=4, pull_global=0.5, proximal_global=0.0, proximal_local=0.0)


class Looks(TorchDispatchMode):
    """Notes which tensors are looked at for NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.aminmax:
            self.found.append(args[0])
        return func(*args, **(kwargs or {}))


class Members:
    """Workers of one generation after another, each with a model full of its own number (1, 2, ...)."""

    def __init__(
        self, switchboard: Switchboard, count: int, model: type[Odd] = Odd, folder=None, settings=LEADER, **run: object
    ) -> None:
        plan = Plan(RunSettings(**{"exchange_timeout_s": 20.0, **run}), (Phase(settings),))
        self.count = count
        self.models = [model(rank + 1.0) for rank in range(count)]
        self.optimizers = [torch.optim.SGD(m.linear.parameters(), lr=0.1, momentum=0.9) for m in self.models]
        self.channels, self.replicas, self.rounds, self.checkpoints = [], [], [], []
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            membership = switchboard.member(f"node0/worker{rank}", plan)
            flat = FlatParameters(model)
            checkpoints = Checkpoints(model, [optimizer], {}, folder, None, Island())
            checkpoints.load(membership.join.worker, *describe(model))
            checkpoints.start(membership.welcome.run)
            replica = Replica(membership, flat, model, [optimizer], checkpoints)
            self.channels.append(membership.channel)
            self.checkpoints.append(checkpoints)
            self.replicas.append(replica)
            self.rounds.append(Rounds(membership, replica, checkpoints, Step()))
            switchboard.members.callback(self.rounds[-1].groups.leave, cut=True)

    def round(self, id: int = 1, *, number: int = 1, **changes: object) -> Round:
        made = Round(
            id=id,
            generation=generation(self.count, number=number),
            scope="global",
            leader=0,
            leaders=(0,),
            exchanges=id - 1,
            new=(),
            source=0,
            final=False,
        )
        return replace(made, **changes)  # type: ignore[arg-type]

    def run(self, round: Round, *, without: tuple[int, ...] = ()) -> list[object]:
        ranks = [rank for rank in range(self.count) if rank not in without]
        return together(lambda rank: self.rounds[rank].carry_out(round), ranks)

    def hurry(self) -> None:
        """Let the groups that there are wait 2 s for a silent member, and no longer."""
        for group in (rounds.groups.current for rounds in self.rounds):
            for each in (group, *group._subgroups.values()):
                each._timeout_s = 2.0

    def values(self, name: str) -> list[float]:
        return [float(model.state_dict()[name].flatten()[0]) for model in self.models]


def test_a_state_that_nobody_can_take_over_is_an_error_in_words(switchboard) -> None:
    members = Members(switchboard, 1)
    replica, optimizer = members.replicas[0], members.optimizers[0]
    optimizer.param_groups[0]["lr"] = np.float64(0.05)  # of a schedule by NumPy
    replica.take_states([replica.optimizer_bytes()])
    assert type(optimizer.param_groups[0]["lr"]) is float
    optimizer.param_groups[0]["since"] = date(2026, 1, 1)
    with pytest.raises(LsgdError, match=golden.pattern("exchange.not_takeable")):
        replica.take_states([replica.optimizer_bytes()])


def test_the_state_of_other_optimizers_is_refused_in_words(switchboard) -> None:
    """As that of workers that have added a parameter group since the join."""
    members = Members(switchboard, 2)
    one, other = members.replicas
    other.optimizers[0].add_param_group({"params": list(members.models[1].wide.parameters())})
    with pytest.raises(LsgdError, match=golden.pattern("exchange.unfit_state")):
        one.take_states([other.optimizer_bytes()])


def test_counts_of_steps_that_are_taken_over_stay_in_host_memory(switchboard) -> None:
    """Torch leaves them where they are: on a GPU, each step would wait for each of them."""
    members = Members(switchboard, 1)
    replica, optimizer, weight = members.replicas[0], members.optimizers[0], members.models[0].linear.weight
    optimizer.state[weight] = {"step": torch.tensor(3.0), "momentum_buffer": torch.ones_like(weight)}
    membership = replace(members.rounds[0].groups.membership, device=torch.device("meta"))  # in a GPU's place
    other = Replica(membership, replica.flat, replica.model, [optimizer], members.checkpoints[0])
    other.take_states([replica.optimizer_bytes()])
    assert float(optimizer.state[weight]["step"]) == 3.0 and optimizer.state[weight]["momentum_buffer"].sum() == 6


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_newcomers_take_everything_from_the_source(switchboard, name) -> None:
    members = Members(switchboard, 3, settings=ALGORITHMS[name]())
    assert members.run(members.round(new=(0, 2), source=1, leader=1)) == [None] * 3
    for tensor in members.models[0].state_dict():
        assert members.values(tensor) == [2.0, 2.0, 2.0], tensor
    assert same(*[r.algorithm.shared_state() for r in members.replicas])


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_newcomer_of_a_run_has_what_the_others_share(switchboard, name) -> None:
    members = Members(switchboard, 3, settings=ALGORITHMS[name](), join_pause_s=60.0)
    assert members.run(members.round(new=(0, 1, 2), source=1, leader=1)) == [None] * 3
    for x in (*members.replicas[2].algorithm.shared_state(), *members.replicas[2].flat.buffers):
        x.fill_(-7.0)
    if not members.replicas[0].algorithm.settings.schedule().identical:
        train(members, 1.0)
    assert members.run(members.round(2, number=2, new=(2,), source=1)) == [None] * 3
    assert same(*[r.algorithm.shared_state() for r in members.replicas])
    assert members.values("frozen.weight") == [2.0] * 3
    low, high = sorted(members.values("linear.weight")[:2])
    assert low <= members.values("linear.weight")[2] <= high


def test_a_global_round_pulls_to_its_leader_and_averages_buffers(switchboard) -> None:
    members = Members(switchboard, 3)
    members.run(members.round(leader=1, source=1))
    for name in ("linear.weight", "wide.bias", "low.weight"):
        assert members.values(name) == [1.5, 2.0, 2.5], name
    assert members.values("norm.running_mean") == [2.0] * 3
    assert members.values("norm.num_batches_tracked") == [1, 2, 3]
    assert members.values("frozen.weight") == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize(
    "settings",
    [
        *(LEADER, replace(LEADER, delay=1), LocalSettings(period=4), LocalSettings(period=4, delay=1)),
        *(ElasticSettings(period=4), LowPrecisionDecentralizedSettings()),
    ],
    ids=["leader", "leader-delay", "local", "local-delay", "elastic", "low-precision-decentralized"],
)
def test_a_model_that_is_not_finite_is_healed_with_its_optimizer(switchboard, settings, when) -> None:
    """Whether it breaks before the round, or while what was exchanged is on its way."""
    members = Members(switchboard, 2, settings=settings)
    members.run(members.round(leader=1, new=(0,), source=1))
    together(lambda rank: members.rounds[rank].after_step(), range(2))
    momentum = {"momentum_buffer": torch.tensor([[float("nan"), 1.0, 2.0]] * 2)}
    members.optimizers[0].state[members.models[0].linear.weight] = momentum
    if when == "meanwhile" and settings.schedule().delay:
        members.run(members.round(2, leader=1, source=1))
        members.models[0].linear.weight.data.fill_(float("nan"))
    else:
        members.models[0].linear.weight.data.fill_(float("nan"))
        members.run(members.round(2, leader=1, source=1))
    together(lambda rank: members.rounds[rank].after_step(), range(2))
    assert members.values("linear.weight") == [2.0, 2.0]
    assert momentum["momentum_buffer"].tolist() == [[0.0, 1.0, 2.0]] * 2
    momentum["momentum_buffer"].fill_(3.0)
    members.run(members.round(3, leader=1, source=1))
    together(lambda rank: members.rounds[rank].after_step(), range(2))
    assert momentum["momentum_buffer"].tolist() == [[3.0] * 3] * 2


def test_an_optimizer_may_keep_lists_and_entries_of_its_own(switchboard) -> None:
    """LBFGS keeps lists of directions, and others count their steps outside of the parameters' states."""
    members = Members(switchboard, 2, settings=LocalSettings(period=4), sync_optimizer=True)
    one, other = members.optimizers
    other.state["step"] = 3
    other.state[members.models[1].linear.weight] = {"old_dirs": [torch.tensor([math.nan, 1.0])]}
    members.models[1].linear.bias.data.fill_(math.nan)
    assert members.run(members.round(final=True)) == [None] * 2
    assert other.state[members.models[1].linear.weight]["old_dirs"][0].tolist() == [0.0, 1.0]
    members.replicas[0].take_states([members.replicas[1].optimizer_bytes()])
    assert one.state["step"] == 3
    assert one.state[members.models[0].linear.weight]["old_dirs"][0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("kind", [DecentralizedSettings, LowPrecisionDecentralizedSettings])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_worker_trains_on_after_a_batch_that_is_not_finite(switchboard, kind, interval) -> None:
    """Gossip replaces its model before the step, whose gradient is still that of the model before."""
    members = Members(switchboard, 2, settings=kind(interval=interval))

    def iterate(rank: int, id: int, batch: float) -> None:
        model, optimizer, rounds = members.models[rank], members.optimizers[rank], members.rounds[rank]
        rounds.carry_out(members.round(id))
        optimizer.zero_grad()
        model.linear(torch.full((4, 3), batch)).square().mean().backward()
        rounds.before_step()
        optimizer.step()
        rounds.after_step()

    for id in range(1, 5):
        together(lambda rank, id=id: iterate(rank, id, math.nan if (id, rank) == (2, 0) else 1.0), range(2))
        assert [math.isfinite(value) for value in members.values("linear.weight")] == [id != 2, True]
    momenta = [state["momentum_buffer"] for optimizer in members.optimizers for state in optimizer.state.values()]
    assert all(bool(x.isfinite().all()) for x in momenta)


@pytest.mark.parametrize(
    "settings",
    [LocalSettings(period=4), LocalSettings(period=4, compression="none"), LEADER, ElasticSettings(period=4)],
    ids=["local", "local-uncompressed", "leader", "elastic"],
)
def test_a_round_looks_at_its_model_for_nan_once(switchboard, settings) -> None:
    members = Members(switchboard, 1, settings=settings)
    members.run(members.round())
    with Looks() as looks:
        members.rounds[0].carry_out(members.round(2))
    looked = [x.memory for x in looks.found if isinstance(x, Scattered)]
    assert looked == [buffer.memory for buffer in members.replicas[0].flat.buffers]


def test_a_buffer_that_is_meant_to_be_infinite_spoils_no_average(switchboard) -> None:
    class Masked(Odd):
        def __init__(self, value: float) -> None:
            super().__init__(value)
            self.register_buffer("mask", torch.full((2, 2), float("-inf")))

    members = Members(switchboard, 2, model=Masked)
    members.run(members.round())
    assert members.values("norm.running_mean") == [1.5, 1.5]
    members.run(members.round(2, final=True))
    assert members.values("linear.weight") == [1.25, 1.25]
    assert members.values("mask") == [float("-inf")] * 2


def test_sparse_expanded_and_8_bit_tensors_are_no_obstacle(switchboard, tmp_path) -> None:
    """Graphs as sparse matrices, and constants that repeat one number, stay what they are."""

    class Graph(Odd):
        def __init__(self, value: float) -> None:
            super().__init__(value)
            self.register_buffer("edges", torch.eye(3).to_sparse())
            self.fixed_edges = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
            self.register_buffer("repeated", torch.full((2, 1), value).expand(2, 3))
            self.register_buffer("small", torch.full((4,), value).to(torch.float8_e5m2))

    members = Members(switchboard, 2, model=Graph, folder=tmp_path)
    assert members.run(members.round(new=(0,), source=1, count=1, checkpoint=True)) == [None] * 2
    assert members.values("repeated") == members.values("small") == members.values("frozen.bias") == [2.0] * 2
    members.models[0].repeated[:, 0] = 4.0
    assert members.run(members.round(2, final=True)) == [None] * 2
    assert members.values("repeated") == [3.0] * 2 and members.models[0].repeated.shape == (2, 3)
    assert torch.equal(members.models[0].edges.to_dense(), torch.eye(3))
    model = Graph(7.0)
    resumed = Checkpoints(model, [torch.optim.SGD(model.linear.parameters())], {}, None, tmp_path, Island())
    resumed.load("node0/worker0", *describe(model))
    assert model.repeated.tolist() == [[2.0] * 3] * 2 and model.linear.bias.tolist() == [2.0] * 2


@pytest.mark.parametrize(
    ("setting", "expected"), [("keep", [1.0, 2.0]), ("leader", [2.0, 2.0]), ("average", [1.5, 1.5])]
)
def test_buffers_are_treated_as_the_plan_says(switchboard, setting, expected) -> None:
    members = Members(switchboard, 2, buffers=setting)
    members.run(members.round(leader=1))
    assert members.values("norm.running_var") == expected


@pytest.mark.parametrize("setting", ["average", "leader"])
def test_a_buffer_that_is_longer_than_the_others_is_named(switchboard, setting) -> None:
    members = Members(switchboard, 2, buffers=setting, exchange_timeout_s=3.0)
    members.models[1].norm.running_var = torch.ones(9)
    results = members.run(members.round(leader=0))
    assert isinstance(results[1], ExchangeError) and "norm.running_var (was (2,), is (9,))" in str(results[1])
    assert members.values("norm.running_mean") == [1.0, 2.0]


@pytest.mark.parametrize(("setting", "expected", "count"), [("average", 2.0, 1), ("leader", 3.0, 3)])
def test_the_consensus_is_one_model_for_all(switchboard, setting, expected, count) -> None:
    members = Members(switchboard, 3, consensus=setting)
    members.run(members.round(leader=2, final=True))
    assert members.values("norm.num_batches_tracked") == [count] * 3, "of one worker: counts have no mean"
    for name in ("linear.weight", "wide.weight", "low.bias", "norm.running_mean"):
        assert members.values(name) == pytest.approx([expected] * 3, rel=1e-14), name
    led = [r.leader_model[0][0].item() for r in members.replicas]
    assert led == [3.0] * 3
    # |x - mean| / |mean| is 1/2, 0 and 1/2.
    assert [r.consensus_distance for r in members.replicas] == [pytest.approx(1 / 3)] * 3


@pytest.mark.parametrize("broken", [{1}, {0, 1, 2}])
def test_a_leader_that_is_not_finite_gives_nobody_its_model_or_buffers(switchboard, caplog, broken) -> None:
    members = Members(switchboard, 3, consensus="leader", buffers="leader")
    for rank in broken:
        members.models[rank].norm.running_var.fill_(math.nan)
    members.run(members.round(leader=1))
    assert [math.isnan(each) for each in members.values("norm.running_var")] == [rank in broken for rank in range(3)]
    members.run(members.round(2, leader=1, final=True))
    if len(broken) < 3:
        assert members.values("norm.running_var") == [2.0] * 3
        assert golden.text("exchange.nonfinite_leader") in caplog.messages
    assert same(*[[r.finite.buffers()[0].nan_to_num(-1.0)] for r in members.replicas])


@pytest.mark.parametrize(("settings", "sends"), [(LEADER, 3), (LocalSettings(period=4), 2)])
def test_without_leaders_nobody_sends_a_leaders_model_at_the_end(switchboard, settings, sends) -> None:
    members = Members(switchboard, 3, settings=settings)
    members.run(members.round(leader=2))
    before = [rounds.timings() for rounds in members.rounds]
    members.run(members.round(2, leader=2, final=True))
    made = [rounds.timings() - then for rounds, then in zip(members.rounds, before, strict=True)]
    tensors = (*members.replicas[0].flat.buffers, *members.replicas[0].finite.buffers())
    nbytes = sum(wide(x).nbytes for x in tensors)
    assert made[0].received_nbytes == pytest.approx(sends * nbytes, rel=0.1)  # two other models, and the leader's


def test_if_no_model_is_finite_all_take_the_same(switchboard) -> None:
    members = Members(switchboard, 2, settings=LocalSettings(period=4))
    for model, value in zip(members.models, (math.nan, math.inf), strict=True):
        model.linear.weight.data.fill_(value)
    members.run(members.round(leader=1, final=True))
    assert members.values("linear.weight") == [math.inf] * 2


def test_double_precision_stays_double_in_the_consensus(switchboard) -> None:
    members = Members(switchboard, 2)
    with torch.no_grad():
        for model, value in zip(members.models, (1.0, 1.0 + 2**-40), strict=True):
            model.wide.weight.fill_(value)
    members.run(members.round(final=True))
    assert members.values("wide.weight") == [1.0 + 2**-41] * 2


def test_a_model_that_is_not_finite_is_left_out_of_the_consensus(switchboard, caplog) -> None:
    members = Members(switchboard, 3)
    with torch.no_grad():
        members.models[1].low.weight[0, 0] = float("nan")
    weight = members.models[1].linear.weight
    members.optimizers[1].state[weight] = {"momentum_buffer": torch.full_like(weight, float("nan"))}
    members.run(members.round(final=True))
    assert not members.optimizers[1].state[weight]["momentum_buffer"].any()
    assert members.values("linear.weight") == [2.0] * 3
    assert members.values("low.weight") == [2.0] * 3
    assert golden.text("exchange.nonfinite_left_out") in caplog.messages


def test_a_newcomer_does_not_weigh_in_the_consensus(switchboard) -> None:
    members = Members(switchboard, 3)
    members.run(members.round(new=(2,), source=0, final=True))
    assert members.values("linear.weight") == [1.5] * 3


@pytest.mark.parametrize("compression", ["none", "minmax8"])
@pytest.mark.parametrize("final", [False, True])
def test_a_worker_that_has_missed_rounds_of_local_sgd_comes_back_with_its_change(
    switchboard, compression, final
) -> None:
    settings = LocalSettings(period=4, compression=compression, rescale=False)
    members = Members(switchboard, 3, settings=settings, buffers="keep")
    members.run(members.round(new=(1, 2)))
    assert members.values("linear.weight") == [1.0] * 3  # newcomers, whose own models count for nothing
    with torch.no_grad():
        for model, value in zip(members.models, (2.0, 4.0, 9.0), strict=True):
            for x in model.parameters():
                x.fill_(value)
    assert members.run(members.round(2, number=2, new=(2,), source=1)) == [None] * 3
    # The mean of 1 and 3 more than before; the third one's change travels in the next round.
    assert members.values("linear.weight") == pytest.approx([3.0, 3.0, 3.0 + 8.0], rel=1e-6)
    assert members.values("frozen.weight") == [2.0, 4.0, 4.0]
    assert same(*([*replica.algorithm.common] for replica in members.replicas))
    assert members.run(members.round(3, number=2, final=final)) == [None] * 3
    assert members.values("linear.weight") == pytest.approx([3.0 + 8.0 / 3] * 3, rel=1e-5)
    assert same(*([*replica.flat.buffers] for replica in members.replicas))


def test_the_log_says_what_who_comes_back_loses_without_a_common_model(switchboard, caplog) -> None:
    caplog.set_level("INFO", "lsgd")
    members = Members(switchboard, 3)
    members.run(members.round())
    for rounds in members.rounds:
        rounds.grants.done = 5
    members.run(members.round(2, number=2, new=(1,)))
    assert [m for m in caplog.messages if "are lost" in m] == [golden.text("exchange.missed_round")]


def test_who_comes_back_to_the_last_round_counts_in_the_consensus(switchboard) -> None:
    members = Members(switchboard, 3, settings=LocalSettings(period=4, rescale=False), buffers="keep")
    members.run(members.round(new=(1, 2)))
    train(members, 3.0, ranks=(2,))
    assert members.run(members.round(2, number=2, new=(2,), final=True)) == [None] * 3
    assert members.values("linear.weight") == pytest.approx([2.0] * 3)


@pytest.fixture
def slow(monkeypatch):
    """A link on which a chunk takes a second, or so it seems; chunks are small."""
    for module in (chunks, handover, following):
        monkeypatch.setattr(module, "CHUNK_NBYTES", 16)
    monkeypatch.setattr(handover.Handover, "_meet", lambda self, seconds: met(self, seconds) and 1.0)
    monkeypatch.setattr(following.ChunkRate, "_chunks_in", lambda self, seconds, takers: 2)


met = handover.Handover._meet


def train(members: Members, change: float, ranks=(0, 1)) -> None:
    with torch.no_grad():
        for rank in ranks:
            for x in members.replicas[rank].flat.buffers:
                x.add_(change)


def states(members: Members) -> list[list[torch.Tensor]]:
    """Return each member's shared state and, unless it has only taken over a fragment of that, parameters."""
    whole = members.replicas[0].algorithm.settings.fragments == 1
    return [[*r.algorithm.shared_state(), *(r.flat.buffers if whole else ())] for r in members.replicas]


def same(*members: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for one in members[1:] for x, y in zip(members[0], one, strict=True))


FOLLOWED = [
    LocalSettings(period=4),
    DiLoCoSettings(period=4),
    SparseSettings(period=4),
    LocalSettings(period=4, fragments=2, compression="minmax8", outer_momentum=0.5),
]


def begin_with_a_late_one(switchboard, settings, *, checkpoint: bool = False, **run) -> Members:
    """Return members of which the third lacks parts of the model after its first round, the run's second."""
    members = Members(switchboard, 3, settings=settings, **run)
    for x in members.replicas[0].flat.buffers:  # no two chunks are alike
        x.copy_(torch.arange(len(x)) / 8)
    members.replicas[0].algorithm.load_state_dict(settings.create(members.replicas[0].flat.buffers).state_dict())
    assert members.run(members.round(new=(1, 2))) == [None] * 3
    for x in (*states(members)[2], *members.replicas[2].flat.buffers):
        x.fill_(-7.0)
    train(members, 1.0)
    order = members.round(2, number=2, new=(2,), source=1, count=5, checkpoint=checkpoint)
    assert members.run(order) == [None] * 3
    assert [r.active.lacking for r in members.rounds] == [False, False, True]
    return members


def download(members: Members, id: int, *, number: int = 2, rounds: int = 80) -> int:
    """Train, with rounds after ``id``, until the third has the model; return the last round's id."""
    while members.rounds[2].active.lacking and rounds:
        id, rounds = id + 1, rounds - 1
        train(members, 0.5 + id / 8)
        assert members.run(members.round(id, number=number, new=(2,), source=1)) == [None] * 3
    return id


@pytest.mark.parametrize("settings", FOLLOWED, ids=["local", "diloco", "sparse", "fragments"])
def test_the_others_train_while_a_newcomer_takes_the_model(switchboard, slow, settings) -> None:
    members = begin_with_a_late_one(switchboard, settings)
    rounds = 2
    while members.rounds[2].active.lacking:
        rounds += 1
        assert same(*states(members)[:2])
        assert not same(*states(members))
        train(members, 0.5 + rounds / 8)
        assert members.run(members.round(rounds, number=2, new=(2,), source=1)) == [None] * 3
    assert 4 < rounds < 80
    assert same(*states(members))
    train(members, 2.0, ranks=(0, 1, 2))
    assert members.run(members.round(rounds + 1, number=2)) == [None] * 3
    assert same(*states(members))


def test_a_newcomer_saves_nothing_before_it_has_the_model(switchboard, slow, tmp_path) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4), checkpoint=True, folder=tmp_path)
    assert counts(tmp_path, "run", "node0/worker1") == [5]
    assert counts(tmp_path, "run", "node0/worker2") == []
    assert golden.text("exchange.lacks_parts") in members.rounds[2]._keep()


def test_the_last_round_waits_for_a_newcomer(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    train(members, 1.0)
    assert members.run(members.round(3, number=2, new=(2,), source=1, final=True)) == [None] * 3
    assert same(*[[*r.flat.buffers] for r in members.replicas])
    assert not members.rounds[2].active.lacking


@pytest.mark.parametrize("without", [0, 1], ids=["bystander", "source"])
def test_a_download_continues_in_another_generation(switchboard, slow, without) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4, compression="none"))
    lost = members.rounds[2].download._following._all_nbytes
    train(members, 1.0)
    before = [[x.clone() for x in state] for state in states(members)]
    members.hurry()
    errors = members.run(members.round(3, number=2, new=(2,), source=1), without=(without,))
    assert [type(error) for error in errors] == [ExchangeError] * 2
    assert same(before[1 - without], states(members)[1 - without])
    members.rounds[without].groups.leave()
    rounds, new = 3, (2,)
    while new:
        rounds += 1
        result = members.run(members.round(rounds, number=3, new=new, source=0))
        assert result == [None] * 3
        if rounds == 4:
            assert members.rounds[0].download._following._all_nbytes < lost
        new = (2,) if members.rounds[2].active.lacking else ()
        train(members, 0.25)
    assert same(*[r.algorithm.shared_state() for r in members.replicas])


def test_those_who_stay_lose_a_round_to_a_newcomer_that_dies(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4, compression="none"))
    train(members, 1.0)
    before = [[x.clone() for x in state] for state in states(members)]
    members.hurry()
    errors = members.run(members.round(3, number=2, new=(2,), source=1), without=(2,))
    assert [type(error) for error in errors] == [ExchangeError] * 2
    assert all(same(*each) for each in zip(before[:2], states(members)[:2], strict=True))
    members.rounds[2].groups.leave()
    two = replace(members.round(4), generation=generation(2, number=3))
    assert members.run(two, without=(2,)) == [None] * 2
    assert same(*states(members)[:2])
    assert not same(before[0], states(members)[0])


def test_a_round_that_fails_meanwhile_costs_no_chunk_that_has_come(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4, compression="none"))
    lost = members.rounds[2].download._following._all_nbytes
    for rounds in members.rounds:
        rounds.groups.leave(cut=True)
    train(members, 1.0)
    assert members.run(members.round(3, number=3, new=(2,), source=1)) == [None] * 3
    assert [r.active.lacking for r in members.rounds] == [False, False, True]
    assert members.rounds[2].download._following._all_nbytes < lost
    download(members, 3, number=3)
    assert same(*states(members))


def test_another_algorithm_begins_when_what_is_under_way_has_come(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    source = members.rounds[1].download._following
    send = source._post.exchange

    def stalling(leaving, coming):
        until(lambda: source._turn.stop_at < math.inf, "a round is due")
        return send(leaving, coming)

    source._post.exchange = stalling
    changed = json.dumps(table_of(DiLoCoSettings(period=4)))
    for id, algorithm in ((3, ""), (4, changed)):
        order = members.round(id, number=2, new=(2,), source=1, algorithm=algorithm)
        assert members.run(order) == [None] * 3
    download(members, 4)
    assert {r.algorithm.settings.name for r in members.replicas} == {"diloco"}
    assert same(*states(members))


def test_a_delay_begins_when_what_is_under_way_has_come(switchboard, slow) -> None:
    """A delayed transfer beside a newcomer's would go over the same connections."""
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    train(members, 1.0)
    changed = json.dumps(table_of(LocalSettings(period=4, delay=2)))
    assert members.run(members.round(3, number=2, new=(2,), source=1, algorithm=changed)) == [None] * 3
    assert not any(rounds.active.lacking for rounds in members.rounds)
    assert together(lambda rank: [members.rounds[rank].after_step() for _ in range(2)], range(3)) == [[None] * 2] * 3
    assert members.run(members.round(4, number=2)) == [None] * 3
    assert same(*[r.algorithm.shared_state() for r in members.replicas])


def test_in_a_round_its_own_transfer_is_told_and_between_rounds_what_newcomers_lack(
    switchboard, slow, monkeypatch
) -> None:
    """Else the servers could not see that a round which takes long moves: it moves no chunks."""
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    rounds, told = members.rounds[0], list[str]()
    exchange = members.replicas[0].exchange

    def telling(*arguments):
        told.append(rounds.download.progress(rounds.groups.current))
        return exchange(*arguments)

    chunks_moved = rounds.download._following.progress
    assert rounds.download.progress(rounds.groups.current) == chunks_moved()
    monkeypatch.setattr(members.replicas[0], "exchange", telling)
    assert members.run(members.round(3, number=2, new=(2,), source=1)) == [None] * 3
    monkeypatch.setattr(type(rounds.groups.current), "progress", lambda group: "1.0 of 4.0 MB")
    assert members.run(members.round(4, number=2, new=(2,), source=1)) == [None] * 3
    assert "1.0 of 4.0 MB" not in told[0] and told[1] == "1.0 of 4.0 MB"
    assert rounds.download.progress(rounds.groups.current) == chunks_moved()


def test_what_comes_wrong_beside_the_training_is_found_and_comes_again(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    late, spoilt = members.rounds[2].download._following, list[int]()
    receive = late._receive

    def spoiling(now) -> None:
        receive(now)
        if not spoilt:
            spoilt.append(now[2])
            late._arrived[now[2]][0] ^= 1

    late._receive = spoiling
    download(members, 2)
    assert spoilt
    assert same(*states(members))


class Clock:
    """A time that passes when somebody moves it, and hardly otherwise."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


def test_a_round_that_is_due_waits_for_half_the_pause_and_what_is_under_way(switchboard, slow, monkeypatch) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    clock, each = Clock(), [rounds.download._following for rounds in members.rounds]
    assert all(one._background.succeeded() for one in each)
    monkeypatch.setattr(following, "time", clock)
    monkeypatch.setattr(following.ChunkRate, "_chunks_in", lambda self, seconds, takers: 6)
    source, carried = each[1], list[float]()
    send = source._post.exchange

    def stalling(leaving, coming):
        if len(carried) < 2:
            until(lambda: source._turn.stop_at < math.inf, "a round is due")
            clock.now += 0.7  # of the second that the round waits
        carried.append(clock.now)
        return send(leaving, coming)

    source._post.exchange = stalling
    assert members.run(members.round(3, number=2, new=(2,), source=1)) == [None] * 3
    lacking = [len(one._left[2]) for one in each]
    assert min(lacking) > 6
    assert members.run(members.round(4, number=2, new=(2,), source=1)) == [None] * 3
    assert [len(one._left[2]) for one in each] == [count - 2 for count in lacking]
    assert carried[:2] == pytest.approx([0.7, 1.4], abs=0.01)
    download(members, 4)
    assert same(*states(members))


def test_a_second_newcomer_comes_while_the_first_takes_the_model(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    for x in states(members)[0]:
        x.fill_(9.0)
    rounds, new = 2, {0, 2}
    while new:
        rounds += 1
        train(members, 0.5, ranks=(1,))
        order = members.round(rounds, number=3, new=tuple(sorted(new)), source=1)
        assert members.run(order) == [None] * 3
        new = {rank for rank in range(3) if members.rounds[rank].active.lacking}
    assert same(*states(members))


def test_a_non_finite_model_does_not_hurt_a_newcomer(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    rounds = 2
    while members.rounds[2].active.lacking:
        rounds += 1
        train(members, float("nan") if rounds == 3 else 1.0, ranks=(0,))
        assert members.run(members.round(rounds, number=2, new=(2,), source=1)) == [None] * 3
    assert same(*states(members))
    assert all(bool(x.isfinite().all()) for x in states(members)[2])


def test_who_is_left_alone_with_parts_of_the_model_goes_back_to_its_own(switchboard, slow) -> None:
    members = begin_with_a_late_one(switchboard, LocalSettings(period=4))
    assert not all(bool((x == -7.0).all()) for x in states(members)[2])
    for rounds in members.rounds:
        rounds.groups.leave()
    alone = replace(members.round(3), generation=Generation.of(3, [(0, 2)], "tcp"))
    assert members.rounds[2].carry_out(alone) is None
    assert not members.rounds[2].active.lacking
    assert all(bool((x == -7.0).all()) for x in states(members)[2])


@pytest.mark.parametrize("sync", [True, False])
def test_a_newcomer_takes_the_optimizers_state_if_the_plan_says_so(switchboard, sync) -> None:
    members = Members(switchboard, 2, sync_optimizer=sync)
    for model, optimizer in zip(members.models, members.optimizers, strict=True):
        model.linear(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    members.optimizers[0].state[members.models[0].linear.weight]["momentum_buffer"].fill_(7.0)
    members.run(members.round(new=(1,)))
    momentum = members.optimizers[1].state[members.models[1].linear.weight]["momentum_buffer"]
    assert bool((momentum == 7.0).all()) is sync


@pytest.mark.parametrize("settings", [AllReduceSettings(), LocalSettings(period=4)], ids=["allreduce", "local"])
def test_newcomers_take_over_what_counts_with_the_run(switchboard, settings) -> None:
    """Schedulers with the rates that they have set, GradScalers, averages, what was followed, and the run's rates."""
    members = Members(switchboard, 2, settings=settings)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    plateaus = [lr_scheduler.ReduceLROnPlateau(optimizer, patience=0) for optimizer in members.optimizers]
    members.optimizers[1].param_groups[0]["lr"] = 0.3  # each worker's own
    cosines = [lr_scheduler.CosineAnnealingLR(optimizer, 10) for optimizer in members.optimizers]
    own = [Counter(seen=rank) for rank in range(2)]
    averages, own_averages = ([AveragedModel(model) for model in members.models] for _ in range(2))
    for each in (averages[0], own_averages[0]):
        each.update_parameters(members.models[0])
        with torch.no_grad():
            next(each.parameters()).fill_(5.0)
    for rank, checkpoints in enumerate(members.checkpoints):
        checkpoints.extras.follow(averages[rank])
        checkpoints.extras.attend("own average", own_averages[rank])
        scalers[rank].scale(torch.ones(()))
        checkpoints.extras.attend("scaler", scalers[rank])
        checkpoints.extras.attend("cosine", cosines[rank])
        checkpoints.extras.attend("own", own[rank])
        if rank == 0:
            checkpoints.extras.follow(plateaus[rank])
    scalers[0].update(new_scale=32.0)
    members.checkpoints[0].extras.rates.step(members.optimizers[0])
    for step in (*cosines[:1] * 3, plateaus[0]):
        members.optimizers[0].step()
        step.step(*[1.0] * (step is plateaus[0]))
    plateaus[0].step(2.0)  # no better, so the rate falls
    fallen = members.optimizers[0].param_groups[0]["lr"]
    assert members.run(members.round(new=(1,))) == [None] * 2
    assert [float(scaler.scale(torch.ones(()))) for scaler in scalers] == [32.0, 32.0]
    rate = members.optimizers[1].param_groups[0]["lr"]
    assert cosines[1].last_epoch == 3 and rate == pytest.approx(3 * cosines[0].get_last_lr()[0])
    assert [each.seen for each in own] == [0, 1], "which is each worker's own"
    assert averages[1].n_averaged == 1 and equal(averages[0], averages[1])
    own_averages[1].update_parameters(members.models[1])
    assert equal(own_averages[1].module, members.models[1]), "it begins anew, with the model of the run"
    assert members.checkpoints[1].extras.rates.state_dict() == members.checkpoints[0].extras.rates.state_dict()
    members.checkpoints[1].extras.follow(plateaus[1])  # made later
    assert plateaus[1].best == 1.0 and members.optimizers[1].param_groups[0]["lr"] == fallen < 0.01


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


class Counter:
    """What a script counts."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_a_state_that_nobody_can_send_stays_with_its_worker(switchboard, caplog) -> None:
    members = Members(switchboard, 2)
    counters = [Counter(seen={1, 2}), Counter(seen=3)]
    for counter, checkpoints in zip(counters, members.checkpoints, strict=True):
        checkpoints.extras.follow(counter)
        checkpoints.extras.follow(counter)  # once more
    assert members.run(members.round(new=(1,))) == [None] * 2
    assert counters[1].seen == 3 and golden.text("exchange.not_taken_over") in caplog.text


def test_a_failed_round_changes_nothing_and_the_next_generation_goes_on(switchboard) -> None:
    members = Members(switchboard, 3)
    members.run(members.round())
    before = [{n: x.clone() for n, x in m.state_dict().items()} for m in members.models]
    leaders = [[x.clone() for x in r.algorithm.shared_state()] for r in members.replicas]

    members.hurry()
    errors = members.run(members.round(2, leader=1), without=(2,))
    assert [type(error) for error in errors] == [ExchangeError] * 2
    for model, state in zip(members.models, before, strict=True):
        assert all(torch.equal(x, state[n]) for n, x in model.state_dict().items())
    for replica, state in zip(members.replicas, leaders, strict=True):
        pairs = zip(replica.algorithm.shared_state(), state, strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)

    assert members.rounds[0].groups.generation is None
    members.rounds[2].groups.leave()
    assert not any(isinstance(r, Exception) for r in members.run(members.round(3, number=2, leader=1)))


def test_a_round_of_a_generation_that_is_over_is_not_begun(switchboard) -> None:
    members = Members(switchboard, 2)
    members.run(members.round())
    switchboard.end(1, "node0/worker1 left")

    def told() -> list[str]:
        return [channel.endings.generation_over(1) for channel in members.channels]

    until(lambda: all(told()), "the members hear of it")
    assert [str(error) for error in members.run(members.round(2))] == [
        golden.text("reasons.generation_over", number=1, worker="node0/worker1")
    ] * 2


def test_the_bytes_of_a_round_are_counted(switchboard) -> None:
    members = Members(switchboard, 3, buffers="keep")
    members.run(members.round())
    before = [rounds.timings() for rounds in members.rounds]
    members.run(members.round(2, leader=1))
    made = [rounds.timings() - then for rounds, then in zip(members.rounds, before, strict=True)]
    nbytes = sum(x.nbytes for x in members.replicas[0].flat.buffers)  # the leader's small model, to each
    assert [x.sent_nbytes for x in made] == [0, 2 * nbytes, 0]
    assert [x.received_nbytes for x in made] == [nbytes, 0, nbytes]


@pytest.mark.parametrize(("delay", "heard"), [(0, [True, True, True, True]), (1, [False, False, True, True])])
def test_the_servers_hear_how_long_transfers_take(switchboard, monkeypatch, delay, heard) -> None:
    """Of a transfer beside training in the next round, unless there was nothing to exchange: members were new."""
    members, said = Members(switchboard, 2, settings=LocalSettings(period=4, delay=delay)), []
    send = members.channels[0].send
    monkeypatch.setattr(members.channels[0], "send", lambda message: (said.append(message), send(message)))
    for id in range(1, 5):
        assert members.run(members.round(id, new=(0, 1) if id == 1 else ())) == [None] * 2
    assert [0.0 < done.transfer_s < 20.0 for done in said if isinstance(done, Completed)] == heard


@pytest.mark.parametrize("settings", [LocalSettings(period=4, delay=2, compression="none"), replace(LEADER, delay=2)])
def test_what_has_been_exchanged_lands_before_members_change(switchboard, settings) -> None:
    members = Members(switchboard, 2, settings=settings)
    members.run(members.round(new=(1,)))
    together(lambda rank: [members.rounds[rank].after_step() for _ in range(2)], range(2))
    before = [x.clone() for x in members.replicas[0].algorithm.shared_state()]
    train(members, 1.0)
    members.run(members.round(2))
    assert members.run(members.round(3, number=2)) == [None] * 2
    for x, was in zip(members.replicas[0].algorithm.shared_state(), before, strict=True):
        assert torch.equal(x, was + 1.0)
    assert same(*[r.algorithm.shared_state() for r in members.replicas])


def test_the_servers_change_the_delay_from_round_to_round(switchboard) -> None:
    settings = LocalSettings(period=4, compression="none", rescale=False, keep=1.0)
    members = Members(switchboard, 2, settings=settings)

    def round(id: int, delay: int, **changes: object) -> None:
        text = json.dumps(table_of(settings.with_delay(delay)))
        assert members.run(members.round(id, algorithm=text, **changes)) == [None] * 2

    def step() -> None:
        assert together(lambda rank: members.rounds[rank].after_step(), range(2)) == [None] * 2

    round(1, 0, new=(1,))
    seen = []
    for id, delay in ((2, 0), (3, 2), (4, 0), (5, 1), (6, 2)):
        train(members, 2.0, ranks=(0,))
        round(id, delay)
        seen.append(members.values("linear.weight"))
        for _ in range(2):
            step()
        seen.append(members.values("linear.weight"))
    assert seen == [[x, y] for x, y in ((2, 2), (2, 2), (4, 2), (3, 3), (4, 4), (4, 4), (6, 4), (5, 5), (7, 5), (6, 6))]
    assert same(*[r.algorithm.shared_state() for r in members.replicas])


@pytest.mark.parametrize("ends", [LocalSettings(period=4), DecentralizedSettings()])
@pytest.mark.parametrize("begins", [AllReduceSettings(), DiLoCoSettings(period=4), replace(LEADER, pull_global=0.1)])
def test_a_phase_begins_with_the_mean_of_the_models_that_are_finite(switchboard, ends, begins) -> None:
    """By copying one of them, the others' last steps would be lost, and DiLoCo would take a step away from that one."""
    members = Members(switchboard, 4, settings=ends)
    members.run(members.round(new=(1, 2, 3)))
    if any(rounds.active.pending for rounds in members.rounds):
        together(lambda rank: members.rounds[rank].before_step(), range(4))
    train(members, 2.0, ranks=(0,))
    train(members, math.nan, ranks=(2,))
    members.optimizers[2].state[members.models[2].linear.weight]["momentum_buffer"] = torch.full((1,), math.nan)
    changed, copies = json.dumps(table_of(begins)), begins.schedule().identical
    new = (1, 2, 3) if copies else (3,)
    order = members.round(2, algorithm=changed, averaged=(0, 1, 2), new=new)
    assert members.run(order) == [None] * 4
    assert members.values("linear.weight") == [2.0] * 4  # of 3 and 1
    state = members.optimizers[2].state[members.models[2].linear.weight]
    assert not state or bool(state["momentum_buffer"].isfinite().all()), "it would break the model again"
    if not copies:
        assert members.run(members.round(3)) == [None] * 4
        assert members.values("linear.weight") == [2.0] * 4


def test_who_leaves_takes_part_in_a_round_of_each_fragment(switchboard) -> None:
    settings = LocalSettings(period=4, fragments=2, compression="none", rescale=False)
    members = Members(switchboard, 2, settings=settings)
    members.run(members.round(new=(1,)))
    train(members, 2.0, ranks=(0,))
    leaver, ids = members.rounds[0], iter((2, 3, 4))
    leaver.follow = lambda: leaver.carry_out(members.round(next(ids))) is None

    def leave_or_stay(rank: int) -> None:
        if rank:
            for id in (2, 3):
                members.rounds[rank].carry_out(members.round(id))
        else:
            leaver.finish(None)

    assert together(leave_or_stay, range(2)) == [None] * 2
    assert next(ids) == 4
    for model in members.models:  # 1, and half of the leaver's change, everywhere
        assert all(bool((x == 2.0).all()) for x in model.linear.parameters())


def test_who_leaves_waits_for_what_is_being_exchanged(switchboard) -> None:
    settings = LocalSettings(period=4, delay=2, compression="none", rescale=False, keep=1.0)
    members = Members(switchboard, 2, settings=settings)
    members.run(members.round(new=(1,)))
    together(lambda rank: [members.rounds[rank].after_step() for _ in range(2)], range(2))
    train(members, 2.0, ranks=(0,))
    leaver, stayer = members.rounds
    leaver.follow = lambda: leaver.carry_out(members.round(2)) is None

    def leave_or_stay(rank: int) -> None:
        if rank:
            stayer.carry_out(members.round(2))
        else:
            leaver.finish(None)
            leaver.groups.leave()

    assert together(leave_or_stay, range(2)) == [None] * 2
    for _ in range(2):
        stayer.after_step()
    assert members.values("linear.weight") == [2.0] * 2  # 1, and half of the leaver's change


def test_what_could_not_be_exchanged_before_members_change_changes_nothing(switchboard) -> None:
    members = Members(switchboard, 2, settings=LocalSettings(period=4, delay=2, compression="none"), buffers="keep")
    members.run(members.round(new=(1,)))
    together(lambda rank: [members.rounds[rank].after_step() for _ in range(2)], range(2))
    before = [x.clone() for x in members.replicas[0].algorithm.shared_state()]
    train(members, 1.0)
    members.rounds[1].groups.current.cut()
    members.rounds[0].carry_out(members.round(2))
    assert members.run(members.round(3, number=2)) == [None] * 2
    assert same(before, *[r.algorithm.shared_state() for r in members.replicas])


def test_a_snapshot_is_saved_when_its_round_is_committed(switchboard, tmp_path) -> None:
    members = Members(switchboard, 1, folder=tmp_path)
    rounds = members.rounds[0]

    def carry_out(id: int, count: int, *, redo: bool = False) -> list[int]:
        rounds.carry_out(members.round(id, count=count, checkpoint=True), redo=redo)
        return counts(tmp_path, "run", "node0/worker0")

    assert carry_out(1, 5) == [5] and rounds.active.snapshot is None  # it takes no memory any more
    # A round that takes the place of one that failed in the backward pass has the snapshot of that one ...
    rounds.active.snapshot = rounds._take(5)
    members.replicas[0].flat.buffers[0].fill_(9.0)
    assert carry_out(2, 5, redo=True) == [5]
    saved = load_file(checkpoint_path(tmp_path, "run", 5, "node0/worker0"))
    assert not any(bool((x == 9).any()) for x in saved.values() if x.is_floating_point())
    # ... unless the run has gone on since.
    assert carry_out(3, 6, redo=True) == [5]
    assert carry_out(4, 7) == [5, 7]


def test_a_run_that_ends_in_a_backward_pass_has_its_checkpoint_and_leaves_a_scaler_its_gradients(
    switchboard, tmp_path
) -> None:
    """The optimizer's step drops them, and does not count."""
    members = Members(switchboard, 2, settings=AllReduceSettings(), folder=tmp_path)
    assert members.run(members.round()) == [None] * 2
    for rounds in members.rounds:
        rounds.groups.current.cut()
    final, met = members.round(2, number=2, final=True, count=7, checkpoint=True), Barrier(2)

    def step(rank: int) -> None:
        rounds, model, optimizer = members.rounds[rank], members.models[rank], members.optimizers[rank]

        def ends(redo: bool) -> bool:
            met.wait(scaled(60.0))
            rounds.carry_out(final, redo=redo)
            rounds.grants.take(Stop(2, final, "enough"))
            return False

        rounds.follow = ends
        optimizer.register_step_pre_hook(lambda *_: rounds.before_step(optimizer))
        rounds.arm(begun=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model.linear.weight.sum()).backward()
        assert rounds._step.state is StepState.ENDED
        before = model.linear.weight.clone()
        scaler.step(optimizer)
        assert torch.equal(model.linear.weight, before) and rounds.active.skipped

    assert together(step, range(2)) == [None] * 2
    assert counts(tmp_path, "run", "node0/worker0") == counts(tmp_path, "run", "node0/worker1") == [7]


def test_a_script_may_choose_where_its_new_tensors_are(switchboard, tmp_path) -> None:
    """As by torch.set_default_device("cuda"); a tensor of lsgd's own on "meta" has no numbers."""
    holds.cache_clear()
    members = Members(switchboard, 2, settings=LocalSettings(period=4), sync_optimizer=True, folder=tmp_path)

    def run(rank: int) -> None:
        with torch.device("meta"):
            members.rounds[rank].carry_out(members.round(new=(0,), source=1, count=1, checkpoint=True))
            members.rounds[rank].carry_out(members.round(2, final=True))

    assert together(run, range(2)) == [None] * 2
    assert members.values("linear.weight") == members.values("norm.running_mean") == [2.0] * 2
    assert counts(tmp_path, "run", "node0/worker1") == [1]


def test_without_a_global_round_there_is_nothing_to_save(switchboard, tmp_path) -> None:
    members = Members(switchboard, 1, folder=tmp_path)
    rounds = members.rounds[0]
    with pytest.raises(ServerLostError, match=golden.pattern("exchange.state_not_saved")):
        with rounds.saving():
            raise ServerLostError("nobody there")
    rounds.carry_out(members.round(count=5))
    with pytest.raises(ServerLostError, match=golden.pattern("exchange.state_saved")):
        with rounds.saving():
            raise ServerLostError("nobody there")
    with pytest.raises(EvictedError, match=r"^late$"), rounds.saving():
        raise EvictedError("late")
