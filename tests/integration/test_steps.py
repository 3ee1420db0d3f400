"""A loop of one's own: begin_step() and end_step() of one worker in this process, with real servers."""

import itertools
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from lsgd.client import Worker
from lsgd.client.control.identity import Identity
from lsgd.errors import LsgdError
from tests import golden

CLIENT_PAGE = Path(__file__).parents[2] / "docs" / "guides" / "client.md"
BATCH = torch.ones(4, 6)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Loop:
    """A model, its optimizer, and the number of batches that were drawn."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.drawn = 0

    def data(self) -> Iterator[torch.Tensor]:
        for self.drawn in itertools.count(1):
            yield BATCH

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def start(cluster, monkeypatch, *arguments: str) -> Loop:
    """Start the servers of a run of one worker, which is to join in this process."""
    cluster.start("--workers", "1", *arguments)
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")
    return Loop()


ALGORITHMS = [
    pytest.param(("--period", "4", "--local-period", "4"), id="leader"),
    pytest.param(("--algorithm", "allreduce"), id="allreduce"),
    pytest.param(("--algorithm", "decentralized"), id="decentralized"),
]


@pytest.mark.parametrize("arguments", ALGORITHMS)
@pytest.mark.parametrize("own", [True, False], ids=["steps", "batches"])
def test_the_end_is_known_before_the_next_batch_is_drawn(cluster, monkeypatch, arguments, own) -> None:
    loop = start(cluster, monkeypatch, *arguments, "--iterations", "9")
    with Worker.join(loop.model, loop.optimizer) as worker:
        if own:
            data, goes_on = loop.data(), worker.begin_step()
            while goes_on:
                goes_on = worker.end_step(loop.step(next(data)))
                assert goes_on != worker.stopped
                assert not goes_on or worker.begin_step()
            assert not worker.begin_step() and not worker.end_step()  # and no error after the end
        else:
            for x in worker.batches(loop.data()):
                worker.report(loop.step(x))
        assert worker.stopped and worker.progress == 1.0
        assert worker.consensus_distance == 0.0
        assert worker.status()["count"] == worker.iterations == worker.timings.steps == loop.drawn == 9


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_accumulation_and_skipped_steps_count_nothing(cluster, monkeypatch, arguments) -> None:
    """Of 15 steps, those of the first of two micro-batches and one that overflows are no iterations."""
    loop = start(cluster, monkeypatch, *arguments)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    made = []
    with Worker.join(loop.model, loop.optimizer) as worker:
        for number in range(14):
            assert worker.begin_step()
            loss = scaler.scale(loop.model(BATCH).square().mean())
            if number % 2 == 0:
                with worker.no_sync():
                    loss.backward()
            else:
                (loss * (float("inf") if number == 5 else 1.0)).backward()
                scaler.step(loop.optimizer)
                scaler.update()
                loop.optimizer.zero_grad()
            assert worker.end_step(loss)
            made.append(worker.iterations)
    assert made == [0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert sum(member["done"] for member in cluster.status()["members"]) == 6


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_a_pause_inside_a_step_or_between_two(cluster, monkeypatch, arguments) -> None:
    loop = start(cluster, monkeypatch, *arguments, "--iterations", "12")
    with Worker.join(loop.model, loop.optimizer) as worker:
        while worker.begin_step():
            loop.step(BATCH)
            if worker.iterations == 2:
                with worker.pause():
                    assert [m["state"] for m in worker.status()["members"]] == ["away"]
                assert worker.iterations == 3
            worker.end_step()
            if worker.iterations == 6:
                with worker.pause():
                    assert [m["state"] for m in worker.status()["members"]] == ["away"]
        assert worker.status()["count"] == worker.iterations == 12


def test_a_pause_between_two_passes_fails_no_round(cluster, monkeypatch) -> None:
    loop = start(cluster, monkeypatch, "--algorithm", "allreduce", "--iterations", "12")
    with Worker.join(loop.model, loop.optimizer) as worker:
        while not worker.stopped:
            for x in worker.batches([BATCH] * 5):
                loop.step(x)
            with worker.pause():
                pass
        assert worker.iterations == 12
        assert worker.status()["rounds_global"] == 13
    assert "failed" not in cluster.processes[0].output


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_two_workers_are_threads_of_one_process(cluster, arguments) -> None:
    cluster.start("--workers", "2", *arguments, "--iterations", "40")
    loops = [Loop(), Loop()]

    def train(index: int) -> tuple[str, int, float | None]:
        identity = Identity(index, secrets.randbits(63), cluster.local_address(0), None)
        with Worker.join(loops[index].model, loops[index].optimizer, identity=identity) as worker:
            for x in worker.batches(BATCH * (1 + index + n) for n in itertools.count()):
                worker.report(loops[index].step(x))
        return worker.name, worker.iterations, worker.consensus_distance

    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(train, (0, 1)))
    assert [name for name, *_ in ends] == ["node0/worker0", "node0/worker1"]
    assert sum(iterations for _, iterations, _ in ends) == 40 and ends[0][2] == ends[1][2]
    one, two = (loop.model.state_dict() for loop in loops)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_a_batch_whose_backward_pass_fails_can_be_left_out(cluster, arguments) -> None:
    """Some scripts do so when a GPU's memory has run out."""
    cluster.start("--workers", "2", *arguments, "--iterations", "20")
    loops, left_out = [Loop(), Loop()], []

    def fail(gradient: torch.Tensor) -> None:
        if loops[1].drawn == 3:
            raise MemoryError

    loops[1].model[1].register_forward_hook(lambda module, inputs, out: out.register_hook(fail) and None)

    def train(index: int) -> int:
        identity, loop = Identity(index, secrets.randbits(63), cluster.local_address(0), None), loops[index]
        with Worker.join(loop.model, loop.optimizer, identity=identity) as worker:
            for x in worker.batches(x * (1 + index) for x in loop.data()):
                try:
                    loop.step(x)
                except MemoryError:
                    left_out.append(loop.drawn)
        return worker.iterations

    with ThreadPoolExecutor(2) as threads:
        assert sum(threads.map(train, (0, 1))) == 20
    assert left_out == [3]
    one, two = (loop.model.state_dict() for loop in loops)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_workers_share_a_stream(cluster) -> None:
    cluster.start("--workers", "2", "--period", "4", "--iterations", "40")
    loops = [Loop(), Loop()]

    def train(index: int) -> list[int]:
        identity, seen = Identity(index, secrets.randbits(63), cluster.local_address(0), None), []
        with Worker.join(loops[index].model, loops[index].optimizer, identity=identity) as worker:
            loader = worker.loader(range(1000).__iter__(), batch_size=2)
            for numbers in worker.batches(loader):
                worker.report(loops[index].step(BATCH * (1 + numbers.sum())))
                seen += numbers.tolist()
            assert worker.stopped and loader.part.place[1] == 2
        return seen

    with ThreadPoolExecutor(2) as threads:
        parts = list(threads.map(train, (0, 1)))
    assert sorted({x % 2 for x in part} for part in parts) == [{0}, {1}]
    assert all(part == sorted(part) for part in parts) and sum(map(len, parts)) == 80


