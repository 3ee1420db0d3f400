"""What the integrations pass to the join."""

import torch
from torch import nn

from lsgd.client.worker import Worker
from lsgd.integrations.shared import Integration


def test_the_trainers_scaler_is_saved_beside_the_objects_of_the_user(monkeypatch) -> None:
    monkeypatch.setattr(Worker, "join", lambda model, optimizers, **options: options)
    scaler, own, model = torch.amp.GradScaler("cpu"), nn.Linear(1, 1), nn.Linear(1, 1)
    joined = Integration("the Trainer", True, {"timeout_s": 1.0, "extra": {"own": own}})._join(model, [], scaler, 3)
    assert joined == {"timeout_s": 1.0, "extra": {"own": own, "lsgd_scaler": scaler}, "step": 3}
    assert Integration("the Trainer", True, {"step": 5})._join(model, [], None, 0) == {"extra": {}, "step": 5}
