"""What the servers compare: the gradients of the first step, and not the first inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lsgd.client.data.first import STEPS, FirstSteps


class Script:
    """A model, and what has been told of its first steps."""

    def __init__(self, *, exchanged: bool = False, seed: int = 0) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.told: list[tuple[str, ...]] = []
        self.first = FirstSteps(lambda *digests: self.told.append(digests))
        self.first.watch(self.model.parameters(), [self.optimizer], exchanged=exchanged)
        torch.manual_seed(seed)

    def step(self, *batches: Tensor, mask: Tensor | None = None) -> None:
        self.first.begin()
        self.optimizer.zero_grad()
        for batch in batches:
            self.first.note(batch)
            losses = self.model(batch).square().squeeze(1)
            (losses if mask is None else losses[mask]).sum().backward()
        self.optimizer.step()

    def says(self) -> tuple[str, ...]:
        (told,) = self.told
        return told


BOUNDARY, GRAPH = torch.ones(2, 3), torch.arange(12.0).view(4, 3)


def interior(script: Script, seed: int) -> None:
    script.model.eval()  # no noise
    script.step(BOUNDARY, torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)))


def masked(script: Script, seed: int) -> None:
    script.model.eval()  # no noise
    script.step(GRAPH, mask=torch.arange(4) % 2 == seed % 2)


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("train", [interior, masked])
def test_equal_first_inputs_alone_are_not_the_same(train: Callable[[Script, int], None], exchanged: bool) -> None:
    scripts = [Script(exchanged=exchanged) for _ in range(3)]
    for script, seed in zip(scripts, (1, 2, 1), strict=True):
        train(script, seed)
    one, other, again = (script.says() for script in scripts)
    assert one[1] == other[1] and one[0] != other[0]
    assert again == one


@pytest.mark.parametrize("exchanged", [False, True])
def test_equal_data_with_other_noise_is_not_the_same(exchanged) -> None:
    scripts = [Script(exchanged=exchanged, seed=seed) for seed in (0, 1)]
    for script in scripts:
        script.step(GRAPH)
    one, other = (script.says() for script in scripts)
    assert one[0] != other[0] and one[1] == other[1] and one[2] != other[2]


def test_a_step_without_a_gradient_says_nothing_and_the_next_one_does() -> None:
    script = Script()
    for _ in range(3):
        script.step(GRAPH, mask=torch.zeros(4, dtype=torch.bool))
    assert not script.told
    script.step(GRAPH)
    script.step(BOUNDARY)
    script.says()
    idle = Script()
    for _ in range(STEPS):
        idle.step(GRAPH, mask=torch.zeros(4, dtype=torch.bool))
    idle.step(GRAPH)
    assert not idle.told and not idle.first.compares


def test_several_optimizers_say_it_together_once_each_has_stepped() -> None:
    script = Script()
    second = torch.optim.SGD([script.model[2].weight], lr=0.1)
    script.first.watch(script.model.parameters(), [script.optimizer, second], exchanged=False)
    script.step(GRAPH)
    assert not script.told
    second.step()
    script.says()


def test_gradients_are_looked_at_before_they_are_exchanged() -> None:
    scripts = [Script(exchanged=True) for _ in range(2)]
    for number, script in enumerate(scripts):
        script.model(GRAPH + number).sum().backward()
        for parameter in script.model.parameters():
            parameter.grad.fill_(1.0)  # the mean of all workers'
        script.optimizer.step()
    assert scripts[0].says()[0] != scripts[1].says()[0]


def test_nothing_is_compared_where_it_is_meant_and_the_hooks_go() -> None:
    script = Script(exchanged=True)
    script.first.tell_nothing()
    script.step(GRAPH)
    assert not script.told and not script.optimizer._optimizer_step_post_hooks
    assert not any(x._post_accumulate_grad_hooks for x in script.model.parameters())


def test_sparse_gradients_are_compared_too() -> None:
    told = []
    for row in (0, 1):
        torch.manual_seed(0)
        model = nn.Embedding(3, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = FirstSteps(lambda *digests: told.append(digests))
        first.watch(model.parameters(), [optimizer], exchanged=False)
        (model(torch.tensor([row])).sum() * (row + 1)).backward()
        optimizer.step()
    assert len(told) == 2 and told[0][0] != told[1][0]


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_data_of_two_steps_is_told_too_unless_it_is_always_the_same(exchanged) -> None:
    """A newcomer's gradients are of another model than the others' first ones; a graph is the same in each step."""
    told = []
    for seed, second in ((0, BOUNDARY), (1, BOUNDARY), (0, BOUNDARY + 1), (0, GRAPH)):
        script = Script(exchanged=exchanged, seed=seed)
        for batches in ((GRAPH, BOUNDARY), (second, GRAPH), (BOUNDARY,)):
            script.step(*batches)
        assert script.told[0][0] != script.told[0][1] and not script.first.compares
        told.append(script.told[1:])
    ((one, data, noise),), again, other, fixed = told
    assert one == data and not noise
    assert again == [(one, one, "")] and len(other) == 1 and other[0][0] != one
    assert fixed == []
