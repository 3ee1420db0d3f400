"""Flat scripts: hooks begin and end the steps of their loops, which stay as they are, in runs with real servers."""

import copy
import io
import itertools
import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler

import lsgd
from lsgd.client.checkpoint.file import read
from lsgd.client.control.channel import Channel, Clock
from lsgd.client.control.identity import Identity
from lsgd.client.wrap import WrappedWorker, loss_in
from lsgd.errors import ConfigError, EvictedError, JoinError, LsgdError, NotTrainedError
from lsgd.flat import describe
from lsgd.protocol.messages import LOOP_ENDED, StopRun
from lsgd.run_folder import checkpoint_path, counts, runs
from tests import golden

from ..speed import scaled
from .test_steps import ALGORITHMS, BATCH, network


class WithLoss(nn.Module):
    """Returns its output and, in training mode, its loss, as many scripts' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return out, out.square().mean()


class Script:
    """A model, its optimizer, and the loop of a script that knows nothing of lsgd."""

    def __init__(self, **options: Any) -> None:
        self.model = WithLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.worker: WrappedWorker = lsgd.wrap(self.model, self.optimizer, **options)

    def step(self, x: Tensor = BATCH, micro_batches: int = 1) -> None:
        for _ in range(micro_batches):
            _, loss = self.model(x)
            (loss / micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, batches: int = 3) -> None:
        self.model.eval()
        with torch.no_grad():
            for _ in range(batches):
                self.model(BATCH)
        self.model.train()

    def state(self) -> str:
        return str(self.worker.status()["members"][0]["state"])


def join_here(cluster, monkeypatch, *arguments: str) -> None:
    """Start the servers of a run of one worker, which is to join in this process."""
    cluster.start("--workers", "1", *arguments)
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")


@pytest.fixture
def script(here) -> Iterator[Script]:
    made = Script()
    with made.worker:
        yield made


def in_threads(cluster, train: Callable[[int, Identity], Any], workers: int = 2) -> list[Any]:
    """Run a script in threads of this process, each a worker."""
    identities = [Identity(i, secrets.randbits(63), cluster.local_address(0), None) for i in range(workers)]
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(train, range(workers), identities))


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_two_scripts_make_their_own_steps_and_end_with_one_model(cluster, arguments) -> None:
    cluster.start("--workers", "2", *arguments)

    def train(index: int, identity: Identity) -> tuple[Any, ...]:
        script = Script(steps=20 + 10 * index, identity=identity)
        worker = script.worker
        shares = []
        for step in range(worker.step, worker.steps):
            script.step(BATCH * (1 + index + step))
            assert worker.step == worker.iterations == step + 1
            shares.append(worker.progress)
        assert worker.finish() and worker.stopped and worker.progress == 1.0
        assert shares == sorted(shares) and shares[0] < 0.2
        return worker.iterations, worker.first, script.model.state_dict()

    (made, first, one), (more, second, two) = in_threads(cluster, train)
    assert (made, more) == (20, 30) and (first, second) == (True, False)
    assert all(torch.equal(one[name], two[name]) for name in one)
    cluster.processes[0].says(golden.pattern("reasons.all_finished"))


def test_a_worker_that_makes_no_step_has_trained_nothing(cluster) -> None:
    cluster.start("--workers", "2", "--algorithm", "local")
    trained = Event()

    def train(index: int, identity: Identity) -> str:
        script = Script(steps=4 * index, identity=identity)
        script.model(BATCH)
        with script.worker.pause():  # after it has asked, so that the others do not wait for its first step
            pass
        for _ in range(script.worker.steps):
            script.step(BATCH * 2)
            trained.set()
        trained.wait(scaled(60.0))
        try:
            script.worker.finish()
        except NotTrainedError as error:
            script.worker.fails(error)
            return str(error)
        return ""

    idle, other = in_threads(cluster, train)
    assert golden.text("wrap.nothing_by_loop") in idle and not other


@pytest.mark.parametrize("block", [True, False], ids=["with", "hooks"])
def test_a_worker_of_a_run_that_has_ended_without_it_says_so(cluster, monkeypatch, block, caplog) -> None:
    join_here(cluster, monkeypatch)
    script = Script()
    cluster.ask(StopRun("enough"))
    while not script.worker.stopped:
        script.step()
    with pytest.raises(SystemExit) as raised:
        if block:
            with script.worker:
                pass
        else:
            script.worker.finish()
    assert raised.value.code == NotTrainedError.exit_code
    assert golden.text("wrap.nothing_by_end") in caplog.text


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_accumulation_evaluation_and_a_scaler_that_skips(cluster, monkeypatch, arguments) -> None:
    join_here(cluster, monkeypatch, *arguments)
    script, scaler = Script(steps=6, accumulate=2), torch.amp.GradScaler("cpu", init_scale=4.0)
    made = []
    for step in range(7):
        for micro in range(2):
            _, loss = script.model(BATCH)
            scaler.scale(loss * (float("inf") if step == 2 and micro else 1.0)).backward()
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        script.evaluate()
        assert script.state() == ("live" if step == 2 else "away")
        made.append(script.worker.iterations)
    assert made == [1, 2, 2, 3, 4, 5, 6]
    assert script.worker.finish() and script.worker.iterations == 6


def test_one_pass_without_gradients_is_no_evaluation(script) -> None:
    for _ in range(3):
        script.evaluate(batches=1)
        script.step()
        assert script.state() == "live"
    script.evaluate(batches=2)
    assert script.state() == "away"
    script.step()
    script.step()
    assert script.state() == "live" and script.worker.iterations == 5


def test_a_round_that_the_script_interrupts_is_made_anew(cluster) -> None:
    """As Ctrl-C in a notebook, after which the loop goes on."""
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "4")

    def train(index: int, identity: Identity) -> tuple[int, dict[str, Tensor]]:
        script, interrupted = Script(steps=24, identity=identity), list[int]()
        algorithm = script.worker._replica.algorithm
        exchange = algorithm.before_forward

        def before_forward(parameters: Any, group: Any, order: Any) -> Any:
            commit = exchange(parameters, group, order)
            if index == 0 and order is not None and order.id == 3 and not interrupted:
                interrupted.append(order.id)
                raise KeyboardInterrupt
            return commit

        algorithm.before_forward = before_forward  # type: ignore[method-assign]
        while script.worker.step < script.worker.steps:
            with suppress(KeyboardInterrupt):
                script.step(BATCH * (1 + index))
        assert script.worker.finish() and interrupted == [3] * (index == 0)
        return script.worker.iterations, script.model.state_dict()

    (made, one), (other, two) = in_threads(cluster, train)
    assert (made, other) == (24, 24)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_passes_without_gradients_in_training_mode_are_no_evaluation(script) -> None:
    """As those that make pseudo-labels of some views of each batch: without this worker, the others' rounds lack it."""
    for _ in range(3):
        with torch.no_grad():
            for view in range(12):
                script.model(view * BATCH)
        assert script.state() == "live" or not script.worker.iterations
        script.step()
    assert script.worker.iterations == 3


