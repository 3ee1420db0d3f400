"""Float64 NumPy references of the algorithms, and the drivers of their tests. Imports nothing from lsgd.

Workers minimize a least-squares loss, each on rows of its own, with SGD and momentum. A *script* says who steps and
who exchanges when; the reference and the simulated workers of lsgd follow the same one.
"""

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray

ROWS, FEATURES, BATCH = 96, 24, 8


@dataclass
class Problem:
    """Least squares: each worker has rows of its own, with a solution a little different from the others'."""

    workers: int
    seed: int = 0
    features: Array = field(init=False)
    targets: Array = field(init=False)
    start: Array = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.features = rng.normal(size=(self.workers, ROWS, FEATURES)).astype(np.float32)
        solutions = rng.normal(size=FEATURES) + 0.3 * rng.normal(size=(self.workers, FEATURES))
        noise = 0.1 * rng.normal(size=(self.workers, ROWS))
        self.targets = (np.einsum("wrf,wf->wr", self.features, solutions) + noise).astype(np.float32)
        self.start = rng.normal(size=FEATURES).astype(np.float32)

    def batch(self, rank: int, step: int) -> tuple[Array, Array]:
        """Rows of the worker's batch number ``step``: shapes (BATCH, FEATURES) and (BATCH,)."""
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % ROWS
        return self.features[rank][rows], self.targets[rank][rows]

    def loss_and_gradient(self, x: Array, rank: int, step: int) -> tuple[float, Array]:
        a, b = (part.astype(np.float64) for part in self.batch(rank, step))
        residual = a @ x - b
        return float(np.mean(residual**2)), 2 / BATCH * a.T @ residual


@dataclass
class Worker:
    """A model with SGD and momentum (v ← μ v + g; x ← x - lr v), in float64."""

    problem: Problem
    rank: int
    lr: float = 0.02
    momentum: float = 0.9
    steps: int = 0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.x = self.problem.start.astype(np.float64)
        self.velocity = np.zeros_like(self.x)

    def gradient(self) -> Array:
        loss, gradient = self.problem.loss_and_gradient(self.x, self.rank, self.steps)
        self.losses.append(loss)
        return gradient

    def apply(self, gradient: Array) -> None:
        self.velocity = self.momentum * self.velocity + gradient
        self.x = self.x - self.lr * self.velocity
        self.steps += 1

    def windowed_loss(self, window: int) -> float:
        return float(np.mean(self.losses[-window:])) if self.losses else np.inf


@dataclass(frozen=True)
class Exchange:
    """One round of a script: ``node`` is None for a global one; ``leaders`` has a rank for each node, or -1."""

    node: int | None
    leader: int
    leaders: tuple[int, ...]
    exchanges: int


def nodes_of(node_sizes) -> list[list[int]]:
    """Ranks of each node."""
    ends = np.cumsum(node_sizes)
    return [list(range(end - size, end)) for end, size in zip(ends, node_sizes, strict=True)]


