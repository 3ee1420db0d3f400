"""Part 4: a GPT-2 on two workers that share the device, between hosts of the testbed and on loopback."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.gpu.cases import Case, Finding, NotHereError, Part, Setup, in_folder
from benchmarks.methods import ALONE
from benchmarks.testbed import LINKS, Host, Testbed, TestbedError
from benchmarks.testbed.launch import PORT, await_all, free_port, launch_command, start
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings
from lsgd.settings import AlgorithmSettings

WORKERS = 2
LINKS_TRIED = ("1gbit-1ms", "100mbit-20ms")
LOOPBACK = "loopback"
DDP_PORT = 47600
DDP_STEPS = {"1gbit-1ms": 4, "100mbit-20ms": 1, LOOPBACK: 4}
"""That are measured, of the whole model: a step sends all of it. In small as many as with the others."""

MEGA = 1e6


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Args:
        size: name of the model's.
        steps: that are measured.
        warm_up: steps before those, without an exchange, of a model that is not kept.
        period: of the methods that have one; they hide an exchange behind half as many steps.
    """

    size: str
    steps: int
    warm_up: int
    period: int


WHOLE, SMALL = Scale("gpt2", 100, 10, 32), Scale("small", 16, 2, 8)


def part(setup: Setup) -> Part:
    """Return part 4."""
    scale = SMALL if setup.small else WHOLE
    alone = "two workers without an exchange"
    cases = [Case(alone, partial(_baseline, setup, scale, alone, ALONE, LOOPBACK))]
    cases.append(Case("`local` in 2 bits on loopback, profiled", partial(_profiled, setup, scale)))
    links, obstacle = _links()
    if obstacle:
        cases.append(Case("between network namespaces", partial(_refused, obstacle)))
    for link in links:
        for name, settings in _methods(scale.period).items():
            what = f"{name}, {link}"
            cases.append(Case(what, partial(_ours, setup, scale, what, settings, link)))
        what = f"DistributedDataParallel over Gloo, {link}"
        steps = scale.steps if setup.small else DDP_STEPS[link]
        cases.append(Case(what, partial(_baseline, setup, replace(scale, steps=steps), what, "ddp", link)))
    if setup.small:
        cases.append(
            Case(
                "GPT-2 of 124 million parameters on a GPU",
                partial(_baseline, setup, WHOLE, "", ALONE, LOOPBACK),
                needs_gpu=True,
            )
        )
    return Part(4, "GPT-2: milliseconds a step, and memory of a worker", 270.0, cases)


def _links() -> tuple[Sequence[str], str]:
    """Return the links to try: loopback where there can be no testbed, and the reason."""
    try:
        with Testbed(WORKERS, rate_mbit=1000.0, delay_ms=1.0):
            return LINKS_TRIED, ""
    except TestbedError as error:
        return (LOOPBACK,), str(error)


def _refused(obstacle: str, left_s: float) -> list[Finding]:
    raise NotHereError(f"{obstacle}; what follows is on {LOOPBACK}")


