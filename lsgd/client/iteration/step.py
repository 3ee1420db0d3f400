"""A worker's step: its states, and what may follow; pure, and the same for every kind of loop."""

from collections.abc import Mapping
from enum import Enum

from lsgd.errors import LsgdError


class StepState(Enum):
    """Where a worker is in its step, and what that means."""

    AWAY = "between two iterations: nothing is granted, and nothing asked for"
    ROUND = "it asks for an iteration, or in a call, and carries out the rounds that the servers order"
    GRANTED = "an iteration is granted, and has not begun"
    BEGUN = "forward and backward passes are under way"
    STEPPED = "an optimizer has stepped"
    COUNTED = "the iteration counts; the algorithm has yet to act after it"
    GIVEN_BACK = "a pause or a call has taken the rest of the step: no optimizer may step before the next one"
    ENDED = "the run has ended for this worker, and no step changes the model"
    DONE = "the same, and it has left the run"
    LEFT = "it has left the run before its end"


class Event(Enum):
    """What moves a worker from one state to another."""

    ASK = "it asks the servers"
    GRANT = "they grant an iteration"
    MEET = "they answer a call"
    FAIL = "an error, or Ctrl-C"
    STOP = "they say that the run has ended, or it leaves"
    BEGIN = "`begin_step`, the next batch, or a forward pass"
    STEP = "an optimizer steps"
    CLOSE = "`end_step`, the end of a batch, or all optimizers have stepped"
    SKIP = "`CLOSE` without a step whose gradients were exchanged"
    ACT = "`after_step` of the algorithm"
    TAKE = "`pause`, `mean` or `barrier` in the middle of a step"
    LEAVE = "the end of the `with` block, of the script, or `finish`"


_S, _E = StepState, Event

TRANSITIONS: Mapping[tuple[StepState, Event], StepState] = {
    (_S.AWAY, _E.ASK): _S.ROUND,
    (_S.AWAY, _E.TAKE): _S.GIVEN_BACK,
    (_S.AWAY, _E.STOP): _S.ENDED,
    (_S.ROUND, _E.GRANT): _S.GRANTED,
    (_S.ROUND, _E.MEET): _S.AWAY,
    (_S.ROUND, _E.FAIL): _S.AWAY,
    (_S.ROUND, _E.STOP): _S.ENDED,
    (_S.GRANTED, _E.BEGIN): _S.BEGUN,
    (_S.GRANTED, _E.TAKE): _S.GIVEN_BACK,
    (_S.BEGUN, _E.STEP): _S.STEPPED,
    (_S.BEGUN, _E.CLOSE): _S.GRANTED,
    (_S.BEGUN, _E.SKIP): _S.AWAY,
    (_S.BEGUN, _E.TAKE): _S.GIVEN_BACK,
    (_S.BEGUN, _E.STOP): _S.ENDED,
    (_S.STEPPED, _E.STEP): _S.STEPPED,
    (_S.STEPPED, _E.CLOSE): _S.COUNTED,
    (_S.COUNTED, _E.ACT): _S.AWAY,
    (_S.GIVEN_BACK, _E.CLOSE): _S.AWAY,
    (_S.ENDED, _E.LEAVE): _S.DONE,
    **{(state, _E.LEAVE): _S.LEFT for state in _S if state not in (_S.ENDED, _S.DONE, _S.LEFT)},
}
"""The state that follows a state upon an event; there is no other way. docs/concepts/worker.md shows this table."""


class Step:
    """The step of one worker: its state, which :meth:`advance` alone changes.

    Attributes:
        state: where the worker is.
    """

    def __init__(self, worker: str = "this worker") -> None:
        self.state = StepState.AWAY
        self._worker = worker

    def advance(self, event: Event) -> StepState:
        """Go to the state that follows upon an event, and return it; raise a LsgdError if none does."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise LsgdError(
                f"{self._worker} is {self.state.name} ({self.state.value}), and {event.name} cannot follow: "
                f"{event.value}"
            )
        self.state = after
        return after

    @property
    def is_open(self) -> bool:
        """Whether a step is under way, in which optimizers may step."""
        return self.state in (StepState.BEGUN, StepState.STEPPED)

    @property
    def is_granted(self) -> bool:
        """Whether an iteration is granted and does not count yet."""
        return self.is_open or self.state is StepState.GRANTED

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended for this worker."""
        return self.state in (StepState.ENDED, StepState.DONE)

    @property
    def has_left(self) -> bool:
        """Whether it is no longer in the run."""
        return self.state in (StepState.DONE, StepState.LEFT)

    @property
    def is_over(self) -> bool:
        """Whether no iteration will follow."""
        return self.has_ended or self.has_left