def test_a_stream_that_has_ended_for_good_ends_the_loop_with_an_error(here) -> None:
    loop, made = Loop(), (BATCH * (1 + n) for n in range(5))
    with Worker.join(loop.model, loop.optimizer) as worker:
        with pytest.raises(LsgdError, match=golden.pattern("loop.ended_for_good")):
            while not worker.stopped:
                for x in worker.batches(worker.shard(made)):
                    loop.step(x)
        assert worker.iterations == 5


class Liar(list):
    """Says that it is shorter than it is."""

    def __len__(self) -> int:
        return 3


def test_no_batch_of_a_loader_with_a_wrong_length_is_lost(here) -> None:
    loop = Loop()
    with Worker.join(loop.model, loop.optimizer) as worker:
        seen = [(loop.step(x), int(n))[1] for x, n in worker.batches(Liar((BATCH, n) for n in range(7)))]
        assert seen == list(range(7)) and worker.iterations == 7


def test_steps_in_the_wrong_order_are_errors_that_say_so(here) -> None:
    loop = Loop()
    with pytest.raises(LsgdError, match=golden.pattern("loop.begin_again")):
        with Worker.join(loop.model, loop.optimizer) as worker:
            worker.begin_step()
            worker.begin_step()
    with pytest.raises(LsgdError, match=r"end_step\(\) without begin_step\(\)"):
        with Worker.join(loop.model, loop.optimizer) as worker:
            worker.end_step()
    with pytest.raises(LsgdError, match=golden.pattern("loop.steps_inside")):
        worker.begin_step()
    for steps_before in (0, 1):
        with pytest.raises(LsgdError, match=r"optimizer.step\(\) after worker.pause\(\)"):
            with Worker.join(loop.model, loop.optimizer) as worker:
                worker.begin_step()
                for _ in range(steps_before):
                    loop.step(BATCH)
                with worker.pause():
                    pass
                loop.step(BATCH)
        assert worker.iterations == steps_before
    with pytest.raises(LsgdError, match=r"optimizer.step\(\) after .*worker.mean\(\)"):
        with Worker.join(loop.model, loop.optimizer) as worker:
            worker.begin_step()
            worker.mean({"loss": 1.0})
            loop.step(BATCH)


