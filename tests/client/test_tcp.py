"""Groups over TCP connections of their own, plain and in TLS: every verb, strangers, and what a missing member does."""

import gc
import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.testbed import Testbed
from lsgd.client.groups import base, tcp_group
from lsgd.client.groups.handshake import context_of
from lsgd.client.groups.stream import Operation
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.errors import ExchangeError
from lsgd.protocol.credentials import run_certificate
from tests import golden

from ..integration.running import FORKS, until
from ..integration.test_two_nodes import finish
from ..speed import scaled
from .bench import CERTIFICATE, Switchboard
from .meshes import all_at_once, clock, members
from .test_groups import HOUR_S, every_verb
from .test_groups import run as run_over

__all__ = ["clock"]

ROOT = Path(__file__).parents[2]


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


def test_groups_whose_members_have_met_need_no_store() -> None:
    groups, store = members(3, [CERTIFICATE] * 3)
    met = threading.Barrier(3, store.clear)  # as a global server that is started again

    def work(group: TcpGroup) -> bool:
        group._mesh.gather()
        met.wait(scaled(20))
        return every_verb(group)

    assert all_at_once(groups, work) == [True] * 3


def test_a_group_may_be_ended_twice_while_connections_are_made() -> None:
    for _ in range(20):
        (first, second), _ = members(2, [CERTIFICATE] * 2)
        second._mesh.from_(0)
        first._mesh.to(1)
        for group in (first, second):
            for _ in range(5):
                group.cut()
            group.close()
            assert group._mesh._service._events.is_closed()


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_connection_that_is_reset_before_its_handshake_is_closed(side) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()  # resets it
    descriptor = raw.fileno()
    with pytest.raises(ConnectionResetError, match=golden.pattern("tcp.other_end_gone")):
        context_of(CERTIFICATE, answers=side == "server").wrap_socket(
            raw, server_side=side == "server", do_handshake_on_connect=False
        )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


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
            group._subgroup("some", [2, 0], one_node=False).broadcast(x, 0)
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
        with pytest.raises(ExchangeError, match=golden.pattern("tcp.all_reduce_gave_up")):
            group.all_reduce(torch.ones(1)).wait()
        return True

    assert run((2,), work, timeout_s=HOUR_S) == [None, True]


@pytest.mark.parametrize("certificate", [b"", CERTIFICATE], ids=["plain", "tls"])
def test_a_peer_that_is_silent_runs_into_the_deadline_and_is_named(clock, monkeypatch, certificate) -> None:
    for module in (base, tcp_group):
        monkeypatch.setattr(module, "time", clock)
    groups, _ = members(2, [certificate] * 2, timeout_s=20.0)
    met, over = threading.Barrier(2, timeout=scaled(20)), threading.Event()

    def work(group: TcpGroup) -> str:
        group.all_reduce(torch.ones(1)).wait()
        met.wait()
        if group.rank == 1:
            until(lambda: groups[0]._mesh.from_(1).waited_since() < math.inf, "the other one waits")
            clock.now += 20.5
            return str(over.wait(scaled(20)))
        with pytest.raises(ExchangeError) as raised:
            group.broadcast(torch.ones(100_000), 1)
        over.set()
        return str(raised.value)

    told, _ = all_at_once(groups, work)
    assert told.startswith(golden.text("tcp.waited"))
    assert golden.text("tcp.not_in_time") in told


def test_a_cut_frees_who_waits_for_a_silent_peer(run) -> None:
    freed = threading.Event()

    def work(group: TcpGroup) -> bool:
        group.all_reduce(torch.ones(3)).wait()
        if group.rank == 1:
            return freed.wait(scaled(30))
        threading.Timer(0.2, group.cut).start()
        with pytest.raises(ExchangeError, match=golden.pattern("tcp.closed")):
            group.all_reduce(torch.ones(3)).wait()
        freed.set()
        return True

    assert run((2,), work, timeout_s=HOUR_S) == [True, True]


def test_groups_listen_on_the_address_they_are_given(run, monkeypatch) -> None:
    """The host name plays no part."""

    def refuse(*_):
        raise AssertionError("a host name was looked up")

    monkeypatch.setattr(socket, "gethostname", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    opened = []
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **kw: opened.append(a[0]) or create(*a, **kw))
    assert run((2,), every_verb) == [True, True]
    assert opened == [("127.0.0.1", 0)] * 2


def test_the_end_of_a_generation_ends_the_wait_for_a_member(switchboard) -> None:
    work = lambda g: g.all_reduce(torch.ones(1)).wait()  # noqa: E731
    with switchboard.ending(1, "node0/worker1 left"):
        (error,) = run_over(switchboard, (2,), work, missing=[1], transport="tcp")
    assert isinstance(error, ExchangeError) and golden.text(
        "reasons.generation_over", number=1, worker="node0/worker1"
    ) in str(error)