def test_after_a_mean_comes_another_evaluation(script) -> None:
    script.step()
    script.evaluate()
    assert script.state() == "away"
    script.worker.mean({"val": 1.0})
    assert script.state() == "live", "the others wait for its next step"
    script.evaluate()
    assert script.state() == "away"


def test_a_pass_without_gradients_inside_an_iteration_is_no_evaluation(script) -> None:
    script.step()
    _, loss = script.model(BATCH)
    script.evaluate()
    loss.backward()
    script.optimizer.step()
    assert script.state() == "live"


def test_a_probe_of_two_passes_is_no_evaluation(cluster, monkeypatch) -> None:
    join_here(cluster, monkeypatch, "--election", "probe", "--period", "2", "--local-period", "2")
    script, probed = Script(steps=6), 0

    def probe() -> Tensor:
        nonlocal probed
        probed += 1
        return script.model(BATCH)[1] + script.model(2 * BATCH)[1]

    script.worker.probe(probe)
    for _ in range(6):
        script.step()
        assert script.state() == "live"
    assert probed > 1 and script.worker.finish() and script.worker.iterations == 6


def test_a_forward_that_does_not_pass_the_hooks_begins_in_the_step(script) -> None:
    for _ in range(3):
        script.model.forward(BATCH)[1].backward()
        script.optimizer.step()
    script.step()
    script.step()
    assert script.worker.iterations == 5


def test_gradients_cannot_be_exchanged_without_a_forward_of_the_model(cluster, monkeypatch) -> None:
    join_here(cluster, monkeypatch, "--algorithm", "allreduce")
    script = Script(steps=3)
    script.model.forward(BATCH)[1].backward()
    with pytest.raises(LsgdError, match=golden.pattern("wrap.no_forward")):
        script.optimizer.step()
    script.worker.fails(RuntimeError())