def test_a_backward_pass_between_two_steps_exchanges_nothing(cluster, monkeypatch) -> None:
    loop = start(cluster, monkeypatch, "--algorithm", "allreduce", "--iterations", "3")
    with Worker.join(loop.model, loop.optimizer) as worker:
        while worker.begin_step():
            loop.step(BATCH)
            worker.end_step()
            for _ in range(2):
                loop.model(BATCH).sum().backward()
            loop.optimizer.zero_grad()
        assert worker.iterations == 3


def test_timings_add_up(here) -> None:
    loop = Loop()
    started_at = time.perf_counter()
    with Worker.join(loop.model, loop.optimizer) as worker:
        for turn, x in enumerate(worker.batches(loop.data())):
            loop.step(x)
            if turn == 9:
                middle = worker.timings
            if turn == 19:
                break
        last = worker.timings
    elapsed_s = time.perf_counter() - started_at
    later = last - middle
    assert (middle.steps, last.steps, later.steps) == (9, 20, 11)
    assert 0 < later.compute_s < last.compute_s
    assert 0 < last.waiting_s and 0 < last.exchange_s
    assert last.compute_s + last.waiting_s + last.exchange_s < elapsed_s
    assert last.sent_nbytes == last.received_nbytes == 0  # there is no other worker


def test_the_loop_of_the_documentation_trains(cluster, monkeypatch) -> None:
    loop = start(cluster, monkeypatch, "--iterations", "10")
    section = CLIENT_PAGE.read_text(encoding="utf-8").partition("## A loop of your own")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    assert "begin_step" in code
    names = {
        "model": loop.model,
        "optimizer": loop.optimizer,
        "dataset": torch.utils.data.TensorDataset(torch.ones(64, 6), torch.ones(64, 1)),
        "criterion": nn.functional.mse_loss,
    }
    exec(compile(code, str(CLIENT_PAGE), "exec"), names)
    assert names["worker"].iterations == 10 and names["worker"].stopped


@pytest.mark.parametrize("own", [True, False])
def test_from_the_join_on_a_worker_draws_numbers_of_its_own(cluster, monkeypatch, own) -> None:
    cluster.start("--workers", "1", "--period", "4", "--own-noise", str(own).lower())
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")
    model = network()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with Worker.join(model, torch.optim.SGD(model.parameters(), lr=0.05)) as worker:
        assert (torch.rand(1) != expected) == own
        assert worker.rows(10) == range(10) and worker.part == (0, 1)