def _methods(period: int) -> dict[str, AlgorithmSettings]:
    """Return what is measured on each link."""
    return {
        "`local` in 2 bits with delay": LocalSettings(period=period, compression="levels2", delay=period // 2),
        "`leader` in 8 bits with delay": LeaderSettings(period, period, compression="minmax8", delay=period // 2),
    }


def _measured(what: str, notes: Path) -> Finding:
    """Return what the workers have measured."""
    found = [json.loads((notes / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    step_ms = 1e3 * max(each["step_s"] for each in found)
    memory_mb = max(each["memory_nbytes"] for each in found) / MEGA
    figures = {"step_ms": step_ms, "memory_mb": memory_mb}
    return Finding(what, "passed", f"{step_ms:,.1f} ms, {memory_mb:,.0f} MB", figures=figures)


def _ours(
    setup: Setup,
    scale: Scale,
    what: str,
    settings: AlgorithmSettings,
    link: str,
    left_s: float,
    more: Sequence[str] = (),
    look: Callable[[Path], list[Finding]] = lambda notes: [],
) -> list[Finding]:
    """Train by one of lsgd's methods; ``look`` finds more in what the workers have noted."""
    with in_folder(setup, what) as folder, _network(link) as network:
        plan = folder / "plan.toml"
        run = RunSettings(workers=WORKERS, checkpoint_every_s=0.0)
        plan.write_text(Plan(run, (Phase(settings),)).to_toml())
        port = PORT if network.testbed else free_port()
        command = [sys.executable, "-m", "benchmarks.gpu.gpt_worker", *_given(scale, folder), *more]
        processes = []
        for node, host in enumerate(network.hosts):
            place = (node, WORKERS, network.addresses[0], 1, plan, folder / f"node{node}")
            launch = launch_command(*place, port=port, device=setup.gpu)
            processes.append(start([*launch, "--insecure", "--", *command], host))
        await_all(processes, what, left_s, partial(network.attend, folder))
        return [_measured(what, folder), *look(folder)]


def _profiled(setup: Setup, scale: Scale, left_s: float) -> list[Finding]:
    what = f"`local` in 2 bits, {LOOPBACK}"
    settings = LocalSettings(period=scale.period, compression="levels2")
    return _ours(setup, scale, what, settings, LOOPBACK, left_s, ["--profile"], partial(_waits, setup))


def _waits(setup: Setup, notes: Path) -> list[Finding]:
    """Return the finding of the profile: a step without a round must not wait for the GPU."""
    what = "calls that wait for the GPU in steps without a round"
    found = [json.loads((notes / f"{rank}.profile").read_text()) for rank in range(WORKERS)]
    steps = sum(each["steps"] for each in found)
    waiting = [f"{count} x {call}" for each in found for call, count in each["waiting"].items()]
    if setup.small:
        return [Finding(what, "needs a GPU")]
    measured = f"{', '.join(waiting) or 'none'} in {steps} steps"
    why = "" if steps else "each step that was profiled had a round"
    return [Finding(what, "passed" if steps and not waiting else "failed", measured, "none", why, {"steps": steps})]


def _baseline(setup: Setup, scale: Scale, what: str, method: str, link: str, left_s: float) -> list[Finding]:
    """Train by one of the baselines."""
    with in_folder(setup, what) as folder, _network(link) as network:
        port = DDP_PORT if network.testbed else free_port()
        command = [sys.executable, "-m", "benchmarks.gpu.gpt_baseline", *_given(scale, folder)]
        command += [f"--method={method}", f"--period={scale.period}", f"--port={port}", f"--device={setup.gpu}"]
        command += ["--addresses", *network.addresses]
        processes = [start([*command, f"--rank={rank}"], host) for rank, host in enumerate(network.hosts)]
        await_all(processes, what, left_s, partial(network.attend, folder))
        return [_measured(what, folder)]


def _given(scale: Scale, notes: Path) -> list[str]:
    return [f"--size={scale.size}", f"--steps={scale.steps}", f"--warm-up={scale.warm_up}", f"--notes={notes}"]


class _Network:
    """Where the workers are, and a link that is limited while they are measured: from when both are ready."""

    def __init__(self, testbed: Testbed | None, rate_mbit: float | None) -> None:
        self.testbed, self._rate_mbit = testbed, rate_mbit
        self.hosts: list[Host | None] = [*testbed.hosts] if testbed else [None] * WORKERS
        self.addresses = [host.address if host else "127.0.0.1" for host in self.hosts]
        self._limited: bool | None = None

    def attend(self, notes: Path) -> None:
        """Begin when all workers are ready, and lift the limit when all have measured."""
        if self._limited is None and all((notes / f"{rank}.ready").exists() for rank in range(WORKERS)):
            self._limit(self._rate_mbit)
            (notes / "go").touch()
        if self._limited and all((notes / f"{rank}.json").exists() for rank in range(WORKERS)):
            self._limit(None)

    def _limit(self, rate_mbit: float | None) -> None:
        self._limited = rate_mbit is not None
        if self.testbed:
            self.testbed.set_rate(rate_mbit)


@contextlib.contextmanager
def _network(link: str) -> Iterator[_Network]:
    """Make a testbed whose link is not limited yet."""
    if link == LOOPBACK:
        yield _Network(None, None)
        return
    rate_mbit, delay_ms = LINKS[link]
    with Testbed(WORKERS, delay_ms=delay_ms) as testbed:
        yield _Network(testbed, rate_mbit)
