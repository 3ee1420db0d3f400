"""What a GPU must not wait for, shown without one: who looks at a tensor, and what is copied to host memory."""

import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lsgd.algorithms.base import Commit
from lsgd.algorithms.bytegrad import ByteGradSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.algorithms.outliers import SUMS
from lsgd.client import Worker
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.settings import AlgorithmSettings
from lsgd.testing.simulation import SimulatedGroup, simulate
from scripts.link_table import variants

from ..lsgd.training import make_round
from .meshes import all_at_once, members
from .test_staging import AtOnce, AtTheEnd

LOOKS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
NODES = (2, 1)

_ONE_AT_A_TIME = threading.RLock()
"""torch crashes now and then when several threads look up an operator in Python for the first time."""


class Looks(TorchDispatchMode):
    """Notes each call of this thread that needs an element of a tensor, and so would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._lists = Lists(self.found)

    def __enter__(self) -> "Looks":
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in LOOKS:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """Notes ``tolist``, which torch does not dispatch."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.tolist:
            self._found.append("tolist")
        with _ONE_AT_A_TIME:
            return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_tensor_is_on_the_host(monkeypatch) -> None:
    for module in ("algorithms", "codecs"):
        monkeypatch.setattr(f"lsgd.{module}.base.on_host", lambda x: False)


@pytest.mark.parametrize(
    "read", [Tensor.tolist, Tensor.item, bool, float, int, lambda x: x.nonzero(), lambda x: 1 if x > 0 else 2]
)
def test_each_way_to_look_is_noted(read: Callable[[Tensor], object]) -> None:
    with Looks() as looks:
        read(torch.ones(1) + 1)
    assert len(looks.found) == 1


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("name", "settings"), [*variants()])
def test_nothing_looks_at_a_tensor_before_the_round_commits(
    name: str, settings: AlgorithmSettings, broken: bool
) -> None:
    """And the commit looks once. A model that is not finite makes no difference, and is healed."""

    def work(group: SimulatedGroup) -> Tensor:
        x, gradient = torch.linspace(-1, 1, 3000) * (group.rank + 1), torch.ones(3000)
        algorithm = settings.create([x], "run")
        algorithm.reset([x], group, make_round(NODES, 1))
        with torch.no_grad():
            for number in range(1, 4):
                x += 0.01 * torch.arange(3000) * group.rank
                if broken and number == 2 and group.rank == 1:
                    x[5] = torch.nan
                order = make_round(NODES, number)
                with Looks() as looks:
                    commit = algorithm.before_forward([x], group, order)
                    commit = commit or algorithm.after_backward([x], [gradient], group, order)
                assert looks.found == []
                assert isinstance(commit, Commit)
                with Looks() as looks:
                    numbers = commit.numbers()
                assert looks.found in ([], ["tolist"])
                commit.apply(numbers)
        return x

    for x in simulate(NODES, work):
        assert x.isfinite().all() or settings.schedule().identical  # which exchanges gradients


DELAYED = [
    ("`local`, delayed", LocalSettings(period=4, fragments=2, delay=1, outer_momentum=0.5)),
    ("`leader`, delayed", LeaderSettings(4, 2, delay=1, compression="minmax8", proximal_global=0.0)),
    ("`bytegrad`, with its errors", ByteGradSettings(error_feedback=True)),
]


@pytest.mark.parametrize("judged", [0.0, 1.0])
@pytest.mark.parametrize(("name", "settings"), [*variants(), *DELAYED])
def test_a_round_stays_on_the_device_of_the_model(name: str, settings: AlgorithmSettings, judged: float) -> None:
    """Tensors without elements are in a GPU's place: one of the host does not mix with them, and nobody can look."""

    def make(commit: Commit | None) -> None:
        if commit is not None:
            numbers = ([judged] * x.numel() if isinstance(x, Tensor) else [float(x)] for x in commit.judged)
            commit.apply([*chain.from_iterable(numbers)])

    def work(group: SimulatedGroup) -> None:
        x, gradient = (torch.ones(3000, device="meta") for _ in range(2))
        algorithm = settings.create([x], "run")
        algorithm.reset([x], group, make_round(NODES, 1))
        for number in range(1, 4):
            make(algorithm.settle([x]))
            order = make_round(NODES, number)
            commit = algorithm.before_forward([x], group, order)
            make(commit or algorithm.after_backward([x], [gradient], group, order))
            for _ in range(2):
                make(algorithm.after_step([x]))
        make(algorithm.settle([x]))
        assert {each.device.type for each in algorithm.shared_state()} <= {"meta"}

    simulate(NODES, work)


def test_only_payloads_are_copied_to_host_memory_and_back() -> None:
    """In 2 bits, a sixteenth of the model: it is encoded and decoded where it is."""
    settings, numel = LocalSettings(period=4), 100_000
    copiers = [AtOnce(), AtTheEnd()]
    groups, _ = members(2, [b""] * 2, copiers=copiers)

    def work(group: TcpGroup) -> Tensor:
        x = torch.zeros(numel)
        algorithm = settings.create([x], "run")
        order = make_round((1, 1), 1)
        algorithm.reset([x], group, order)
        x += torch.linspace(0, group.rank + 1, numel)
        commit = algorithm.before_forward([x], group, order)
        assert commit is not None
        commit.apply()
        return x

    first, second = all_at_once(groups, work)
    assert first.equal(second)
    payload = settings.make_codec().empty(numel, torch.device("cpu")).nbytes
    measured = SUMS * 8
    assert payload < 4 * numel / 14
    assert [copier.copied_nbytes for copier in copiers] == [2 * (payload + measured)] * 2


def test_a_step_without_a_round_looks_at_no_tensor(monkeypatch, tmp_path) -> None:
    """With a loss that is still on its way to the host, and an algorithm that pulls in every step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LSGD_ALGORITHM", "leader")
    monkeypatch.setenv("LSGD_PERIOD", "1024")
    monkeypatch.setenv("LSGD_LOCAL_PERIOD", "1024")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, steps = torch.ones(4, 8), 0
    with Worker.join(model, optimizer) as worker:
        window, rounds = worker._steps.rounds.election.losses, worker._steps.rounds
        monkeypatch.setattr(window, "_copiers", lambda device: AtTheEnd())
        assert worker.begin_step()
        while steps < 40:
            before = rounds.last.committed
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            with Looks() as looks:
                worker.report(loss)
                assert worker.end_step()
                assert worker.begin_step()
            optimizer.step()
            if rounds.last.committed == before:
                assert looks.found == []
                steps += 1
        assert len(window._pending) >= 40
        assert window.mean() is None
