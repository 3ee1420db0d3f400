"""What ``lsgd up`` keeps of a run, in ``up.json`` in node 0's run folder: how it began, and who is which node."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lsgd.errors import ConfigError
from lsgd.output import write_whole
from lsgd.run_folder import CHECKPOINTS, ENDED, is_live, is_unfinished, runs
from lsgd.watch import results

RECORD = "up.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Run:
    """A run that this machine has begun.

    Args:
        name: of the run, and of its folder in ``runs`` on each machine.
        command: what its workers run.
        nodes: how many machines it begins with.
        address, port: where its global server is.
        workers: how many workers each machine has, if the user said so; 0: as many as fit there.
        resumed: whether it was resumed.
        members: index of each other machine, by identity.
    """

    name: str
    command: tuple[str, ...]
    nodes: int
    address: str
    port: int
    workers: int = 0
    resumed: bool = False
    members: dict[str, int] = field(default_factory=dict)

    def with_member(self, identity: str) -> "Run":
        """Return it with a machine: at its place, if it has had one, else at the first free one."""
        if identity in self.members:
            return self
        node = min(set(range(1, len(self.members) + 2)) - set(self.members.values()))
        return replace(self, members={**self.members, identity: node})

    def write(self, folder: Path) -> None:
        """Write it into the run folder.

        Raises:
            ConfigError: that is impossible.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / RECORD, json.dumps(asdict(self)) + "\n")
        except OSError as error:
            raise ConfigError(f"the run folder {folder} cannot be written: {error.strerror}") from None

    @classmethod
    def read(cls, folder: Path) -> "Run | None":
        """Return that of a run folder; None: it has none."""
        try:
            kept = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return cls(**{**kept, "command": tuple(kept["command"])})
        except (OSError, ValueError, LookupError, TypeError):
            return None


def checked_name(name: str) -> str:
    """Return the name of a run, which is that of a folder.

    Raises:
        ConfigError: it cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:64]!r} cannot be the name of a run: letters, digits, dots and dashes, 64 at most")
    return name


def died(folder: Path, command: Sequence[str], name: str = "") -> Path | None:
    """Return the folder of the newest run of this command that this machine has begun, if it died; None: it has not.

    It has died if nobody runs it, it has not ended (or has failed), and there is something to go on from. ``folder``:
    of all runs; ``name``: of a certain one.
    """
    found = [(path, Run.read(path)) for path in folder.glob(f"{name or '*'}/")]
    own = [path for path, run in found if run and run.command == tuple(command)]
    if not own:
        return None
    newest = max(own, key=lambda path: (path / RECORD).stat().st_mtime)
    ended = results.read(newest).get("state") in ("over", *(state for state in ENDED if state != "failed"))
    continues = bool(runs(newest / CHECKPOINTS)) or is_unfinished(newest)
    return newest if continues and not ended and not is_live(newest) else None
