"""Writes down what a worker of ``lsgd check`` does, one fact a line, as JSON; it changes nothing that the worker does.

It is loaded in the worker's process, at its join. :mod:`lsgd.check.facts` lists the facts.
"""

import atexit
import functools
import gc
import hashlib
import json
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lsgd.algorithms.base import is_muon
from lsgd.check.lines import Tracer, here
from lsgd.check.taps import tap_files, tap_loaders, tap_seeds
from lsgd.check.weights import Weights, tensor_digests
from lsgd.client.data.first import digest
from lsgd.client.data.randomness import mersenne, states
from lsgd.client.wrap import eager
from lsgd.observer import Observer
from lsgd.schedulers import count_of, length_of, optimizer_of
from lsgd.schedulers import counts as counts_steps
from lsgd.script_lines import path_of

AT_EVERY_S = 0.5
"""How often the line at which the script is is noted."""

LOOK_AT = 10
"""After how many steps the schedulers are looked for the first time; again at the end."""

WAITS = ("mean", "barrier", "finish", "leave")
"""Calls that wait for other workers."""


def _timed(hook: Callable[..., None]) -> Callable[..., None]:
    """Count how long the recorder itself takes in a step."""

    @functools.wraps(hook)
    def call(self: "Recorder", *args: Any) -> None:
        since = time.perf_counter()
        try:
            hook(self, *args)
        finally:
            self.watching_s += time.perf_counter() - since

    return call


def start(folder: str) -> "Recorder":
    """Return this process's recorder."""
    return Recorder(Path(folder))


