"""Where a worker is in its data, for its checkpoints: the positions of its loaders, and the random states."""

import copy
import logging
import weakref
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from lsgd.client.data.randomness import mersenne, set_states, states

logger = logging.getLogger("lsgd")


class Positioned(Protocol):
    """What has a position in the data, like the loaders that ``Worker.loader`` makes."""

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds; ``place`` is the rank and the world size of the shard."""
        ...

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether a saved position is one in this data."""
        ...

    def take_position(self, saved: dict[str, Any]) -> None:
        """Continue there."""
        ...


P = TypeVar("P", bound=Positioned)

Noted: TypeAlias = "tuple[weakref.ref[Positioned], dict[str, Any]]"
"""A loader and a position of it."""


class DataPosition:
    """Where a worker is in its data; ``saves``: whether it writes checkpoints."""

    def __init__(self, model: nn.Module, *, saves: bool) -> None:
        self._model, self._saves = model, saves
        self._loaders: list[weakref.ref[Positioned]] = []
        self._saved: list[dict[str, Any]] = []  # positions of loaders that do not exist yet
        self._misfit = False  # whether a loader was told that none of them is its own
        self._noted: list[Noted] | None = None
        self._random: dict[str, Any] = {}
        self._between: dict[str, Any] | None = None  # the same, before anything was drawn for the step; {}: no other

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of it."""
        noted = self._now() if self._noted is None else self._noted
        positions, drawn = [position for loader, position in noted if loader() is not None], self._drawn()
        state: dict[str, Any] = {"loaders": positions, "random": drawn}
        if self._between is None or self._loaders:
            return state
        same = all(_is_same(value, drawn[name]) for name, value in self._between.items())
        return {**state, "between": {} if same else self._between}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint was, once the loaders are there and the first batch is drawn."""
        self._random, self._saved, self._between = state["random"], state["loaders"], state.get("between")

    def restore_random(self) -> None:
        """Restore the checkpoint's random state. Called when the first batch is drawn, as at saving."""
        if self._random:
            self._draw_from(self._random)
            self._random = {}

    def restore_between(self) -> None:
        """Restore the random state between two steps, for a script that draws its data itself: it draws it again."""
        if self._between:
            self._draw_from(self._between)
        elif self._between is not None:
            self.restore_random()

    def attend(self, loader: P) -> P:
        """Save this loader's position from now on; continue at the first position in the checkpoint that fits.

        A script may make its loaders anew in each epoch, so that at a checkpoint the last to be made comes first.
        """
        if any(each() is loader for each in self._loaders):
            return loader
        self._loaders.append(weakref.ref(loader))
        if self._saved:
            fitting = [index for index, saved in enumerate(self._saved) if loader.fits(saved)]
            if fitting:
                loader.take_position(self._saved.pop(fitting[0]))
            elif not self._misfit:
                logger.warning("a loader is for other data than that of the checkpoint: it begins at the first epoch")
            self._misfit |= not fitting
        if self._noted is not None:
            self._noted.append((self._loaders[-1], loader.position()))
        return loader

    def note(self) -> None:
        """Save the loaders' present positions until the next call: what is drawn meanwhile is not trained on yet.

        Without a loader, it is the random state: the script draws its data itself.
        """
        if self._saves:
            self._noted = copy.deepcopy(self._now())  # a stream may go on with the state that it returned
            self._between = None if self._loaders else self._drawn()

    def forget(self) -> None:
        """Save the positions that loaders have when a checkpoint is taken, as before :meth:`note`."""
        self._noted = self._between = None

    def _now(self) -> list[Noted]:
        return [(each, loader.position()) for each in self._loaders if (loader := each()) is not None]

    def _drawn(self) -> dict[str, Any]:
        """Return the states of the generators that a script may draw from; None for one that it has given numpy."""
        of_torch, of_numpy, of_python = states()
        state = {"torch": of_torch, "python": of_python, "numpy": None}
        if (words := mersenne(of_numpy)) is not None:
            name, keys, *rest = words
            state["numpy"] = (name, keys.tolist(), *rest)
        if (device := self._device).type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(device)
        return state

    def _draw_from(self, state: dict[str, Any]) -> None:
        set_states((state["torch"], state["numpy"], state["python"]))
        if (device := self._device).type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _is_same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
