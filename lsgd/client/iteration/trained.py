"""What is trained on a worker: the parameters that its optimizers have, and the weights that their last step left."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lsgd.client.iteration.copies import WeightCopies
from lsgd.errors import LsgdError
from lsgd.flat import FlatParameters

logger = logging.getLogger("lsgd")


class Trained:
    """The parameters that a worker's optimizers had at the join, and the weights that a step or a round has left."""

    def __init__(self, flat: FlatParameters, optimizers: Sequence[torch.optim.Optimizer], copies: WeightCopies) -> None:
        self._flat, self._optimizers, self._copies = flat, optimizers, copies
        joined = self._in_groups()
        self._joined = [(slot, slot.parameter) for slot in flat.slots if id(slot.parameter) in joined]
        self._warned = False  # of parameters that no optimizer has
        self._left: tuple[list[tuple[int, int]], list[Tensor]] | None = None  # the weights: versions, some elements

    def check(self) -> None:
        """Find the model's parameters anew, and check that the optimizers still have theirs.

        Raises:
            LsgdError: the model trains others than those that were joined, or the optimizers have lost one.
        """
        self._flat.find()
        grouped = self._in_groups()
        for slot, joined in self._joined:
            if id(slot.parameter) in grouped:
                continue
            if slot.parameter is joined:
                raise LsgdError(
                    f"the optimizers' parameter groups have lost the parameter {slot.name} since Worker.join, so it is "
                    f"not trained; change param_groups before the join"
                )
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the parameter %s is another object since Worker.join, and none of the joined optimizers has it, "
                    "so it is not trained: put the model's parameters into param_groups, or copy values into the old "
                    "ones, as load_state_dict does without assign=True",
                    slot.name,
                )

    def note(self) -> None:
        """Note that the weights in the model are those that are trained: a step or a round has just left them."""
        self._left = self._flat.versions(), self._flat.sample()

    def others(self) -> list[str]:
        """Return the names of parameters with other weights than the trained ones, such as averages to evaluate.

        Weights that were written and are back do not count, as far as a few elements tell; nor do those that an
        optimizer can take back.
        """
        if self._left is None or self._copies.evaluated or (now := self._flat.versions()) == self._left[0]:
            return []
        before, rows = self._left
        if all(torch.equal(x, row.to(x.device)) for x, row in zip(self._flat.sample(), rows, strict=True)):
            return []
        return [slot.name for slot, was, is_ in zip(self._flat.slots, before, now, strict=True) if was != is_]

    def _in_groups(self) -> set[int]:
        return {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
