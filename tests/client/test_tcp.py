"""Groups over TCP connections of their own, plain and in TLS: every verb, strangers, and what a missing member does."""

import threading

import pytest
import torch

from lsgd.client.groups.tcp.group import TcpGroup
from lsgd.errors import ExchangeError

from .bench import CERTIFICATE, Switchboard
from .test_groups import HOUR_S, every_verb
from .test_groups import run as run_over


@pytest.fixture
def switchboard(tmp_path):
    with Switchboard(tmp_path) as made:
        yield made


@pytest.fixture(params=["plain", "tls"])
def run(switchboard, request):
    certificate = CERTIFICATE if request.param == "tls" else b""

    def over_tcp(node_sizes, work, **options):
        return run_over(switchboard, node_sizes, work, transport="tcp", **{"certificate": certificate, **options})

    return over_tcp


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name in ("lsgd-connect", "lsgd-send", "lsgd-receive")}


@pytest.mark.parametrize("node_sizes", [(1,), (2,), (2, 1), (3, 1, 1)])
def test_every_verb_on_the_world_and_its_subgroups(run, node_sizes) -> None:
    def work(group: TcpGroup) -> bool:
        assert isinstance(group, TcpGroup)
        every_verb(group)
        every_verb(group.node)
        if group.across is not None:
            every_verb(group.across)
        return True

    assert run(node_sizes, work) == [True] * sum(node_sizes)
    assert not threads()


def test_a_subset_in_an_order_of_its_own(run) -> None:
    def work(group: TcpGroup) -> float:
        x = torch.tensor([float(group.rank)])
        if group.rank != 1:
            group.subset("some", [2, 0]).broadcast(x, 0)
        return x.item()

    assert run((2, 1), work) == [2.0, 1.0, 2.0]


def test_a_member_that_never_comes_ends_the_others_in_time(run) -> None:
    errors = run((2, 1), lambda g: g.all_reduce(torch.ones(1)).wait(), missing=[2], timeout_s=1.0)
    assert [type(error) for error in errors] == [ExchangeError] * 2


def test_a_member_that_goes_frees_its_neighbours_at_once(run) -> None:
    def work(group: TcpGroup):
        group.all_reduce(torch.ones(1)).wait()
        if group.rank == 0:
            return None
        with pytest.raises(ExchangeError, match=r"all_reduce: waited .* gave up: .*node0/worker0"):
            group.all_reduce(torch.ones(1)).wait()
        return True

    assert run((2,), work, timeout_s=HOUR_S) == [None, True]
