"""What rounds change on a worker: its model, its optimizers, and the state of the algorithm."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from lsgd.algorithms.base import clones
from lsgd.client.checkpoint.finite import FiniteCheck
from lsgd.client.control.joining import Membership
from lsgd.errors import DetachedError
from lsgd.flat import FlatParameters
from lsgd.plan.plan import algorithm_of
from lsgd.settings import AlgorithmSettings, same_form
from lsgd.shards import full_state_dict


class Replica:
    """One worker's copy of what the run trains.

    Args:
        membership: this worker's place in the run.
        flat: the model's parameters.
        model: the model.
        optimizers: their state goes to newcomers, if the plan says so.
        finite: knows which of the model's buffers are averaged.
        resumed: settings and state of the algorithm in a checkpoint; the first round starts with that state if its
            algorithm has the same form.

    Attributes:
        algorithm: of the run's current phase.
        consensus_distance: how far the models were from their mean just before the consensus; None until then.
        leader_model: the leader's model just before the consensus: flat parameters, then buffers; empty until then.
    """

    def __init__(
        self,
        membership: Membership,
        flat: FlatParameters,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        finite: FiniteCheck,
        resumed: tuple[AlgorithmSettings, dict[str, Any]] | None = None,
    ) -> None:
        self.run = membership.plan.run
        self.device = membership.device
        self.flat = flat
        self.model = model
        self.optimizers = list(optimizers)
        self.finite = finite
        run, shard = membership.welcome.run, membership.island.rank
        self._run_id = f"{run}/{shard}" if shard else run  # each shard has its own seeds for rounding
        self.algorithm = membership.plan.algorithm.create(flat.buffers, self._run_id)
        self.consensus_distance: float | None = None
        self.leader_model: list[Tensor] = []
        self._stepped = self._in_groups()
        self._resumed = resumed
        self._text = ""

    @property
    def lockstep(self) -> bool:
        """Whether every iteration is a round."""
        return self.algorithm.settings.schedule().lockstep

    @property
    def elects(self) -> bool:
        """Whether elected workers give others something of their models."""
        return self.algorithm.settings.elects or "leader" in (self.run.consensus, self.run.buffers)

    def check(self) -> None:
        """Check that the model and the optimizers still have the parameters that were joined.

        Raises:
            DetachedError: one was replaced, added or removed, so its training would not be exchanged.
        """
        self.flat.check()
        if lost := self._stepped - self._in_groups():
            name = next((s.name for s in self.flat.slots if id(s.parameter) in lost), "a frozen one")
            raise DetachedError(
                f"the optimizers' parameter groups have lost the parameter {name} since Worker.join, so it is not "
                f"trained; change param_groups before the join"
            )

    def _in_groups(self) -> set[int]:
        """Return the identities of the optimizers' parameters."""
        return {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}

    def take_up(self, text: str) -> bool:
        """Switch to a round's algorithm and settings; return whether it is a new algorithm, with fresh state."""
        if not text or text == self._text:
            return False
        settings = algorithm_of(json.loads(text), "the server's round")
        fresh = not same_form(settings, self.algorithm.settings)
        if fresh:
            self.algorithm = settings.create(self.flat.buffers, self._run_id)
        self.algorithm.settings, self._text = settings, text
        resumed, self._resumed = self._resumed, None
        if resumed is not None and same_form(resumed[0], settings):
            device = self.flat.buffers[0].device
            moved = _pytree.tree_map_only(Tensor, lambda x: x.to(device), resumed[1])
            self.algorithm.load_state_dict(self.algorithm.state_dict() | moved)  # the checkpoint may lack some entries
        return fresh

    def drop_gradients(self) -> None:
        """Drop the gradients, so that an optimizer's step changes nothing."""
        for slot in self.flat.slots:
            slot.parameter.grad = None

    @torch.no_grad()
    def leader_state_dict(self) -> dict[str, Tensor] | None:
        """Return the leader's model just before the consensus, as :func:`full_state_dict` does; None until then."""
        if not self.leader_model:
            return None
        with self.flat.current():
            tensors = [*self.flat.buffers, *self.finite.buffers()]
            own = clones(tensors)
            put(tensors, self.leader_model)
        state = full_state_dict(self.model)
        with self.flat.current():
            put(tensors, own)
        return state


def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to tensors of the same sizes; shapes may differ."""
    for x, value in zip(tensors, values, strict=True):
        x.copy_(value.view(x.shape))
