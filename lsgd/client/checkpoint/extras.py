"""The script's own objects that checkpoints save beside the model, and that newcomers may take over."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from lsgd.client.checkpoint.file import Packed, Unsaved, pack, unpack
from lsgd.errors import ConfigError
from lsgd.schedulers import Rates, bring, count_of, hold, inner
from lsgd.schedulers import counts as counts_steps

logger = logging.getLogger("lsgd")

COUNT = "lsgd_steps"
"""The only entry in what newcomers take over of a scheduler."""

RATES = "lsgd_rates"
"""Name of the run's learning rates among the objects to save."""


class Stateful(Protocol):
    """What can be saved: a GradScaler, a learning-rate scheduler, or any object with these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: dicts, lists, tuples, tensors, texts, numbers."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what :meth:`state_dict` returned."""
        ...


class Extras:
    """The objects that a worker saves by name, and the run's learning rates.

    Attributes:
        rates: the run's learning rates, to compare with.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], things: Mapping[str, Stateful]) -> None:
        for name, thing in things.items():
            _check_stateful(name, thing)
        self.rates = Rates(optimizers)
        self._things: dict[str, Stateful] = {RATES: self.rates, **things}
        self._of_run = {RATES}  # names of those that newcomers take over
        self._saved: dict[str, Any] = {}  # of a checkpoint or of the source, whatever has joined
        self._path: Path | None = None  # of the checkpoint that was restored

    def states(self) -> dict[str, Any]:
        """Return the states to save by name, also those that nobody has asked for yet."""
        return self._saved | {name: state_of(thing) for name, thing in self._things.items()}

    def restore(self, saved: dict[str, Any], path: Path) -> None:
        """Restore all objects from the states in a checkpoint; those that are attended to later take the rest."""
        self._saved, self._path = saved, path
        for name, thing in self._things.items():
            self._restore(name, thing)

    def attend(self, name: str, thing: Stateful, *, of_run: bool = False) -> None:
        """Save this object from now on, as those of the join; restore it, if there is a state of it.

        What is ``of_run``, newcomers take over from a member, as they do schedulers and GradScalers.
        """
        _check_stateful(name, thing)
        if (taken := self._things.get(name)) is not None:
            raise ConfigError(f"there is an extra {name!r}, a {type(taken).__name__}; choose another name")
        self._things[name] = thing
        if of_run:
            self._of_run.add(name)
        if self._path is not None or name in self._saved:
            self._restore(name, thing)

    def follow(self, thing: Stateful) -> None:
        """Attend to an object of the run under a name of its own: its class, and how many there are before it."""
        kind = type(thing).__name__
        _check_stateful(kind, thing)
        if all(each is not thing for each in self._things.values()):
            taken = sum(name.startswith(f"{kind} ") for name in self._of_run)
            self.attend(f"{kind} {taken}", thing, of_run=True)

    def shared(self) -> Packed:
        """Return what newcomers take over from this member, packed; a state that cannot be is left out.

        Of a scheduler it is how many steps it has made: its rates are each worker's own.
        """
        states: dict[str, Any] = {}
        for name, thing in self._things.items():
            if counts_steps(scheduler := inner(thing)):
                states[name] = {COUNT: count_of(scheduler)}
            elif name in self._of_run or isinstance(thing, torch.amp.GradScaler):
                try:
                    states[name] = unpack(pack(thing.state_dict()))
                except TypeError as error:
                    logger.warning("newcomers do not take over %r: %s", name, error)
        return pack(states)

    def take_shared(self, packed: Packed) -> None:
        """Take over what :meth:`shared` has returned on another member."""
        for name, state in unpack(packed).items():
            if name not in self._things:
                self._saved[name] = state
            elif state:  # a GradScaler that is not enabled has none
                _load(self._things[name], state)

    def schedulers(self) -> list[LRScheduler]:
        """Return the learning-rate schedulers among the objects to save."""
        return [each for thing in self._things.values() if isinstance(each := inner(thing), LRScheduler)]

    def _restore(self, name: str, thing: Stateful) -> None:
        if name in self._saved:
            _load(thing, self._saved.pop(name))
        elif name != RATES:
            logger.warning("the checkpoint %s has no extra %r: it stays as it is", self._path, name)


def _load(thing: Stateful, state: dict[str, Any]) -> None:
    """Restore an object, and of a scheduler also the rates that it has set."""
    scheduler = inner(thing)
    if COUNT in state and counts_steps(scheduler):
        if count_of(scheduler) < state[COUNT]:
            bring(scheduler, state[COUNT])
        return
    thing.load_state_dict(state)
    if isinstance(scheduler, LRScheduler):
        hold(scheduler)


def _check_stateful(name: str, thing: object) -> None:
    if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
        raise ConfigError(f"extra[{name!r}] is a {type(thing).__name__}, without state_dict()")


def state_of(thing: Any) -> Any:
    """Return the state of the script's own object; if it has none now, what :func:`pack` refuses, with the reason."""
    try:
        return thing.state_dict()
    except Exception as error:  # it may raise anything, and a checkpoint never ends a training
        return Unsaved(f"{type(thing).__name__}, whose state_dict() has failed ({type(error).__name__}: {error})")
