"""Copies of the weights that optimizers keep: they move with the weights, and the consensus averages them once."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lsgd.algorithms.elastic import ElasticSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.client.control.joining import torch_optimizers
from lsgd.client.iteration.copies import COPIES
from lsgd.errors import ConfigError, LsgdError
from tests import golden

from .bench import Switchboard
from .test_exchange import LEADER, Members

LOCAL = LocalSettings(period=4, compression="none", rescale=False)


@pytest.fixture
def switchboard(tmp_path: Path) -> Iterator[Switchboard]:
    with Switchboard(tmp_path) as made, ExitStack() as made.members:
        yield made


def keep_copies(members: Members, *ranks: int, option: str = "lookahead_alpha", ahead: float = 0.5) -> None:
    """Let the optimizers be of a kind that keeps copies; those of ``ranks`` have some, ``ahead`` of the weights."""
    for rank, optimizer in enumerate(members.optimizers):
        optimizer.param_groups[0][option] = 0.5
        for parameter in optimizer.param_groups[0]["params"] if rank in ranks else ():
            optimizer.state[parameter] = {
                COPIES[option]: parameter.detach() + ahead,
                "momentum_buffer": torch.full_like(parameter, 7.0),
            }


def copies(members: Members) -> list[list[Tensor]]:
    return [replica.copies.tensors() for replica in members.replicas]


def distances(members: Members) -> list[set[float]]:
    """Return how far each member's copies are ahead of its weights."""
    weights = [optimizer.param_groups[0]["params"] for optimizer in members.optimizers]
    pairs = [zip(each, of, strict=True) for each, of in zip(copies(members), weights, strict=True)]
    return [{round(float(x), 5) for copy, p in each for x in (copy - p).detach().flatten()} for each in pairs]


@pytest.mark.parametrize("option", COPIES)
@pytest.mark.parametrize("settings", [LOCAL, LEADER, ElasticSettings(period=4)], ids=lambda settings: settings.name)
def test_copies_move_by_the_change_of_a_round(switchboard, settings, option) -> None:
    members = Members(switchboard, 3, settings=settings)
    keep_copies(members, 0, 1, 2, option=option)
    members.run(members.round(new=(2,)))
    for rank, model in enumerate(members.models):
        model.linear.weight.data.add_(rank)
        members.optimizers[rank].state[model.linear.weight][COPIES[option]].add_(rank)
    before = members.values("linear.weight")
    members.run(members.round(2))
    assert members.values("linear.weight") != before
    assert distances(members) == [{0.5}] * 3
    momenta = [state["momentum_buffer"] for o in members.optimizers for state in o.state.values()]
    assert all(bool((momentum == 7.0).all()) for momentum in momenta)


def test_copies_move_with_what_a_step_pulls(switchboard) -> None:
    settings = LeaderSettings(period=4, local_period=4, pull_global=0.0, proximal_global=0.5, proximal_local=0.0)
    members = Members(switchboard, 2, settings=settings)
    keep_copies(members, 0, 1)
    members.run(members.round(leader=1))
    before = members.values("linear.weight")
    for rounds in members.rounds:
        rounds.after_step()
    assert members.values("linear.weight")[0] > before[0]
    assert distances(members) == [{0.5}] * 2


@pytest.mark.parametrize("consensus", ["average", "leader"])
def test_the_consensus_is_one_model_in_weights_and_copies(switchboard, consensus) -> None:
    """The third member has made no step, so its optimizer has no copies: it begins with those of the others."""
    members = Members(switchboard, 3, settings=LEADER, consensus=consensus)
    keep_copies(members, 0, ahead=0.25)
    keep_copies(members, 1, ahead=0.75)
    members.run(members.round(leader=1, new=(2,), source=0, final=True))
    ahead = 0.75 if consensus == "leader" else 0.5
    assert distances(members) == [{ahead}] * 3
    assert all(map(torch.equal, copies(members)[0], copies(members)[2]))


def test_where_nobody_has_made_a_step_there_is_nothing_to_average(switchboard) -> None:
    members = Members(switchboard, 2)
    keep_copies(members)
    members.run(members.round(final=True))
    assert copies(members) == [[], []] and not members.optimizers[0].state


@pytest.mark.parametrize("sync", [True, False])
def test_a_newcomers_copies_are_as_far_from_its_weights_as_those_that_it_takes(switchboard, sync) -> None:
    members = Members(switchboard, 2, settings=LOCAL, sync_optimizer=sync)
    keep_copies(members, 0, 1)
    members.run(members.round(new=(1,)))
    keep_copies(members, 0, ahead=0.25)
    with torch.no_grad():
        members.models[0].linear.weight.add_(1.0)
        members.optimizers[0].state[members.models[0].linear.weight]["lookahead_slow_buff"].add_(1.0)
    members.run(members.round(2, number=2, new=(1,), source=0))
    assert distances(members) == [{0.25}, {0.25 if sync else 0.5}]


def test_copies_of_a_model_that_was_not_finite_begin_anew(switchboard) -> None:
    members = Members(switchboard, 2, settings=LOCAL)
    keep_copies(members, 0, 1)
    members.run(members.round())
    with torch.no_grad():
        members.models[1].linear.weight.fill_(math.nan)
    members.run(members.round(2))
    assert distances(members) == [{0.5}, {0.0, 0.5}]


def test_other_optimizers_than_the_sources_are_refused_in_words(switchboard) -> None:
    members = Members(switchboard, 2, exchange_timeout_s=1.0)
    keep_copies(members)
    members.optimizers[1].param_groups[0].pop("lookahead_alpha")
    _, error = members.run(members.round(new=(1,)))
    assert isinstance(error, LsgdError)
    assert golden.text("exchange.copies_differ") in str(error)


class Lookahead:
    """Keeps slow weights in a state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_slow_weights_out_of_sight_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"use timm\.optim\.Lookahead"):
        torch_optimizers(model, Lookahead(optimizer))