def test_micro_batches_that_are_all_exchanged_are_said_once(cluster, monkeypatch, caplog) -> None:
    join_here(cluster, monkeypatch, "--algorithm", "allreduce")
    script = Script(steps=4)
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        for _ in range(4):
            script.step(micro_batches=3)
    assert sum(golden.text("wrap.accumulate") in message for message in caplog.messages) == 1
    assert script.worker.finish() and script.worker.iterations == 4


@pytest.mark.parametrize("left_over", [2, 6], ids=["stepped", "carried over"])
def test_batches_left_over_by_accumulate_cannot_be_exchanged(cluster, monkeypatch, left_over) -> None:
    join_here(cluster, monkeypatch, "--algorithm", "allreduce")
    script = Script(steps=3, accumulate=4)
    script.step(micro_batches=4)
    message = golden.pattern("wrap.accumulate_4", left_over=left_over)
    with pytest.raises(LsgdError, match=message):
        script.step(micro_batches=left_over)
    script.worker.fails(RuntimeError())


def test_steps_of_any_length_exchange_once_with_no_sync(cluster, monkeypatch, caplog) -> None:
    join_here(cluster, monkeypatch, "--algorithm", "allreduce")
    script = Script(steps=4)
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        for micro_batches in (4, 4, 2, 4):
            for left in reversed(range(micro_batches)):
                _, loss = script.model(BATCH)
                with script.worker.no_sync() if left else nullcontext():
                    loss.backward()
            script.optimizer.step()
            script.optimizer.zero_grad()
    assert script.worker.iterations == script.worker.status()["rounds_global"] == 4
    assert not caplog.messages
    assert script.worker.finish()


