"""The training data of other libraries' Trainers: their loaders stay, and what draws in them is replaced.

A Trainer counts its own passes, by its loader's length. So a pass keeps its number of batches, and the passes over this
worker's part follow one another without an end.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import _pytree
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lsgd.client.data.deals import facts_of, facts_of_stream
from lsgd.client.data.passes import Passes, Place
from lsgd.client.data.randomness import OwnInEachProcess
from lsgd.client.data.samplers import BY_HAND, ROWS_BY_HAND, passes_of
from lsgd.client.data.shards import length
from lsgd.client.data.streams import Part, is_stream
from lsgd.errors import ConfigError

logger = logging.getLogger("lsgd")


class Endless(Sampler[Any]):
    """One pass after another of this worker's part, in place of what draws in a Trainer's loader.

    One pass of the Trainer yields ``per_pass`` units of it, and the next continues there. So the number of a Trainer's
    own steps does not depend on the number of workers.

    Args:
        passes: what deals the samples, or the batches.
        per_pass: number of units in one pass of the Trainer.
        batch: number of units in a batch.
        replaces: the script's sampler, or batch sampler.

    Raises:
        ConfigError: this worker has no part of a pass (when it is iterated).
    """

    def __init__(self, passes: Passes, per_pass: int, batch: int = 1, replaces: Any = None) -> None:
        self.replaces = replaces
        self.batch_size, self.drop_last = getattr(replaces, "batch_size", batch), getattr(replaces, "drop_last", False)
        self.passes, self._per_pass, self._batch = passes, per_pass, batch
        self._epoch = 0  # of the oldest unit not yet trained on
        self._consumed = 0  # units of that epoch's part trained on
        self._ahead = 0  # units drawn and not trained on
        self._dealt: deque[tuple[int, tuple[int, int]]] = deque()  # lengths and places of the parts from that epoch on
        self._saved: tuple[int, tuple[int, int]] | None = None  # length of the data and place, until the next part
        self._units = self._deal(0)

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._per_pass):
            yield next(self._units)

    def consume(self, units: int | None = None) -> None:
        """Count units (by default, of a batch) that were trained on; those that were only drawn do not count."""
        units = min(self._batch if units is None else units, self._ahead)
        self._ahead -= units
        self._consumed += units
        while self._dealt and self._consumed >= self._dealt[0][0]:
            self._consumed -= self._dealt.popleft()[0]
            self._epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and of which data and part."""
        place = self._dealt[0][1] if self._dealt else self.passes.place()
        length, place = self._saved or (self.passes.length, place)
        position = {"epoch": self._epoch, "consumed": self._consumed, "seed": self.passes.seed}
        return {**position, "length": length, "place": list(place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position that :meth:`state_dict` returned; in a new epoch, if the parts have changed."""
        self._epoch, self._consumed, self._ahead = state["epoch"], state["consumed"], 0
        self.passes.epoch, self.passes.seed = state["epoch"], state["seed"]
        self._saved = (state["length"], (state["place"][0], state["place"][1])) if "length" in state else None
        self._dealt.clear()
        self._units = self._deal(self._consumed)

    def _begins_anew(self) -> bool:
        """Go to a new epoch if the position that was loaded is in a part of other data, or of another number of them.

        It may be another worker's, because one saves for all: in their parts all are about as far.
        """
        (length, place), self._saved = self._saved or (self.passes.length, self.passes.place()), None
        if length == self.passes.length and place[1] == self.passes.place()[1]:
            return False
        self._consumed, self._epoch = 0, self._epoch + 1 if length == self.passes.length else 0
        self.passes.epoch = self._epoch
        why = "the number of workers" if length == self.passes.length else "the data"
        logger.warning("%s is not that of the checkpoint: the data is dealt again, from epoch %d on", why, self._epoch)
        return True

    def _deal(self, skip: int) -> Iterator[Any]:
        skip = 0 if self._begins_anew() else skip
        while True:
            part = self.passes.deal()
            if not part:
                raise ConfigError(self.passes.none())
            self._dealt.append((len(part), self.passes.place()))
            for unit in part[skip:]:
                self._ahead += 1
                yield unit
            skip = 0
            self.passes.epoch += 1


class TrainerData:
    """A Trainer's training data, of which this worker draws its part from now on.

    Args:
        loaders: DataLoader, or several in lists and dicts.
        place: see :data:`lsgd.client.data.passes.Place`.
        seed: of the parts; the same on all workers.

    Attributes:
        parts: what draws in each of the loaders.

    Raises:
        ConfigError: there is data that lsgd cannot divide.
    """

    def __init__(self, loaders: Any, place: Place, seed: int) -> None:
        self._loaders = [bare(each) for each in _pytree.tree_leaves(loaders)]
        self.parts = [_divide(each, place, seed) for each in self._loaders]

    def tell(self, told: Callable[[str, dict[str, str]], Callable[[int, str], object]]) -> None:
        """Tell the servers how each loader is dealt.

        Args:
            told: tells a name of the data and the facts, and returns what tells of a pass.
        """
        for number, (loader, part) in enumerate(zip(self._loaders, self.parts, strict=True)):
            name = "the training data" + f" of loader {number}" * (len(self.parts) > 1)
            if isinstance(part, Endless):
                part.passes.tell = told(name, facts_of(loader.dataset, part.passes))
            else:
                told(name, facts_of_stream(part.stream))

    def consume(self) -> None:
        """Count a batch of each loader that was trained on; let a stream know who the members are by now."""
        for loader, each in zip(self._loaders, self.parts, strict=True):
            each.consume() if isinstance(each, Endless) else each.consume(loader.batch_size or 1)

    def begin_own(self) -> None:
        """Let the loaders' processes draw numbers of this worker's own from the next pass on."""
        for loader in self._loaders:
            _replace(loader, "generator", None)
            if loader.worker_init_fn is not None:
                _replace(loader, "worker_init_fn", OwnInEachProcess(loader.worker_init_fn))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each loader; a stream that other processes read begins its pass again."""
        return {"loaders": [each.state_dict() if isinstance(each, Endless) else each.trained() for each in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        pairs = [*zip(self.parts, state["loaders"], strict=False)]
        fit = (saved is None or isinstance(each, Endless) == ("consumed" in saved) for each, saved in pairs)
        if len(state["loaders"]) != len(self.parts) or not all(fit):
            logger.warning("the training data has other loaders than the checkpoint: they begin at the first epoch")
            return
        for loader, (each, saved) in zip(self._loaders, pairs, strict=True):
            if saved is not None:
                each.load_state_dict(saved)
            elif loader.num_workers:
                logger.warning(
                    "the training data is a stream that the loader's processes read, so its place is in no checkpoint: "
                    "its pass begins again. With num_workers=0 it goes on where it was"
                )


def bare(loader: Any) -> Any:
    """Return the DataLoader inside of accelerate's."""
    inner = vars(loader).get("base_dataloader") if hasattr(loader, "__dict__") else None
    return loader if inner is None else inner


def _divide(loader: Any, place: Place, seed: int) -> Endless | Part:
    """Replace what draws in a loader by this worker's part of it."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the training data is a {type(loader).__name__}, which lsgd cannot divide: pass a DataLoader, or several "
            f"in a list or a dict; or {ROWS_BY_HAND}"
        )
    if is_stream(loader.dataset):
        part = Part(loader.dataset, place)
        _replace(loader, "dataset", part)
        return part
    _put_back(loader)
    batches = loader.batch_sampler
    name = "sampler" if batches is None else "batch_sampler"
    passes = passes_of(loader, place, seed)
    if length(getattr(loader, name)) == float("inf"):
        raise ConfigError(f"a {type(getattr(loader, name)).__name__} has no length: {BY_HAND}")
    if passes.unit == "sample" and type(batches) is BatchSampler:
        size = batches.batch_size
        batches.sampler = found = Endless(passes, len(batches) * size, size, batches.sampler)
        return found
    found = Endless(passes, len(getattr(loader, name)), replaces=getattr(loader, name))
    _replace(loader, name, found)
    return found


def _put_back(loader: DataLoader[Any]) -> None:
    """Put back the script's samplers, which an earlier training has replaced."""
    for name in ("sampler", "batch_sampler"):
        if isinstance(here := getattr(loader, name), Endless):
            _replace(loader, name, here.replaces)
    if isinstance(here := getattr(loader.batch_sampler, "sampler", None), Endless):
        loader.batch_sampler.sampler = here.replaces  # type: ignore[union-attr]


def _replace(loader: DataLoader[Any], name: str, value: Any) -> None:
    """Set what a DataLoader lets nobody set after its beginning; it looks there when a pass begins."""
    loader.__dict__[name] = value
