"""How a message travels through the servers' files: from which file to which, and how often back.

A visit begins when a function of another file of lsgd/server is called; properties and comprehensions are none. A
return is a visit to a file that has been left before. A message that enters facts, then asks rules, then carries out
effects returns rarely.

    python -m tests.server.visits        the request of the second of two workers, which starts a round
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from lsgd import server
from lsgd.protocol.messages import Request
from lsgd.server.state import Decision

from .helpers import started

FOLDER = Path(server.__file__).parent


def visits(act: Callable[[], object]) -> list[str]:
    """Return the files of lsgd/server that ``act`` visits, in order."""
    found: list[str] = []
    properties = {code for module in list(sys.modules.values()) for code in _properties(module)}

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or path.parent != FOLDER or code.co_name.startswith("<") or code in properties:
            return
        if found[-1:] != [path.stem]:
            found.append(path.stem)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


def _properties(module: object) -> list[object]:
    """Return the code of the properties of a module's classes."""
    if not getattr(module, "__name__", "").startswith(f"{server.__name__}."):
        return []
    classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    found = [value.fget for each in classes for value in vars(each).values() if isinstance(value, property)]
    return [each.__code__ for each in found if each is not None]


def request_that_starts_a_round(*places: str) -> list[str]:
    """Return the files that the last worker's request visits when a generation of ``places`` makes a later round."""
    bench = started(*places, period=1, local_period=1)
    bench.ask_all(*places)
    bench.complete_all(*places)
    bench.ask_all(*places[:-1])
    last = places[-1]
    request = Request(*bench.who(last), bench.seqs[last] + 1, bench.done[last] + 1, bench.committed[last], 0, None)
    decisions: list[Decision] = []
    found = visits(lambda: decisions.append(bench.coordinator.handle(request, bench.now)))
    bench.act(*decisions)
    assert bench.round(*places).scope == "global"
    return found


if __name__ == "__main__":
    order = request_that_starts_a_round("00", "01")
    print(f"{len(order)} visits, {len(order) - len(set(order))} returns: {' '.join(order)}")
