"""Every reason that the global server gives: a short code for programs, and a sentence."""

import enum
from typing import Self


class Reason(str):
    """A sentence, with a code for programs, such as ``leaves.silent``.

    Attributes:
        code: names of :class:`Why` in lower case, from the outermost to the innermost, joined by dots.
    """

    __slots__ = ("code",)
    code: str

    def __new__(cls, words: str = "", code: str = "") -> Self:
        """Return the reason; without words it is false, and means that there is none."""
        reason = super().__new__(cls, words)
        reason.code = code
        return reason

    def to_json(self) -> list[str]:
        """Return the constructor's arguments, for JSON."""
        return [str(self), self.code]


NO_REASON = Reason()

ROUTINE = {"joins", "period", "round", "fewer_lines", "generation", "stopping", "finishes", "leaves.run_over"}
"""Codes, or their beginnings, of what happens in a healthy run: `lsgd launch` shows their lines only if it is asked."""

CHECK = "check the cable, the route and the firewall between them (lsgd doctor)"


@enum.unique
class Why(enum.Enum):
    """The codes, and their sentences with places for values. A call fills the places.

    If one of the values is called ``reason``, its code is appended: ``leaves.silent``.
    """

    # The run stops, or fails.
    ORDERED = "{order}"
    TIME_OVER = "the time of {seconds:g} s is over"
    ALL_MADE = "all {limit:.0f} iterations are done"
    ALL_MADE_BEFORE = (
        "all {limit:.0f} iterations were done before it was resumed; raise iterations to continue "
        "(LSGD_ITERATIONS, or --iterations of lsgd-server)"
    )
    ALL_LEAVE = "all workers leave after {count} iterations"
    STALLED = (
        "{who} did nothing for {waited_s:g} s, while all others had ended their own loops; {count} iterations are done"
    )
    ALL_FINISHED = "all workers have made the steps of their own loops, {count} iterations"
    HOLDERS_LEAVE = "all workers that have the run's model leave after {count} iterations"
    REST_IS_OUT = "{count} of {limit:.0f} iterations are done; the last were granted to {who}, evicted since"
    REST_TOO_SMALL = "{count} of {limit:.0f} iterations are done; too few are left for one of each worker"
    ROUNDS_FAIL = "{failures} rounds in a row failed, the last because {reason}"
    MODEL_LOST = (
        "the run's model is lost after {count} iterations: the workers that had it are gone, and no remaining worker "
        "has a checkpoint; restart the run with RESUME=1 (lsgd launch --resume) where there are checkpoints, or let "
        "runs start over by themselves with restart_from_scratch = true"
    )

    # A worker or its request is refused.
    WRONG_NAME = "it is worker {index} of node{node}, but calls itself {worker}, not {name}"
    SOFTWARE = "its software differs: {versions}; install the same release on both"
    MODEL = "its model differs from {first}'s: {theirs} against {ours}; build the same model on every worker"
    LOOPBACK = (
        "{worker} can be reached at {theirs} and {first} at {ours}: one of them is on the loopback interface; "
        "connect every node's local server by the global server's real address"
    )
    NO_GPU = (
        "{worker} has no GPU of its own, which transport = nccl needs; give it one (LSGD_DEVICE), or set transport to "
        "auto"
    )
    NAME_TAKEN = (
        "{worker} is already in the run (heard {heard_s:.1f} s ago); two workers cannot have one name: give each "
        "machine its own --node and each worker its own LSGD_LOCAL_RANK"
    )
    CAME_BACK = "this process of {worker} has already left the run, or was evicted; start it again"
    SAME_BATCHES = (
        "{worker} and {other} draw the same batches, so one of them learns nothing new ({same}): give each its part of "
        "a DataLoader or a stream, loader = worker.shard(loader), of a dataset, worker.loader(data, ...), or of rows, "
        "worker.rows(n); lsgd check names the line. If that is meant, pass same_data=True to the join"
    )
    OTHER_DEAL = (
        "{worker} and {other} divide other data at {where} ({differ}), but each takes its part of what all deal alike, "
        "so some rows would be drawn twice and others by nobody: {remedy}. Or, if each worker has data of its own, do "
        "not let lsgd divide it: worker.batches(DataLoader(...)), in a Trainer LsgdCallback(shard=False)"
    )
    TOO_FEW = "after {waited_s:g} s only {joined}; start the others, or a run of fewer (LSGD_WORKERS=N)"
    OTHER_CALL = (
        "{worker} calls {call}, and {other} waits in {theirs}: all workers must make the same calls of worker.mean(), "
        "with the same names, and worker.barrier(), in the same order"
    )
    UNKNOWN = "{worker} is not in run {run}: it was evicted, or belongs to an earlier run; start it again"

    # A worker leaves, or a round fails.
    LEFT = "{farewell}"
    FAILED = "failed: {error}"
    SILENT = "nothing was heard from it for {quiet_s:.0f} s"
    NEVER_ASKED = "it did not ask for its first iteration for {waited_s:g} s"
    REPLACED = "another process has taken its place"
    RUN_OVER = "the run is over"
    REFUSED = "refused, {reason}"
    NODE_ENDS = "{notice}"
    ERROR = "{worker}: {error}"
    PASSED_OVER = "{worker}: it skipped the round"
    PAUSED = "{worker}: it paused instead"
    DROPPED = "{worker}: it could not complete it"
    GONE = "{worker}: it left the run: {reason}"
    FELL_SILENT = "{worker}: {reason}"
    STUCK = "{who} did not complete it, and nothing moved for {longest_s:g} s"
    UNREACHABLE = "{pairs} cannot reach each other{more}"
    MEMBER_LEFT = "{worker} left: {reason}"
    ROUND_FAILED = "its round failed"

    NODE_GONE = "node{node}, which served the run, is gone"
    SERVER_MOVED = "node{before} is gone, and node{node} serves the run"

    # Two parts of a run meet.
    GIVES_UP = (
        "TWO PARTS OF THE RUN MEET: that of node{node} has {theirs} iterations and goes on; the {count} of this one "
        "are dropped, and its workers join there as newcomers"
    )
    JOINS_RUN = (
        "run {run} continues at node{node}, with {theirs} iterations: this node takes part in that one. For a new run, "
        "end the other one first (lsgd stop)"
    )
    BEATS = (
        "TWO PARTS OF THE RUN MEET: this one has {count} iterations and goes on, in term {term}; the {theirs} of "
        "node{node} are dropped, and its workers join here as newcomers"
    )

    # A request waits.
    JOINING = "{here} of {wanted} workers have joined{missing}"
    GOES_ON = "the others continue without it; it has their model as of its last iteration"
    LAST_HOLDERS = "the last round waits for {who}: all others leave"
    JOINING_NODES = "joined so far: {workers}; {nodes} of {wanted} nodes have connected{missing}"
    STARTED = "{here} worker{are} in the run"
    NAME_CONTESTED = (
        "another process was {worker} until {heard_s:.1f} s ago; this one takes its place if it stays silent"
    )
    CUT = "{why}the run continues without {worker}; {check}; it is tried again {when}"
    ENDED = "the run is over: {reason}"
    FIRST_REQUESTS = "the first round waits for the first request of {who}"
    CONSENSUS = "the last round waits for {who} to complete it{transfer}"
    BUSY = "the next round waits {waited_s:.1f} s for {who}{open_round}"
    AWAY = "the next round waits for {who}, which paused"
    MODEL_AWAY = "the next round waits for {who}: nobody else has the run's model"
    LEASE = "the last iterations are granted to {who}, silent for {quiet_s:.0f} s, and wait for the end of the lease"
    CATCHES_UP = "{who} takes the run's model, while the others train{transfer}"
    UNDER_WAY = "round {id} has been under way for {for_s:.0f} s at {who}{transfer}"
    NOBODY = "all workers are training; {joined}"
    TRAIN_ON = "the end of the run waits for {who}, still in the loop"
    MEETING = "{call} waits for the same call of {who}"

    # A period is chosen.
    PLANNED = "as planned"
    WARM = "the run begins with short periods"
    CLOSING = "the run ends with short periods"
    UNMEASURED = "no round has been timed yet"
    MEASURED = "a round takes {round_s:.2g} s, a step {step_s:.2g} s"

    # Something has happened.
    JOINS = "{worker} joins from {address}; {joined}"
    TOO_LATE = "{worker} joins too late: the run is ending"
    IS_REFUSED = "{worker} is refused, {reason}"
    LEAVES = "{worker} leaves: {reason} ({done} iterations)"
    LOSES = "the count is without {lost} of {worker} since its last global round, which no model of the run will have"
    FINISHES = "{worker} has made {done} iterations, all of its own loop, and waits for the end of the run"
    PAUSES = "{worker} pauses until its next iteration"
    BACK = "{worker} is back, and has {model}"
    STOPPING = "stopping: {reason}"
    CHANGED = "{name} is set to {text}"
    ROUND = "{scope} round {id}{where}: {who}, {count} iterations"
    FEWER_LINES = "from here on at most one round a second is listed"
    ROUND_FAILS = "round {id} failed: {reason}"
    EVICTED = "{who} {are} evicted from round {id}: the others waited {patience_s:g} s for {them}"
    LEFT_OUT = "{who} {are} silent, and the others train on: {reason}"
    HEARD = "{worker} is heard again, and is in rounds from its next request on"
    EVICTED_LINK = "{who} evicted for {wait_s:g} s, the others continue: {reason}; {check}"
    RELAYED = "{pairs} cannot reach each other, and exchange through the relay{more}"
    PHASE = "phase {number}: {algorithm}, from iteration {count} on"
    PERIOD = "period {period}{delay}: {reason}"
    GENERATION = "generation {number}: {workers} on {nodes}, over {transport}{why}"
    RESUMED = "resumes after {count} iterations, from checkpoints of {holders}{takers}"
    NO_HOLDER = "nobody who has completed the last global round is left"
    GONE_BACK = (
        "the workers that had the run's model after {count} iterations are gone: it goes back to checkpoints of "
        "{resumed} iterations; {lost} are repeated"
    )
    BEGUN_ANEW = (
        "the workers that had the run's model after {count} iterations are gone, and there is no checkpoint: "
        "IT STARTS OVER with a new model (restart_from_scratch)"
    )
    ALL_SILENT = (
        "nothing was heard for {quiet_s:.0f} s from {who}, and nobody else has the run's model: is the network of "
        "this machine down, or a local server frozen? The run waits {waits_s:g} s for them in all"
    )

    @property
    def code(self) -> str:
        """The code, without that of an inner reason."""
        return self.name.lower()

    def __call__(self, **values: object) -> Reason:
        """Return the reason with these values in its sentence."""
        codes = (self.code, getattr(values.get("reason"), "code", ""))
        return Reason(self.value.format(**values), ".".join(filter(None, codes)))


def number_of(count: int, what: str) -> str:
    """Return how many there are of something: ``1 worker``, ``2 workers``."""
    return f"{count} {what}{'s' * (count != 1)}"
