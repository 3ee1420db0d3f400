"""The loss window: its mean, and that nothing waits for a device."""

import math

import pytest
import torch

from lsgd.client.iteration.reports import MAX_PENDING, LossWindow
from lsgd.errors import ConfigError
from tests import golden


def test_the_mean_is_that_of_the_last_losses() -> None:
    window = LossWindow(3)
    assert window.mean() is None
    window.add(1.0)
    assert window.mean() == 1.0
    for loss in (torch.tensor(2.0, requires_grad=True) * 1, torch.tensor([[4.0]]), 6):
        window.add(loss)
    assert window.mean() == 4.0
    window.add(torch.tensor(2.0, dtype=torch.bfloat16))
    assert window.mean() == 4.0


def test_a_loss_that_is_no_number_makes_the_mean_none_until_it_is_out_of_the_window() -> None:
    window = LossWindow(2)
    for loss in (1.0, float("nan")):
        window.add(loss)
    assert math.isnan(window.mean() or 0.0)
    for _ in range(2):
        window.add(3.0)
    assert window.mean() == 3.0


def test_a_window_says_why_it_elects_nobody() -> None:
    window = LossWindow(2)
    assert window.trouble() == golden.text("loss.no_loss")
    window.add(1.0)
    assert window.trouble() == window.broken() == ""
    window.add(math.inf)
    assert window.trouble() == golden.text("loss.nonfinite")
    assert window.broken().startswith(golden.text("loss.lower_rate"))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (torch.ones(3), "a tensor of (3,)"),
        (torch.ones(1, dtype=torch.complex64), "a complex tensor of (1,)"),
        ("hello", "a str: 'hello'"),
        (None, "a NoneType: None"),
        (1j, "a complex: 1j"),
        (10**400, golden.text("loss.beyond_floats")),
    ],
)
def test_what_is_no_loss_is_refused_with_the_call_to_mend(loss: object, said: str) -> None:
    window = LossWindow(2)
    with pytest.raises(ConfigError, match=golden.pattern("loss.one_number", said=said)):
        window.add(loss)  # type: ignore[arg-type]
    assert window.mean() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_on_a_gpu_is_read_without_waiting_for_it() -> None:
    window = LossWindow(4)
    x = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    with_sync_debug = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")  # whatever waits for the GPU raises
    try:
        torch.cuda._sleep(200_000_000)  # the GPU is busy for about 0.1 s
        window.add(x.sum())
        assert window.mean() is None
    finally:
        torch.cuda.set_sync_debug_mode(with_sync_debug)
    torch.cuda.synchronize()
    assert window.mean() == 1.0
    for _ in range(MAX_PENDING + 10):
        window.add(x.sum() * 3)
    assert window.mean() == 3.0
