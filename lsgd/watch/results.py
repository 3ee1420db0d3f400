"""What a run leaves in its folder: ``result.json``, ``metrics.jsonl`` and ``curve.png``.

The global server writes the first two during the run. At its end the launcher adds how it ended, and the curve.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from lsgd.errors import ConfigError
from lsgd.output import write_whole
from lsgd.run_folder import CURVE, CURVES, METRICS, RESULT
from lsgd.server.reasons import Why

ROUND_KEYS = {"round", "scope", "node", "worker", "count", "seconds", "losses"}
"""The keys of each line of ``metrics.jsonl``; a line without one of them is damaged."""

MAX_POINTS = 2000
"""Most rounds in the picture; of more, only every second, third, ... is shown."""

_FILES = (RESULT, CURVE, METRICS, CURVES)

T = TypeVar("T")

_FAILED_CODES = {why.code for why in (Why.MODEL_LOST, Why.ROUNDS_FAIL, Why.SAME_BATCHES)}


def clear(folder: Path, *, resume: bool) -> None:
    """Remove the files of an earlier run in this folder; keep the rounds of a run that is resumed."""
    for name in (RESULT, CURVE) if resume else _FILES:
        (folder / name).unlink(missing_ok=True)
    for earlier in [] if resume else folder.glob("stage[0-9]*/"):
        for name in _FILES:
            (earlier / name).unlink(missing_ok=True)
        with suppress(OSError):  # it has files of somebody else
            earlier.rmdir()


def put_aside(folder: Path, stage: int) -> None:
    """Move the files of a stage of a run into a folder of its own: those of the next one take their places.

    Raises:
        ConfigError: they cannot be moved.
    """
    try:
        (folder / f"stage{stage}").mkdir(exist_ok=True)
        for name in _FILES:
            with suppress(FileNotFoundError):
                (folder / name).replace(folder / f"stage{stage}" / name)
    except OSError as error:
        raise ConfigError(
            f"the results of stage {stage} in {folder} cannot be moved to stage{stage} in it: {error.strerror}"
        ) from None


def finish(folder: Path, status: int, state: str = "", reason: str = "", *, draws: bool = True) -> list[str]:
    """Write how a run ended into ``result.json``, draw its curve, and return lines that say where both are.

    ``state`` is ``failed`` or ``stopped`` if the launcher knows better than the global server; ``reason``: why it
    ended, as far as the launcher knows. ``draws``: whether this is the end of its launch, which takes the time to draw,
    also for the stages before this one.
    """
    document = read(folder)
    files, lines = [], []
    if document.get("state") != "over" and not state:
        lines.append(f"the end of the run could not be written to {folder / RESULT}: what it says is older")
    elif not state and not reason.startswith(known := str(document.get("reason", ""))):  # it may say more
        reason = known
    state, reason = state or ended(document), reason or "its end is not known"
    document |= {"state": state, "reason": reason, "exit_code": status}
    try:
        write_whole(folder / RESULT, json.dumps(document, indent=2) + "\n")
        files += [name for name in (RESULT, METRICS) if (folder / name).exists()]
        if draws and (rounds := read_rounds(folder / METRICS)):
            lines += (trouble := _draw(document, rounds, folder / CURVE))
            files += [CURVE] * (not trouble)
            for earlier in folder.glob("stage[0-9]*/") if not trouble else ():
                if not (earlier / CURVE).exists() and (rounds := read_rounds(earlier / METRICS)):
                    lines += _draw(read(earlier), rounds, earlier / CURVE)
    except OSError as error:
        lines.append(f"the results cannot be written to {folder}: {error.strerror or error}")
    lines.append(f"{state}: {reason}; {', '.join(files) or 'no results are'} in {folder}")
    return lines


def ended(document: dict[str, Any]) -> str:
    """Return how a run ended according to its global server: ``stopped``, ``failed`` or ``finished``."""
    code = str(document.get("code", "")).partition(".")[0]
    return "stopped" if code == Why.ORDERED.code else "failed" if code in _FAILED_CODES else "finished"


def _draw(document: dict[str, Any], rounds: list[dict[str, Any]], path: Path) -> list[str]:
    """Draw the curve, or return why there is none: whatever goes wrong with a picture, the run is as it was."""
    os.environ["MPLBACKEND"] = "agg"  # a picture in a file needs no window, and Jupyter's backend may not be here
    try:
        from lsgd.watch.curve import draw

        draw(document, rounds, path)
    except ImportError:
        return [f"there is no {CURVE}, which needs matplotlib: {sys.executable} -m pip install matplotlib"]
    except KeyboardInterrupt:  # of somebody in a hurry: what comes after the picture matters more
        return [f"there is no {CURVE}: Ctrl-C came while it was drawn"]
    except Exception as error:  # also of matplotlib's own: a backend, a font, a name that it cannot print
        return [f"there is no {CURVE}: {type(error).__name__}: {error}".splitlines()[0]]
    return []


def read(folder: Path) -> dict[str, Any]:
    """Return the content of ``result.json``; empty if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        document = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return document if isinstance(document, dict) else {}
    return {}


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return at most about :data:`MAX_POINTS` rounds of a ``metrics.jsonl``, the last one included.

    Rounds that were repeated, because the run went back to a checkpoint, appear once.
    """
    try:
        with path.open("rb") as file:
            total = sum(1 for _ in file)
        step = -(-total // MAX_POINTS) or 1
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = list(islice(file, (total - 1) % step, None, step))
    except OSError:
        return []
    rounds: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError, RecursionError, AttributeError, TypeError):  # of a killed server, or damaged
            round_ = json.loads(line)
            if not ROUND_KEYS <= round_.keys():
                continue
            rounds.append(round_)
    return without_repeated(rounds, itemgetter("count"))


def without_repeated(rounds: Iterable[T], count: Callable[[T], int]) -> list[T]:
    """Return rounds without those that were repeated later, because the run went back to a checkpoint.

    ``count``: returns how many iterations the run had made at a round.
    """
    kept: list[T] = []
    for round_ in rounds:
        while kept and count(kept[-1]) > count(round_):
            kept.pop()
        kept.append(round_)
    return kept