def test_schedulers_closures_and_compiled_models_work(cluster, monkeypatch) -> None:
    join_here(cluster, monkeypatch)
    model = WithLoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    compiled = torch.compile(model, backend="eager")
    worker = lsgd.wrap(compiled, optimizer, steps=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        _, loss = compiled(BATCH)
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
        scheduler.step()
    assert type(optimizer) is torch.optim.LBFGS and scheduler.get_last_lr() == [0.0]
    assert worker.finish() and worker.iterations == 5


def test_a_model_is_pickled_as_a_whole_without_what_lsgd_has_put_on_it(script) -> None:
    script.step()
    for model in (script.model, copy.deepcopy(script.model)):
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        assert b"lsgd.client" not in file.getvalue()
        read = torch.load(file, weights_only=False)
        assert torch.equal(read(BATCH)[0], script.model(BATCH)[0]) and read(BATCH)[1].requires_grad
    assert script.worker.iterations == 1 and not script.worker.stopped


def test_a_model_that_is_compiled_after_the_join_keeps_its_hooks(script) -> None:
    compiled = torch.compile(script.model, backend="eager")
    for _ in range(3):
        compiled(BATCH)[1].backward()
        script.optimizer.step()
    script.evaluate()
    assert script.worker.iterations == 3


def test_an_iteration_of_two_optimizers_ends_when_both_have_stepped(here, caplog) -> None:
    model = nn.ModuleList([WithLoss(), WithLoss()])
    model.forward = lambda which: model[which](BATCH)[1]  # type: ignore[method-assign, assignment]
    both = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    worker = lsgd.wrap(model, both)
    for _ in range(4):
        for which in (0, 0, 1):
            model(which).backward()
            both[which].step()
    assert worker.iterations == 4
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        for _ in range(140):
            model(0).backward()
            both[0].step()
    (message,) = caplog.messages
    assert golden.text("wrap.not_stepped") in message
    worker.__exit__(None, None, None)


def test_after_the_end_of_the_run_the_loop_changes_nothing(cluster, monkeypatch, caplog) -> None:
    join_here(cluster, monkeypatch, "--iterations", "5")
    script = Script(steps=8)
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        for step in range(8):
            if step == 6:
                end = {name: x.clone() for name, x in script.model.state_dict().items()}
            script.step()
            script.evaluate()
    (message,) = [m for m in caplog.messages if "change nothing" in m]
    assert golden.text("wrap.ended_after") in message and golden.text("wrap.three_more_steps") in message
    assert script.worker.stopped and script.worker.mean({"val": 2.0}) == {"val": 2.0}
    script.worker.barrier()
    assert script.worker.finish()
    assert all(torch.equal(end[name], x) for name, x in script.model.state_dict().items())


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_after_the_end_closures_and_forward_passes_change_nothing(cluster, monkeypatch, arguments) -> None:
    join_here(cluster, monkeypatch, *arguments, "--iterations", "3")
    model = nn.Sequential(nn.BatchNorm1d(6), network())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    worker = lsgd.wrap(model, optimizer, steps=6)
    batches = (torch.randn(4, 6) for _ in itertools.count())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        return loss

    states = []
    for _ in range(6):
        optimizer.step(closure)
        states.append({name: x.clone() for name, x in model.state_dict().items()})
    closure()  # a loop that computes gradients before the step
    optimizer.step(lambda: torch.tensor(0.0))
    assert worker.stopped and worker.iterations == 3
    for name, x in model.state_dict().items():
        assert torch.equal(x, states[3][name]), name
    assert not torch.equal(states[3]["0.running_mean"], states[1]["0.running_mean"])
    assert worker.finish()


def scaled_step(model: WithLoss, optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(BATCH)[1]).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    model.zero_grad()


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_after_the_end_a_scaler_steps_two_optimizers_which_change_nothing(cluster, monkeypatch, arguments) -> None:
    join_here(cluster, monkeypatch, *arguments, "--iterations", "3")
    model, scaler = WithLoss(), torch.amp.GradScaler("cpu", init_scale=4.0)
    both = [torch.optim.AdamW(model.inner[index].parameters(), lr=0.05) for index in (0, 2)]
    worker = lsgd.wrap(model, both, steps=6)
    states = []
    for _ in range(6):
        scaled_step(model, both, scaler)
        states.append({name: x.clone() for name, x in model.state_dict().items()})
    assert worker.stopped and worker.iterations == 3 and worker.finish()
    for name, x in model.state_dict().items():
        assert not torch.equal(states[1][name], states[2][name])
        assert all(torch.equal(state[name], x) for state in states[3:]), name


@pytest.mark.parametrize("overflows", [0, 1], ids=["first", "last"])
def test_of_two_optimizers_one_overflows_and_the_scaler_skips_only_that(cluster, monkeypatch, overflows) -> None:
    join_here(cluster, monkeypatch, "--algorithm", "allreduce")
    model, scaler = WithLoss(), torch.amp.GradScaler("cpu", init_scale=4.0)
    both = [torch.optim.SGD(model.inner[index].parameters(), lr=0.05) for index in (0, 2)]
    worker = lsgd.wrap(model, both, steps=5)
    made = []
    for turn in range(6):
        before = [p.clone() for p in model.parameters()]
        overflow = model.inner[2 * overflows].weight.register_hook(lambda g, turn=turn: g / (turn != 2))
        scaled_step(model, both, scaler)
        overflow.remove()
        same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert all(same) if turn == 2 else not any(same)
        made.append(worker.iterations)
    assert made == [1, 2, 2, 3, 4, 5] and scaler.get_scale() == 2.0
    assert worker.finish()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA)


DATA = torch.ones(20, 6)


@pytest.mark.parametrize(("data", "key"), [(DATA, "consumed"), (Stream(), "samples")], ids=["samples", "stream"])
def test_checkpoints_count_only_batches_that_are_trained_on(cluster, monkeypatch, tmp_path, data, key) -> None:
    """The round comes when the next batch is drawn, here in the second pass of five."""
    join_here(cluster, monkeypatch, "--algorithm", "allreduce", "--checkpoint-every", "1")
    script = Script(steps=20, checkpoint_dir=str(tmp_path))
    loader = script.worker.shard(DataLoader(data, batch_size=4))
    for x in itertools.islice(itertools.chain(loader, loader), 8):
        script.step(x)
    script.worker.fails(RuntimeError())
    (run,) = runs(tmp_path)
    assert counts(tmp_path, run, script.worker.name) == [6, 7]
    for count in (6, 7):
        path = checkpoint_path(tmp_path, run, count, script.worker.name)
        (position,) = read(path, *describe(script.model))["loaders"]
        assert (position["state"]["epoch"], position["state"][key]) == (1, 4 * (count - 5))


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_means_and_barriers_over_scripts(cluster, arguments) -> None:
    cluster.start("--workers", "2", *arguments)

    def train(index: int, identity: Identity) -> list[Any]:
        script = Script(steps=12, identity=identity)
        script.worker.barrier()
        means = []
        for step in range(12):
            script.step(BATCH * (1 + index + step))
            if step % 4 == 3:
                script.evaluate()
                means.append(script.worker.mean({"val": torch.tensor(float(step + index)), "nan": float("nan")}))
        assert script.worker.finish() and script.worker.iterations == 12
        assert script.worker.mean({"alone": index}) == {"alone": index}
        return means

    one, two = in_threads(cluster, train)
    assert [mean["val"] for mean in one] == [mean["val"] for mean in two] == [3.5, 7.5, 11.5]
    assert all(mean["nan"] != mean["nan"] for mean in one)


