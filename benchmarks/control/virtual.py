"""What the coordinator costs in virtual time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.control.simulation import WORKERS_PER_NODE, Simulation, percentile

GROWTH_WORKERS, GROWTH_ROUNDS = 100, 5


@dataclass(frozen=True)
class Simulated:
    """What the coordinator computed for a whole run."""

    workers: int
    nodes: int
    iterations: int
    killed: int
    rounds_global: int
    rounds_local: int
    decision_p50_us: float
    decision_p99_us: float
    decision_mean_us: float
    tick_mean_us: float
    opening_decided_s: float
    opening_encoded_s: float
    opening_longest_s: float
    global_round_mb: float
    same_members_round_mb: float
    local_round_mb: float
    messages_per_iteration: float

    columns: ClassVar = (
        *("workers", "nodes", "iterations", "killed", "global rounds", "local rounds"),
        *("decision µs: median", "99 %", "mean", "tick µs"),
        *("a round opens: s deciding", "encoding", "longest"),
        *("MB a global round", "of the same members", "MB a local round", "messages an iteration"),
    )

    def cells(self) -> Sequence[str]:
        """Return it as a line of the table."""
        return (
            *(f"{self.workers:,}", f"{self.nodes:,}", f"{self.iterations:,}", str(self.killed)),
            *(str(self.rounds_global), f"{self.rounds_local:,}"),
            *(f"{self.decision_p50_us:.1f}", f"{self.decision_p99_us:.1f}", f"{self.decision_mean_us:.1f}"),
            *(f"{self.tick_mean_us:.0f}", f"{self.opening_decided_s:.3f}"),
            *(f"{self.opening_encoded_s:.3f}", f"{self.opening_longest_s:.3f}"),
            *(f"{self.global_round_mb:.3f}", f"{self.same_members_round_mb:.3f}"),
            f"{self.local_round_mb:.3f}",
            f"{self.messages_per_iteration:.2f}",
        )


@dataclass(frozen=True)
class Growth:
    """What a worker said and heard in a period."""

    lookahead: int
    period: int
    messages_per_period: float
    virtual_seconds_per_iteration: float

    columns: ClassVar = (
        *("lookahead", "period", "messages of a worker in a period", "for each iteration"),
        "ms an iteration",
    )

    def cells(self) -> Sequence[str]:
        """Return it as a line of the table."""
        each = f"{self.messages_per_period / self.period:.2f}"
        counted = (str(self.lookahead), str(self.period), f"{self.messages_per_period:.1f}", each)
        return (*counted, f"{self.virtual_seconds_per_iteration * 1e3:.1f}")


def simulate(workers: int, iterations: int, failures: int) -> Simulated:
    """Run the coordinator in virtual time."""
    simulation = Simulation(workers, iterations, failures)
    counts = simulation.run()
    local, of_all = counts.round_nbytes["local"], counts.round_nbytes["global"]
    made = simulation.state.ledger.count
    return Simulated(
        workers=workers,
        nodes=-(-workers // WORKERS_PER_NODE),
        iterations=made,
        killed=counts.killed,
        rounds_global=len(of_all),
        rounds_local=len(local),
        decision_p50_us=percentile(counts.decisions_s, 0.5) * 1e6,
        decision_p99_us=percentile(counts.decisions_s, 0.99) * 1e6,
        decision_mean_us=statistics.mean(counts.decisions_s) * 1e6,
        tick_mean_us=statistics.mean(counts.ticks_s) * 1e6,
        opening_decided_s=statistics.median(decided_s for decided_s, _ in counts.openings_s),
        opening_encoded_s=statistics.median(encoded_s for _, encoded_s in counts.openings_s),
        opening_longest_s=max(map(sum, counts.openings_s)),
        global_round_mb=max(of_all) / 1e6,
        same_members_round_mb=min(of_all) / 1e6,
        local_round_mb=max(local, default=0) / 1e6,
        messages_per_iteration=(counts.upward + counts.downward) / made,
    )


def measure_growth(period: int, lookahead: int) -> Growth:
    """Count the messages of a run of five periods in virtual time."""
    iterations = GROWTH_ROUNDS * period
    simulation = Simulation(
        GROWTH_WORKERS, iterations, 0, period=period, local_period=period, lookahead=lookahead, stragglers=0.0
    )
    counts = simulation.run()
    said = counts.upward - counts.heartbeats + counts.downward
    return Growth(lookahead, period, said / GROWTH_WORKERS / GROWTH_ROUNDS, simulation.now / iterations)
