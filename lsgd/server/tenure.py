"""What this server is among those of its run: its term, what it knows of other parts, and what members need of it."""

from dataclasses import dataclass, field

from lsgd.protocol.messages import Moved, Term
from lsgd.server.changes import Changes


@dataclass(frozen=True, slots=True)
class Access:
    """How members reach each other and prove that they are some; it is in no journal.

    Args:
        certificate: proof that members show each other; empty if no keys are needed.
        relay: address; empty: there is none.
        secret: proof for the relay that a process is a member.
    """

    certificate: bytes = field(default=b"", repr=False)
    relay: str = ""
    secret: bytes = field(default=b"", repr=False)


@dataclass(slots=True, eq=False)
class Tenure:
    """The time in which one server serves the run.

    Args:
        terms: those of the servers so far, with this one's.
        beaten: terms of other parts of the run that this one has met, and that have to give up.
        took_over: whether this server has taken over, and no global round has been ordered since.

    Attributes:
        began_at: when it began, or thawed.
        began_from: changes and count of the state that it continues.
        guarded: whether a standby would continue the run without this server.
        gives_way: where another part of the run continues, if this one has given up; None: it has not.
        changes: counts those of the terms.
    """

    terms: tuple[Term, ...] = (Term(1, 0),)
    beaten: tuple[Term, ...] = ()
    took_over: bool = False
    access: Access = Access()
    began_at: float = 0.0
    began_from: tuple[int, int] = (0, 0)
    guarded: bool = False
    gives_way: Moved | None = None
    changes: Changes = field(default_factory=Changes)

    @property
    def term(self) -> Term:
        """The present one."""
        return self.terms[-1]

    def beats(self, other: Term) -> None:
        """Begin a term after that of another part of the run, which gives up."""
        self.terms, self.beaten = (*self.terms, Term(other.number + 1, self.term.node)), (*self.beaten, other)
        self.changes.count += 1
