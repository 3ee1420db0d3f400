"""The probe of ``election = "probe"``: a model's loss on a batch that all workers share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lsgd.errors import ConfigError


@torch.no_grad()
def probe_loss(model: nn.Module, evaluate: Callable[[], Tensor | float]) -> float:
    """Return the result of ``evaluate``, without gradients and in evaluation mode; restores the modules' modes.

    Raises ConfigError if the result is not one number.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        loss = evaluate()
    finally:
        for module in training:
            module.training = True
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ConfigError(f"a probe must return its loss as one number, not a tensor of shape {tuple(loss.shape)}")
    return float(loss)
