"""The errors that lsgd raises, by who has to act on them."""


class LsgdError(Exception):
    """Base of all errors that lsgd raises; the message says what happened, where, and what to do next."""


class ConfigError(LsgdError):
    """A setting, flag or argument is wrong: correct the value that the message names, and start again."""


class ProtocolError(LsgdError):
    """A peer sent bytes that violate the protocol. A daemon drops them and continues."""


class JoinError(LsgdError):
    """This worker cannot take part: no server answers, or the run refuses it. The message has the line to type."""

    exit_code = 77  # EX_NOPERM; of a worker that is refused after it has joined


class RunOverError(JoinError, SystemExit):
    """This worker joins too late: the run has ended, or is about to, so nothing is left to do.

    A script that does not handle it ends with this exit code and no traceback. The run is none the worse for it. The
    code is 0 if this end is ``in_order``: the process has trained, and the run was stopped before its next stage; or
    what has started it would end the other workers, which may still save.
    """

    exit_code = 69  # EX_UNAVAILABLE

    def __init__(self, message: str, *, in_order: bool = False) -> None:
        super().__init__(message)
        self.code = self.exit_code = 0 if in_order else self.exit_code


class SecondJoinError(JoinError):
    """This process comes to a next stage of its run, and its servers, which were started by hand, begin none."""

    exit_code = 64  # EX_USAGE: the script has to be changed


class ExchangeError(LsgdError):
    """A round failed: a peer died or a deadline passed. The model is as it was before the round."""


class BrokenLinksError(ExchangeError):
    """Members of a generation cannot reach each other; ``broken`` has their ranks, one pair after the other."""

    def __init__(self, message: str, broken: tuple[int, ...]) -> None:
        super().__init__(message)
        self.broken = broken


class NoConsensusError(ExchangeError):
    """The run ended for this worker without a consensus model, because rounds kept failing."""

    exit_code = 74  # EX_IOERR; of a worker whose script does not handle it


class EvictedError(JoinError):
    """The run evicted this worker, which was silent for too long. Started again, it joins as a newcomer."""

    exit_code = 76  # of a worker whose script does not handle it


class IslandError(EvictedError):
    """Another process of this worker's island has ended or hangs: the island restarts, and joins again."""


class ServerLostError(LsgdError):
    """The servers were silent past the deadline while this worker waited for an answer."""

    exit_code = 75  # EX_TEMPFAIL: try again later


class NotTrainedError(LsgdError):
    """This worker ends as if it had trained, but has completed no iteration of the run."""

    exit_code = 78  # EX_CONFIG: the script has to be changed


class NonFiniteError(LsgdError):
    """The run ended, and its model is non-finite (NaN or infinite)."""

    exit_code = 65  # EX_DATAERR: restarting it unchanged does not help


class OutlierError(LsgdError):
    """The changes of this worker's model did not fit to those of the others, round after round."""

    exit_code = 65  # EX_DATAERR: restarting it unchanged does not help