@pytest.mark.parametrize(
    "arguments",
    [("--algorithm", "decentralized"), ("--algorithm", "local", "--period", "2", "--delay", "1")],
    ids=["decentralized", "delayed"],
)
def test_rounds_that_come_in_an_evaluation_in_inference_mode_are_as_others(cluster, arguments) -> None:
    cluster.start("--workers", "2", *arguments)

    def train(index: int, identity: Identity) -> None:
        script = Script(steps=12, identity=identity)
        for step in range(12):
            if step == 4 * (1 + index):
                with torch.inference_mode():
                    script.worker.barrier()  # the first to come takes part in rounds until the other one comes
            script.step(BATCH * (1 + index + step))
        assert script.worker.finish()

    in_threads(cluster, train)


def test_equal_inputs_on_two_workers_are_refused(cluster) -> None:
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "2")

    def train(index: int, identity: Identity) -> str:
        script = Script(steps=1000, identity=identity)
        try:
            for _ in range(1000):
                script.step()
        except JoinError as error:
            script.worker.fails(error)
            return str(error)
        script.worker.finish()
        return ""

    for said in in_threads(cluster, train):
        assert golden.text("wrap.nothing_new") in said


def test_a_loss_is_found_or_reported(script) -> None:
    script.step()
    window = script.worker._steps.rounds.election.losses
    assert len(window.values) == 1
    script.worker.report(7.0)
    script.step()
    assert window.values[1:] == [7.0]


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (lambda loss: loss, True),
        (lambda loss: (BATCH, loss), True),
        (lambda loss: {"logits": BATCH, "loss": loss}, True),
        (lambda loss: SimpleNamespace(loss=loss), True),
        (lambda loss: {"logits": BATCH, "loss": loss.reshape(1)}, True),
        (lambda loss: loss.reshape(1, 1), False),  # what it predicts of a batch of one
        (lambda loss: [BATCH], False),
        (lambda loss: BATCH, False),
        (lambda loss: (BATCH, loss.detach()), False),
        (lambda loss: None, False),
    ],
)
def test_where_a_model_returns_its_loss(output, found) -> None:
    loss = torch.ones((), requires_grad=True) * 3
    got = loss_in(output(loss))
    assert got is None if not found else got.item() == 3 and not got.requires_grad


def test_wrong_arguments_leave_no_hooks(here) -> None:
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(ConfigError, match="accumulate = 0"):
        lsgd.wrap(model, optimizer, accumulate=0)
    with pytest.raises(TypeError):
        lsgd.wrap(model, optimizer, nonsense=1)
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks


def test_batches_takes_the_place_of_the_hooks(script) -> None:
    loader = script.worker.batches([BATCH] * 5)
    assert len(loader) == 5
    for x in loader:
        script.step(x)
    assert script.worker.iterations == 5


def test_a_script_without_finish_is_told_so(here, script, caplog) -> None:
    script.step()
    script.step()
    with caplog.at_level(logging.ERROR, logger="lsgd"):
        script.worker.at_exit()
    (message,) = caplog.messages
    assert golden.text("wrap.no_finish") in message
    assert here.status()["members"][0]["reason"] == LOOP_ENDED, "by which the launcher knows that it left too early"


def test_a_script_that_stops_after_the_end_of_the_run_needs_no_finish(cluster, monkeypatch, caplog) -> None:
    join_here(cluster, monkeypatch, "--iterations", "2")
    script = Script()
    while not script.worker.stopped:
        script.step()
    with caplog.at_level(logging.ERROR, logger="lsgd"):
        script.worker.at_exit()
    assert script.worker.has_consensus and "without worker.finish()" not in caplog.text


