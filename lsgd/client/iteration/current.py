"""The algorithm of the run's current phase on one worker."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from lsgd.algorithms.base import Algorithm, is_muon
from lsgd.flat import FlatParameters
from lsgd.layers import layers_of
from lsgd.plan.plan import algorithm_of
from lsgd.settings import AlgorithmSettings, same_form

logger = logging.getLogger("lsgd")


class CurrentAlgorithm:
    """Takes up the algorithm that a round has.

    Args:
        run: for its seeds.
        resumed: settings and state of a checkpoint, with which the first round starts if its algorithm has the same
            form.

    Attributes:
        algorithm: of the current phase, on the worker's parameters.
    """

    def __init__(
        self,
        settings: AlgorithmSettings,
        flat: FlatParameters,
        optimizers: Sequence[torch.optim.Optimizer],
        run: str,
        resumed: tuple[AlgorithmSettings, dict[str, Any]] | None,
    ) -> None:
        self._flat, self._run, self._muon = flat, run, is_muon(optimizers)
        self._layers = layers_of([(slot.name, slot.buffer, slot.offset) for slot in flat.slots], flat.layout.lengths)
        self._resumed, self._text = resumed, ""
        self.algorithm = self._create(settings)

    def _create(self, settings: AlgorithmSettings) -> Algorithm:
        algorithm = settings.create(self._flat.buffers, self._run)
        algorithm.muon, algorithm.layers = self._muon, self._layers
        return algorithm

    def take_up(self, text: str) -> bool:
        """Switch to a round's algorithm and settings; return whether it is a new algorithm, with fresh state."""
        if not text or text == self._text:
            return False
        settings = algorithm_of(json.loads(text), "the server's round")
        fresh = not same_form(settings, self.algorithm.settings)
        if fresh:
            self.algorithm = self._create(settings)
        self.algorithm.settings, self._text = settings, text
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not same_form(resumed[0], settings):
            logger.warning(
                "the checkpoint is of %s with other settings, so %s begins anew: what it has kept beside the model, "
                "such as momentum or rounding residuals, is not taken over",
                *(resumed[0].name, settings.name),
            )
        elif resumed is not None:
            device = self._flat.buffers[0].device
            moved = _pytree.tree_map_only(Tensor, lambda x: x.to(device), resumed[1])
            self.algorithm.load_state_dict(self.algorithm.state_dict() | moved)  # the checkpoint may lack some entries
        return fresh
