"""The settings of a run."""

from dataclasses import dataclass

from lsgd.errors import ConfigError
from lsgd.settings import AlgorithmSettings, nearest, setting

TRANSPORTS = ("auto", "tcp", "nccl")

LENGTH_SETTINGS = ("iterations", "seconds")
"""Settings that may change during a run, at once."""


def _is_transport(value: str) -> None:
    if value == "gloo":
        raise ConfigError("lsgd no longer exchanges over Gloo; use tcp, its own connections, or auto")
    if value not in TRANSPORTS:
        raise ConfigError(nearest(value, TRANSPORTS))


@dataclass(frozen=True)
class RunSettings:
    """How long the run is, who takes part, and the time limits."""

    workers: int = setting(
        0, "the run starts when this many workers have joined; 0: when those of all nodes have", low=0, high=100_000
    )
    nodes: int = setting(1, "of how many nodes the run waits for all workers, if workers is 0", low=1, high=100_000)
    iterations: int = setting(0, "end after this many iterations, of all workers together; 0: no limit", low=0)
    seconds: float = setting(0.0, "end this long after the first round has begun; 0: no limit", low=0)
    transport: str = setting(
        "auto",
        "what carries tensors; auto: nccl inside nodes where each worker has a GPU of its own, and tcp elsewhere",
        choices=TRANSPORTS,
        valid=_is_transport,
    )
    offload: bool = setting(
        False,
        "exchange models from the CPU's memory, and keep there all that an algorithm keeps: none of it is on the GPU",
    )
    buffers: str = setting(
        "average",
        "what a global round does with floating-point buffers (batch-norm statistics)",
        choices=("average", "keep", "leader"),
    )
    consensus: str = setting(
        "average",
        "the model at the end: the average, or that of the last round's leader",
        choices=("average", "leader"),
    )
    join_pause_s: float = setting(
        2.0,
        "how long a round may wait for what a newcomer downloads, in seconds; local, diloco and sparse without delay",
        low=0.1,
        high=86_400,
    )
    sync_optimizer: bool = setting(False, "newcomers take over the optimizer's state too")
    own_noise: bool = setting(
        True,
        "from the join on each worker draws random numbers of its own (dropout, augmentation); false: as its script "
        "has seeded them",
    )
    loss_window: int = setting(
        0,
        "batches over which the reported loss is averaged; 0: the algorithm's local period",
        low=0,
    )
    checkpoint_every: int = setting(
        0,
        "global rounds between two checkpoints of a worker; 0: by checkpoint_every_s only",
        low=0,
    )
    checkpoint_every_s: float = setting(
        600.0,
        "a checkpoint at the first global round this long after the last one, the first after a minute at most; 0: by "
        "checkpoint_every only",
        low=0,
    )
    exchange_timeout_s: float = setting(
        60.0,
        "an exchange fails if a connection moves no byte for this long; among several nodes, those inside one may",
        low=0.1,
        high=86_400,
    )
    join_timeout_s: float = setting(
        600.0, "how long a worker that has joined waits for the others", low=1, high=864_000
    )
    lease_s: float = setting(
        15.0, "a worker whose process has been silent for this long is evicted", low=1, high=864_000
    )
    patience_s: float = setting(
        120.0,
        "a round that all others have waited for this long starts without the straggler; 0: never",
        low=0,
        high=864_000,
    )
    server_timeout_s: float = setting(
        300.0, "how long a worker waits while its servers are silent", low=1, high=864_000
    )
    failover: str = setting(
        "auto",
        "what happens when node 0 is gone for good; auto: another node serves the run, except where a scheduler "
        "starts nodes again; off: the others save checkpoints and stop",
        choices=("auto", "off"),
    )
    restart_from_scratch: bool = setting(
        False,
        "start over, instead of failing, if all workers and checkpoints with the run's model are lost",
    )
    lookahead: int = setting(
        1,
        "iterations that a worker asks for in advance, so that it need not wait for answers; 0: none",
        low=0,
        high=1 << 20,
    )

    @property
    def has_end(self) -> bool:
        """Whether these settings end the run; otherwise the scripts' own loops do, or an operator."""
        return bool(self.iterations or self.seconds)

    def leads(self, algorithm: AlgorithmSettings) -> bool:
        """Whether, with this algorithm, workers take over something of an elected worker's model."""
        return algorithm.elects or "leader" in (self.consensus, self.buffers)
