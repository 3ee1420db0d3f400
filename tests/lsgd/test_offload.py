"""Offloaded: an algorithm whose tensors are in host memory computes the same, bit by bit."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from lsgd.algorithms import ALGORITHMS
from lsgd.flat import FlatParameters
from lsgd.testing.simulation import SimulatedWorker, simulate

CASES = [
    ("leader", {"period": 4, "local_period": 2}),
    ("leader", {"period": 4, "local_period": 4, "compression": "minmax8", "delay": 2, "proximal_global": 0.0}),
    ("elastic", {"period": 2}),
    ("local", {"period": 2}),
    ("local", {"period": 4, "fragments": 2, "delay": 1, "compression": "none", "outer_momentum": 0.5}),
    ("sparse", {"period": 2, "hierarchical": False}),
    ("decentralized", {}),
    ("low_precision_decentralized", {"block": 64}),
]


class Model(nn.Module):
    """Two layers of different dtypes, the second one with strides of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 40)
        self.second = nn.Linear(40, 3, dtype=torch.bfloat16)
        self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).to(torch.bfloat16)).float()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_same_bits(name, options):
    settings = ALGORITHMS[name](**options)

    def trained(offload):
        torch.manual_seed(0)  # which all threads have in common
        models, inputs = [Model() for _ in range(4)], torch.randn(4, 16, 5)

        def member(group):
            model, x = models[group.rank], inputs[group.rank]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            worker = SimulatedWorker.of_model(group, settings, model, optimizer, offload=offload)
            for _ in range(13):
                worker.step(lambda: (model(x) - x[:, :3]).square().mean())
            worker.settle()
            return list(model.parameters()), worker.algorithm.state_dict()

        return simulate([2, 1, 1], member)

    beside, offloaded = (_pytree.tree_leaves(trained(offload)) for offload in (False, True))
    for one, other in zip(beside, offloaded, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nothing_is_on_the_gpu_beside_the_model():
    model = nn.Linear(1000, 1000, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    flat = FlatParameters(model, offload=True)
    algorithm = ALGORITHMS["diloco"]().create(flat.buffers)
    flat.buffers[0].copy_(torch.full_like(algorithm.common[0], 2.0))
    assert not any(x.is_cuda for x in [*flat.buffers, *algorithm.common])
    assert torch.cuda.max_memory_allocated() == before and bool((model.weight == 2).all())