class Blame:
    """Which lines of a script have changed the weights since these were kept.

    Attributes:
        lines: those, and in how many steps each had ended by then.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self._ended: dict[str, tuple[int, int]] = {}  # the last step in which a line has ended, and in how many

    def end(self, line: str, step: int) -> None:
        """Note that a line has ended in a step."""
        last, steps = self._ended.get(line, (-1, 0))
        if last != step:
            self._ended[line] = step, steps + 1

    def put(self, line: str) -> None:
        """Put it on a line that the weights have changed; empty: it is not known."""
        if line:
            self.lines[line] = self._ended.get(line, (0, 0))[1]


class Recorder(Observer):
    """Notes facts of one process in a file of its own in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._file = (folder / f"{self._pid}.jsonl").open("a", encoding="utf-8")
        self._lock = threading.RLock()
        self._worker: Any = None
        self._call = ""  # of the script, under way
        self._depth = 0  # parts of rounds under way
        self.watching_s = 0.0  # in what comes in each step, as a part of its time
        self._stepping: Any = None  # the joined optimizer whose step is under way
        self._blame = Blame()
        self._steps = 0
        self._read: set[str] = set()
        self._main = threading.current_thread()
        self.note("process", argv=sys.argv, folder=os.getcwd())
        tap_loaders(self.note)
        tap_files(self.note, str(folder.parent))
        tap_seeds(self.note)
        logging.getLogger("lsgd").addHandler(_Warnings(self))

    def note(self, kind: str, **values: object) -> None:
        """Write a fact."""
        if os.getpid() != self._pid:  # a process of a loader
            return
        over = self._worker is not None and self._worker.stopped
        when = {"t": round(time.monotonic(), 4), "made": self._steps, "over": over}
        line = json.dumps({"kind": kind, **when, **values}, default=str)
        with self._lock, suppress(ValueError):  # closed at the end
            self._file.write(f"{line}\n")
            self._file.flush()

    # -- what lsgd tells ---------------------------------------------------------------------------------------

    def joined(self, worker: Any, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Begin to look at the model and the optimizers; a script that joins again is judged by its first training."""
        if self._worker is not None:
            self._at_exit()
            self.note("stage", where=here())
            self._pid = 0  # it notes nothing more
            return
        self._worker, self._model, self._optimizers = worker, model, optimizers
        self._weights = Weights(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        run = worker.plan.run
        self.note(
            "join",
            **{"worker": worker.name, "pid": self._pid, "where": here(), "first": worker.first},
            **{"step": worker.step, "iterations": worker.iterations, "workers": worker.world_size},
            **{"has_end": run.has_end, "algorithm": worker.algorithm.name},
            **{"parameters": sum(p.numel() for p in trained), "nbytes": sum(p.nbytes for p in trained)},
            **{"muon": is_muon(optimizers)},
            **{"restarted": bool(os.environ.get("LSGD_RESTARTED")), "door": "trainer" if _is_led(worker) else "loop"},
        )
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        model.register_forward_pre_hook(eager(self._before_forward), with_kwargs=True, prepend=True)
        atexit.register(self._at_exit)
        threading.Thread(target=self._tell_line, daemon=True, name="lsgd-check").start()
        Tracer(self._after_line).start()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Note the script's call, and when it is back."""
        if self._call or self._worker is None or threading.current_thread() is not self._main:
            yield
            return
        self._call = name
        self.note("call", name=name, where=here(), step=self._place())
        try:
            yield
        except BaseException as error:
            self.note("raised", name=name, error=f"{type(error).__name__}: {error}"[:2000], where=here())
            raise
        else:
            self.note("back", name=name)
            if name in ("finish", "leave") or (name in WAITS and self._worker.stopped):
                self._note_end("end")
        finally:
            self._call = ""

    def reads(self, name: str) -> None:
        """Note that the script reads a property."""
        caller = sys._getframe(2)
        if path_of(caller.f_code.co_filename) and name not in self._read:
            self._read.add(name)
            self.note("read", name=name, where=here(caller))

    def exchanging(self) -> AbstractContextManager[None]:
        """Compare the weights before a part of a round, and keep them after it."""
        return self._exchange()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        watches = self._worker is not None and not self._depth and threading.current_thread() is self._main
        self._depth += 1
        moved = None
        if watches and self._stepping is None:
            moved = self._weights.change()
        try:
            yield
        finally:
            self._depth -= 1
            if watches and self._weights.glance():
                if moved is not None:
                    self._note_moved(moved, "round")
                self._keep()

    # -- what torch tells --------------------------------------------------------------------------------------

    @_timed
    def _before_step(self, optimizer: Any, *_: object) -> None:
        if self._stepping is not None:
            return
        if not any(optimizer is each for each in self._optimizers):
            own = {id(p) for p in self._model.parameters()}
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                self.note("foreign", optimizer=type(optimizer).__name__, where=here())
            return
        if self._weights.glance():
            self._blame.put(here(sys._getframe(1)))
        changed = self._weights.change()
        if changed is not None:
            self._note_moved(changed, "step")
        elif self._blame.lines:
            self.note("undone", by=self._blame.lines, step=self._place())
        self._stepping = optimizer
        self.note(
            "step",
            **{"optimizer": self._index(optimizer), "number": self._steps, "place": self._place()},
            **{"steps": self._worker.steps, "progress": self._progress(), "lrs": _rates(optimizer)},
            **{"weights": self._weights.sums()},
            **{"noise": _noise(), "where": here()},
        )

    @_timed
    def _after_step(self, optimizer: Any, *_: object) -> None:
        if optimizer is not self._stepping:
            return
        self._stepping = None
        self._keep()
        self._steps += self._index(optimizer) == 0
        if self._steps == LOOK_AT:
            self._note_schedulers()

    @_timed
    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self.note("input", digest=digest((args, kwargs)), where=here())

    # -- the weights -------------------------------------------------------------------------------------------

    def _after_line(self, line: str) -> None:
        self._blame.end(line, self._steps)
        if self._depth == 0 and self._stepping is None and self._weights.glance():
            self._blame.put(line)

    def _keep(self) -> None:
        self._weights.keep()
        self._blame.lines = {}

    def _note_moved(self, changed: Any, before: str) -> None:
        by, names = self._blame.lines, changed.names
        self._weights.looks_closely = not by  # at all of them after each line from now on
        about = {"names": names[:3], "tensors": len(names), "share": changed.share}
        self.note("moved", before=before, by=by, step=self._place(), call=self._call, where=here(), **about)
        self._keep()

    # -- small ones --------------------------------------------------------------------------------------------

    def _place(self) -> int:
        return int(self._worker.step)

    def _progress(self) -> float | None:
        return float(self._worker.progress) if self._worker.plan.run.has_end else None

    def _index(self, optimizer: Any) -> int:
        return next(number for number, each in enumerate(self._optimizers) if each is optimizer)

    def _note_schedulers(self) -> None:
        kind = torch.optim.lr_scheduler.LRScheduler
        found = [each for each in gc.get_objects() if issubclass(type(each), kind)]  # isinstance asks dead proxies
        parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}  # of a SequentialLR
        for each in found:
            if id(each) in parts or not counts_steps(each):
                continue
            with suppress(Exception):  # one that is being made
                if any(optimizer_of(each) is optimizer for optimizer in self._optimizers):
                    about = {"count": count_of(each), "length": length_of(each)}
                    index = self._index(optimizer_of(each))
                    self.note("scheduler", name=type(each).__name__, optimizer=index, **about)

    def _tell_line(self) -> None:
        before = ""
        ident = self._main.ident
        while self._main.is_alive():
            frame = sys._current_frames().get(ident or 0)
            if (line := f"{here(frame)} {self._call}".strip()) != before:
                self.note("at", where=line.partition(" ")[0], call=self._call)
                before = line
            time.sleep(AT_EVERY_S)

    def _note_end(self, kind: str) -> None:
        """Note the model, and what it has cost."""
        state = dict(self._model.state_dict())
        timings = self._worker.timings
        times = {name: getattr(timings, name) for name in timings.__dataclass_fields__}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        buffers = {name for name, _ in self._model.named_buffers()}
        self.note(
            kind,
            **{"consensus": self._worker.has_consensus, "step": self._place()},
            **{"steps": self._worker.steps, "tensors": tensor_digests(state), "buffers": sorted(buffers)},
            **{"timings": times, "watching_s": self.watching_s, "peak_nbytes": peak, "where": here()},
        )

    def _at_exit(self) -> None:
        sys.settrace(None)
        if os.getpid() == self._pid:
            if (changed := self._weights.change()) is not None:
                self._note_moved(changed, "end")
            self._note_schedulers()
            self._note_end("exit")


class _Warnings(logging.Handler):
    """Notes what lsgd warns of."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        where = {"module": record.module, "function": record.funcName, "where": here()}
        self._recorder.note("warning", text=record.getMessage(), level=record.levelname, **where)


def _noise() -> list[str]:
    """Return digests of the states of torch's, NumPy's and Python's generators."""
    of_torch, of_numpy, of_python = states()
    _, words, *rest = mersenne(of_numpy) or ("", np.empty(0), of_numpy)
    numpys = words.tobytes() + repr(rest).encode()  # the text of so large an array takes longer than a small step
    texts = [of_torch.numpy().tobytes(), numpys, repr(of_python).encode()]
    return [hashlib.blake2b(text, digest_size=8).hexdigest() for text in texts]


def _is_led(worker: Any) -> bool:
    """Whether another library's loop leads it, which knows by itself where it is to begin."""
    return type(worker).__module__.startswith("lsgd.integrations.")


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
