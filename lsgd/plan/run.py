"""The settings of a run."""

from dataclasses import dataclass

from lsgd.settings import setting


@dataclass(frozen=True)
class RunSettings:
    """How long the run is, who takes part, and how long anything may take."""

    workers: int = setting(1, "the run starts when so many workers have joined", low=1, high=100_000)
    iterations: int = setting(
        0, "end after so many iterations of all workers together; 0: no such limit", low=0
    )
    seconds: float = setting(0.0, "end after so much time since the first iteration; 0: no such limit", low=0)
    buffers: str = setting(
        "average",
        "floating-point buffers (batch-norm statistics) at a global round: averaged, kept, or the leader's",
        choices=("average", "keep", "leader"),
    )
    consensus: str = setting(
        "average",
        "the model at the end: the average of all workers', or that of the worker with the lowest loss",
        choices=("average", "leader"),
    )
    sync_optimizer: bool = setting(False, "a newcomer takes over the optimizer's state too")
    loss_window: int = setting(
        0,
        "batches that the loss which elects leaders is averaged over; 0: the algorithm's local period",
        low=0,
    )
    checkpoint_every: int = setting(
        0,
        "global rounds from one checkpoint of each worker to the next; 0: by checkpoint_every_s only",
        low=0,
    )
    checkpoint_every_s: float = setting(
        600.0,
        "a global round this long after the last checkpoint brings the next one; 0: by checkpoint_every only",
        low=0,
    )
    exchange_timeout_s: float = setting(
        60.0, "longest that one step of an exchange may take", low=0.1, high=86_400
    )
    join_timeout_s: float = setting(
        600.0, "longest that a worker which has joined waits for the others", low=1, high=864_000
    )
    lease_s: float = setting(
        15.0, "a worker whose process has been silent for so long is left out of the run", low=1, high=864_000
    )
    patience_s: float = setting(
        120.0,
        "a round for which all others have waited so long starts without the worker that they wait for; 0: never",
        low=0,
        high=864_000,
    )
    server_timeout_s: float = setting(
        300.0, "longest that a worker waits while its servers are silent", low=1, high=864_000
    )
    restart_from_scratch: bool = setting(
        False,
        "where all workers and checkpoints that had the run's model are lost, begin anew instead of ending",
    )
    lookahead: int = setting(
        1,
        "iterations that a worker asks for in advance, so that it does not wait for the answers; 0: none",
        low=0,
        high=1 << 20,
    )
    unsupervised_iterations: int = setting(
        0, "iterations that a worker makes on its own before it waits for silent servers", low=0, high=1 << 30
    )