class LeaderReference:
    """Leader SGD of arXiv 1905.10395 in float64, with a driver that counts iterations by tokens.

    Workers step in a random order at speeds of their own. ``script[rank]`` lists, for each iteration of a worker, the
    rounds before it (none, or one).
    """

    def __init__(self, problem, node_sizes, *, period, local_period, c1, c2, p1, p2, seed=0, speeds=None, **sgd):
        self.nodes = nodes_of(node_sizes)
        self.period, self.local_period = period, local_period
        self.c1, self.c2, self.p1, self.p2 = c1, c2, p1, p2
        self.two_levels = len(self.nodes) > 1 and local_period < period
        self.workers = [Worker(problem, rank, **sgd) for rank in range(sum(node_sizes))]
        self.z_global = problem.start.astype(np.float64)
        self.z_local = [self.z_global.copy() for _ in self.nodes]
        self.script: list[list[Exchange | None]] = [[] for _ in self.workers]
        self.rounds: list[Exchange] = []
        self.global_rounds = 0
        self._rng = np.random.default_rng(seed)
        self._speeds = np.asarray(speeds if speeds is not None else np.ones(len(self.workers)), float)

    def run(self, steps: int) -> None:
        """Make ``steps`` iterations per worker on average, and those that belong to a round that has begun."""
        everyone = list(range(len(self.workers)))
        left, run_tokens, node_tokens = steps * len(everyone), 0, [0] * len(self.nodes)
        granted: dict[int, Exchange | None] = {}  # workers that have tokens for their next iteration, and its round
        while left > 0 or granted:
            for index, node in enumerate(self.nodes) if left > 0 else ():
                if self._due(node, run_tokens, node_tokens[index], granted):
                    granted |= dict.fromkeys(node, self._local_round(index))
                    node_tokens[index] = self._fill(node)
                    run_tokens -= len(node)
            able = [r for r in everyone if r in granted or (run_tokens and node_tokens[self._node(r)])]
            if not able:
                granted = dict.fromkeys(everyone, self._global_round())
                run_tokens = (self.period - 1) * len(everyone)
                node_tokens = [self._fill(node) for node in self.nodes]
                able = everyone
            able = able if left > 0 else list(granted)
            share = self._speeds[able] / self._speeds[able].sum()
            rank = int(self._rng.choice(able, p=share))
            if rank not in granted:
                run_tokens -= 1
                node_tokens[self._node(rank)] -= 1
            self.script[rank].append(granted.pop(rank, None))
            self._step(rank)
            left -= 1

    def _due(self, node, run_tokens, node_tokens, granted):
        """Whether a local round starts: its members all wait, their queue is empty, the run's has enough."""
        waits = node_tokens == 0 and not any(rank in granted for rank in node)
        return self.two_levels and waits and run_tokens >= self.local_period * len(node)

    def _fill(self, node):
        """Tokens of a node after each of its members has taken one."""
        return ((self.local_period if self.two_levels else self.period) - 1) * len(node)

    def _node(self, rank):
        return next(i for i, node in enumerate(self.nodes) if rank in node)

    def _elect(self, ranks):
        window = self.local_period
        return min(ranks, key=lambda r: (self.workers[r].windowed_loss(window), r))

    def _local_round(self, index):
        leader = self._elect(self.nodes[index])
        leaders = tuple(leader if i == index else -1 for i in range(len(self.nodes)))
        self._pull_local(index, leader)
        self.rounds.append(Exchange(index, leader, leaders, self.global_rounds))
        return self.rounds[-1]

    def _global_round(self):
        leaders = tuple(self._elect(node) for node in self.nodes)
        leader = self._elect(range(len(self.workers)))
        if self.two_levels:
            for index, rank in enumerate(leaders):
                self._pull_local(index, rank)
        self.z_global = self.workers[leader].x.copy()
        for worker in self.workers:
            worker.x = (1 - self.c2) * worker.x + self.c2 * self.z_global
        self.rounds.append(Exchange(None, leader, leaders, self.global_rounds))
        self.global_rounds += 1
        return self.rounds[-1]

    def _pull_local(self, index, leader):
        self.z_local[index] = self.workers[leader].x.copy()
        for rank in self.nodes[index]:
            worker = self.workers[rank]
            worker.x = (1 - self.c1) * worker.x + self.c1 * self.z_local[index]

    def _step(self, rank):
        worker = self.workers[rank]
        worker.apply(worker.gradient())
        pull = self.p2 / self.period
        worker.x = (1 - pull) * worker.x + pull * self.z_global
        if self.two_levels:
            pull = self.p1 / self.local_period
            worker.x = (1 - pull) * worker.x + pull * self.z_local[self._node(rank)]


@dataclass(frozen=True)
class Decoded:
    """What a payload of 8-bit codes says (the table in docs/concepts/kernels.md): values, and the unit of each."""

    values: Array
    units: Array
    finite: bool


def decode(payload: Array) -> Decoded:
    """Decode a payload (uint8): header of 32 bytes, (lo, unit) of each block in float32, then codes."""
    numel, block, flags = (
        int(payload[a:b].view(t)[0]) for a, b, t in ((8, 16, "<u8"), (16, 20, "<u4"), (20, 24, "<u4"))
    )
    blocks = -(-numel // (block or max(numel, 1)))
    scales = payload[32 : 32 + 8 * blocks].view("<f4").astype(np.float64).reshape(blocks, 2)
    start = 32 + -(-8 * blocks // 16) * 16
    codes = payload[start : start + numel].astype(np.float64)
    of = np.arange(numel) // (block or max(numel, 1))
    return Decoded(scales[of, 0] + codes * scales[of, 1], scales[of, 1], not flags)


def close_to(decoded: Decoded, exact: Array, rounding: str, slack: float = 1e-5) -> bool:
    """Whether ``decoded`` is ``exact`` rounded: within half a unit (nearest) or one (stochastic)."""
    bound = decoded.units * (0.5 if rounding == "nearest" else 1.0) + slack * (1 + np.abs(exact).max(initial=0))
    return bool((np.abs(decoded.values - exact) <= bound).all())