def test_members_at_different_verbs_are_told(run) -> None:
    def work(group: TcpGroup) -> str:
        x = torch.ones(4)
        with pytest.raises(ExchangeError) as raised:
            if group.rank:
                group.broadcast(x, 0)
            else:
                group.exchange({1: x}, {1: x.clone()})
        return str(raised.value)

    first, second = run((2,), work, timeout_s=5.0)
    assert golden.text("tcp.other_operation") in second
    assert "node0/worker1" in first


def test_results_have_the_bits_of_gloo(switchboard) -> None:
    """What is only carried, and a sum of two, which has no order; ``nccl`` is Gloo in its place."""

    def work(group) -> list[torch.Tensor]:
        numbers = torch.randn(70_001, generator=torch.Generator().manual_seed(group.rank))
        gathered = [torch.empty_like(numbers) for _ in range(group.size)]
        group.all_gather(gathered, numbers).wait()
        summed, sent = numbers.clone(), numbers.clone()
        group.all_reduce(summed).wait()
        group.broadcast(sent, 1)
        return [*gathered, summed, sent]

    ways = [("nccl", b""), ("tcp", b""), ("tcp", CERTIFICATE)]
    results = [
        run_over(switchboard, (2,), work, transport=transport, certificate=certificate, number=number)
        for number, (transport, certificate) in enumerate(ways, start=1)
    ]
    for result in results[1:]:
        assert not isinstance(result[0], ExchangeError), result
        for ours, gloos in zip(result, results[0], strict=True):
            assert all(a.equal(b) for a, b in zip(ours, gloos, strict=True))


def test_a_sum_is_made_in_the_order_of_ranks_with_the_same_bits_on_all(run) -> None:
    numbers = [torch.randn(40_000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def work(group: TcpGroup) -> list[torch.Tensor]:
        results = [numbers[group.rank].clone(), numbers[group.rank][:9].clone()]
        for x in results:
            group.all_reduce(x).wait()
        return results

    expected = numbers[0] + numbers[1] + numbers[2]
    for large, small in run((2, 1), work):
        assert large.equal(expected) and small.equal(expected[:9])


def test_a_member_with_another_certificate_is_told_at_once() -> None:
    groups, _ = members(2, [CERTIFICATE, run_certificate(b"x" * 32, "run")], timeout_s=HOUR_S)
    errors = all_at_once(groups, lambda group: group.all_reduce(torch.ones(1)).wait())
    assert all(isinstance(error, ExchangeError) and golden.text("tcp.no_connection") in str(error) for error in errors)
    assert any("certificate" in str(error) for error in errors)


def test_what_is_done_leaves_no_memory_to_the_garbage_collector() -> None:
    groups, _ = members(2, [CERTIFICATE] * 2)

    def work(group: TcpGroup) -> None:
        for _ in range(30):
            group.all_reduce(torch.ones(40_000)).wait()

    gc.collect()
    gc.disable()
    try:
        assert all_at_once(groups, work) == [None] * 2
        # The last ones may be in the hands of the groups' threads; if any were kept, so were all 60 and more.
        assert sum(type(thing) is Operation for thing in gc.get_objects()) < 40
    finally:
        gc.enable()


def test_what_has_failed_leaves_no_memory_to_the_garbage_collector() -> None:
    groups, _ = members(2, [CERTIFICATE] * 2)
    held = []

    def work(group: TcpGroup) -> None:
        group.all_reduce(torch.ones(4)).wait()
        if group.rank == 1:
            tensor = torch.ones(4_000_000)  # more than the system takes
            held.append(weakref.ref(tensor))
            with suppress(ExchangeError):
                group.all_reduce(tensor).wait()

    gc.collect()
    gc.disable()
    try:
        assert all_at_once(groups, work) == [None] * 2
        assert [one() for one in held] == [None]
    finally:
        gc.enable()


def test_forty_generations_leave_no_thread_and_no_descriptor(run) -> None:
    run((2,), every_verb)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        groups, _ = members(3, [CERTIFICATE] * 3)
        assert all_at_once(groups, lambda group: group.all_reduce(torch.ones(1)).wait()) == [None] * 3
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not threads()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_who_sits_on_the_way_reads_nothing_of_what_is_encrypted(kind) -> None:
    """And finds the pattern where it is not, so that the capture is one."""
    pattern = bytes(range(100, 164)).hex()
    with Testbed(2) as testbed:
        first, second = testbed.hosts
        python = {"cwd": ROOT, "text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        capture = second.popen([sys.executable, "-m", "tests.client.capture", pattern], **python)
        assert capture.stdout.readline() == "ready\n"
        member = [sys.executable, "-m", "tests.client._tcp_member"]
        finish(
            [
                FORKS.popen(
                    [*member, str(host.index), first.address, host.address, kind, pattern],
                    **{"cwd": ROOT, "env": os.environ, "host": host.pid},
                )
                for host in testbed.hosts
            ]
        )
        nbytes, found = json.loads(capture.communicate()[0])
    assert nbytes > 2 * 1_000_000
    assert (found > 20) if kind == "plain" else (found == 0)