def test_the_first_worker_saves_nothing_if_the_others_have_made_the_last_round_without_it(cluster, caplog) -> None:
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "2", "--patience-s", "0.5")
    away, over = Event(), Event()

    def train(index: int, identity: Identity) -> tuple[bool, bool, bool]:
        script = Script(identity=identity)
        with script.worker as worker:
            script.step(BATCH * (1 + index))
            if index:
                assert away.wait(scaled(60.0))
                cluster.ask(StopRun("enough"))
            else:
                worker.pause()
                away.set()
                assert over.wait(scaled(60.0))
            while not worker.stopped:
                script.step(BATCH * (1 + index))
            over.set()
            return worker.has_consensus, worker.first, worker.is_head

    assert in_threads(cluster, train) == [(False, False, True), (True, True, True)]
    assert golden.text("wrap.last_round_without") in caplog.text


def test_errors_that_nothing_handles_set_the_exit_code(script, monkeypatch) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(EvictedError, EvictedError("silent"), None)
    assert ended.value.code == 76
    assert not script.worker._open


class Hour(Clock):
    """The clock of a channel: an hour passes when the servers say that somebody is still in the loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._passed_s = channel, 0.0

    def now(self) -> float:
        if "still in the loop" in self._channel.silence.reason:
            self._passed_s = 3600.0
        return super().now() + self._passed_s


def test_finish_gives_up_after_its_time(cluster, caplog) -> None:
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "2")
    go_on = itertools.count()

    def train(index: int, identity: Identity) -> bool:
        script = Script(steps=10, identity=identity)
        script.worker.barrier()
        script.step(BATCH * (index + 1))
        if index == 0:
            channel = script.worker._channel
            channel._clock = Hour(channel)
            return script.worker.finish(timeout_s=600)
        while script.worker.status()["members"][0]["state"] != "left":
            script.step(BATCH * next(go_on))
        return script.worker.finish()

    assert in_threads(cluster, train) == [False, True]
    assert any(
        golden.text("wrap.leaves_without") in message and golden.text("wrap.still_in_loop") in message
        for message in caplog.messages
    )


def test_torch_distributed_around_a_model_that_is_not_shared_is_refused(monkeypatch) -> None:
    for name, value in (("is_initialized", True), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(ConfigError, match=golden.pattern("wrap.not_shared")):
        Script()


def test_a_loader_of_a_shard_keeps_what_it_was(script) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(96.0))
    batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 8, drop_last=True)
    for options in ({"batch_size": 8, "shuffle": True, "drop_last": True}, {"batch_sampler": batches}):
        shard = script.worker.shard(torch.utils.data.DataLoader(data, **options))
        passes = [torch.cat([x for (x,) in shard]) for _ in range(2)]
        assert len(shard) == 12 and not torch.equal(*passes) and set(passes[0].tolist()) == set(range(96))
        assert not torch.equal(passes[0], passes[0].sort().values) and shard.batch_size == 8 and shard.drop_last
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(96), 48)
    assert len(script.worker.shard(torch.utils.data.DataLoader(data, batch_size=8, sampler=weighted))) == 6
    stream = script.worker.shard(torch.utils.data.DataLoader(Stream(), batch_size=5))
    assert [len(batch) for batch in stream] == [5, 5]


@pytest.mark.parametrize("arguments", ALGORITHMS)
def test_a_step_that_fails_may_be_left_out(cluster, monkeypatch, arguments) -> None:
    join_here(cluster, monkeypatch, *arguments)
    script, calls = Script(steps=5), itertools.count(1)

    def scarce(*_: object) -> None:
        if next(calls) == 3:
            raise MemoryError

    script.optimizer.register_step_pre_hook(scarce)
    with script.worker:
        for _ in range(6):
            with suppress(MemoryError):
                script.step()
            script.optimizer.zero_grad()
        assert script.worker.finish() and script.worker.iterations == 5


def test_a_copy_of_the_model_that_is_made_later_does_not_drive_the_worker(script) -> None:
    """As the teacher of self-supervised training, which sees two views of each batch."""
    teacher = copy.deepcopy(script.model)
    for number in range(1, 5):
        with torch.no_grad():
            for _ in range(2):
                teacher.train(number % 2 == 0)(BATCH)
        assert number == 1 or script.state() != "away"  # it is until it asks for its first iteration
        script.step()
        assert script.worker.iterations == number
    teacher(BATCH)
    script.step()
    assert script.worker.iterations == 5
    with torch.no_grad():
        for _ in range(10):
            teacher(BATCH)
    assert script.state() == "away"  # that is an evaluation


def test_a_shard_of_a_shard_is_one_of_the_whole(cluster) -> None:
    """As where a script calls ``loader = worker.shard(loader)`` in each epoch."""
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "8")
    data = torch.utils.data.TensorDataset(torch.arange(24.0))
    samplers = {"shuffle": {"shuffle": True}, "own": {"sampler": torch.utils.data.SubsetRandomSampler(range(24))}}

    def train(index: int, identity: Identity) -> dict[str, list[float]]:
        script, seen = Script(steps=2, identity=identity), dict[str, list[float]]()
        worker = script.worker
        loaders = {name: torch.utils.data.DataLoader(data, batch_size=4, **own) for name, own in samplers.items()}
        for name, loader in loaders.items():
            again = worker.shard(worker.shard(loader))
            seen[name] = [x for (batch,) in again for x in batch.tolist()]
        part = worker.shard(Stream())
        assert worker.shard(part) is part
        seen["stream"] = [float(x) for batch in worker.loader(part, batch_size=5) for x in batch.flatten()]
        with pytest.raises(ConfigError, match=golden.pattern("wrap.use_shard")):
            worker.loader(loaders["own"])
        for _ in range(2):
            script.step()
        assert worker.finish()
        return seen

    one, other = in_threads(cluster, train)
    assert len(one["own"]) == len(other["own"]) == 12
    for name, count in (("shuffle", 24), ("stream", 10)):
        assert len(one[name]) == len(other[name]) and {*one[name], *other[name]} == {*range(count)}


def test_an_epoch_is_no_longer_for_those_who_train_while_another_evaluates(cluster) -> None:
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "8")
    away, begun = Event(), Event()
    data = torch.utils.data.TensorDataset(torch.randn(192, 6))

    def train(index: int, identity: Identity) -> list[int]:
        script = Script(steps=36, identity=identity)
        loader = script.worker.shard(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
        lengths = []
        for epoch in range(3):
            for step, (x,) in enumerate(loader):
                if index and (epoch, step) == (0, 10):
                    assert away.wait(scaled(30))  # and makes rounds alone from here on
                if index and epoch:
                    begun.set()
                script.step(x)
            lengths.append(step + 1)
            script.evaluate()
            if not (index or epoch):
                away.set()
                assert begun.wait(scaled(30))
        assert script.worker.finish() and script.worker.step == 36
        return lengths

    assert in_threads(cluster, train) == [[12, 12, 12]] * 2


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


LOADERS = {
    "shuffled": lambda worker: worker.shard(DataLoader(DATA, batch_size=4, shuffle=True)),
    "own sampler": lambda worker: worker.shard(DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler(range(20)))),
    "own batches": lambda worker: worker.shard(
        DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(20)), 4, drop_last=False))
    ),
    "made anew": lambda worker: again(worker.shard(DataLoader(DATA, batch_size=4, shuffle=True))),
    "stream": lambda worker: worker.shard(DataLoader(Ones(), batch_size=4)),
    "part of a stream": lambda worker: DataLoader(worker.shard(Ones()), batch_size=4),
    "loader": lambda worker: worker.loader(DATA, batch_size=4),
}


class Ones(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA)


def again(loader: DataLoader) -> DataLoader:
    """Return a loader that has another one's sampler, as accelerate makes one."""
    return DataLoader(loader.dataset, batch_size=4, sampler=loader.sampler)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_passes_over_a_workers_data_end_with_the_run(cluster, monkeypatch, kind) -> None:
    join_here(cluster, monkeypatch, "--iterations", "8")
    script = Script(steps=1000)
    loader = LOADERS[kind](script.worker)
    passes = [sum(script.step(x) is None for x in loader) for _ in range(4)]
    assert passes == [5, 3, 0, 0] and script.worker.stopped and script.worker.step == 8
    if kind == "shuffled":
        assert loader.state_dict() | {"seed": 0} == {"epoch": 1, "consumed": 12, "seed": 0}
    assert script.worker.finish()


def test_a_loop_that_begins_passes_forever_is_ended(cluster, monkeypatch) -> None:
    join_here(cluster, monkeypatch, "--iterations", "8")
    script = Script(steps=1000)
    loader = script.worker.shard(DataLoader(DATA, batch_size=4))
    with pytest.raises(LsgdError, match=golden.pattern("wrap.many_passes")):
        while script.worker.step < script.worker.steps:
            for x in loader:
                script.step(x)
    assert script.worker.finish()
