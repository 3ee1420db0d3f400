"""The probe: a model's loss on a batch that all workers have in common, by which ``election = "probe"`` elects."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lsgd.errors import ConfigError


@torch.no_grad()
def probe_loss(model: nn.Module, evaluate: Callable[[], Tensor | float]) -> float:
    """Return what ``evaluate`` returns, without gradients and in evaluation mode; afterwards modes are as before.

    Raises:
        ConfigError: that is not one number.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        loss = evaluate()
    finally:
        for module in training:
            module.training = True
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ConfigError(f"the probe returns its loss as one number, not as a tensor of {tuple(loss.shape)}")
    return float(loss)
