"""Every error that lsgd raises on purpose, by who has to act on it."""


class LsgdError(Exception):
    """Base of all errors that lsgd raises on purpose; the message says what, where and what to do next."""


class ConfigError(LsgdError):
    """A setting, flag or argument of ours is wrong: mend the value named in the message and start again."""


class ProtocolError(LsgdError):
    """A peer sent bytes that are not of the protocol; never ends a daemon, which drops them and goes on."""


class JoinError(LsgdError):
    """The run cannot be joined: no server answers, or it refuses this worker; the message has the line to type."""


class RunOverError(JoinError, SystemExit):
    """This worker comes too late: the run has ended, or is about to.

    There is nothing left to do, which is no failure: a script that does not handle it ends with exit code 0.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 0


class ExchangeError(LsgdError):
    """A round failed on the wire: a peer died or a deadline passed; the model is as it was before the round."""


class BrokenLinksError(ExchangeError):
    """Members of a generation cannot reach each other.

    Args:
        message: which, in words.
        broken: their ranks, one pair after the other.
    """

    def __init__(self, message: str, broken: tuple[int, ...]) -> None:
        super().__init__(message)
        self.broken = broken


class NoConsensusError(ExchangeError):
    """The run has ended for this worker without a consensus model, because rounds kept failing."""

    exit_code = 74  # EX_IOERR, of a worker whose script does not handle it


class LeftOutError(JoinError):
    """The run goes on without this worker, which was silent for too long; started again it joins as a newcomer."""

    exit_code = 76  # of a worker whose script does not handle it


class ServerLostError(LsgdError):
    """The servers stayed away past the deadline while this worker waited for an answer."""

    exit_code = 75  # EX_TEMPFAIL: try again later


class NonFiniteError(LsgdError):
    """The run has ended, and its model has values that are not finite (NaN or infinite)."""

    exit_code = 65  # EX_DATAERR: starting it again as it was does not help


class DetachedError(LsgdError):
    """A parameter no longer lives in the flat buffer that is exchanged (after ``model.to(...)``, say)."""
