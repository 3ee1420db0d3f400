"""Models that FSDP2 shards, here over one process: what is refused, flat buffers, and states."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lsgd.client.control.island import Island, island_of
from lsgd.errors import ConfigError
from lsgd.flat import FlatParameters, describe
from lsgd.shards import full_state_dict, is_sharded, load_optimizer, local, local_state, mesh_of
from tests import golden


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = made()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def test_a_model_of_one_process_is_an_island_of_one(mesh) -> None:
    assert type(island_of(made())) is type(island_of(sharded(mesh))) is Island


def test_how_a_model_is_sharded_is_part_of_its_digest(mesh) -> None:
    (whole, _), (parts, words) = describe(made()), describe(sharded(mesh))
    assert whole != parts and "sharded as S(0) of (1,)" in words


def test_what_is_sharded_otherwise_is_refused(mesh) -> None:
    assert mesh_of(made()) is None
    partly = made()
    fully_shard(partly[0], mesh=mesh)
    with pytest.raises(ConfigError, match=golden.pattern("shards.not_sharded")):
        mesh_of(partly)
    replicated = made()
    fully_shard(replicated, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(ConfigError, match=golden.pattern("shards.one_mesh")):
        mesh_of(replicated)


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def test_vectors_are_the_shards_wherever_these_are(mesh, policy) -> None:
    model = made()
    fully_shard(model[0], mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    before = [local(p).data_ptr() for p in model.parameters()]
    flat = FlatParameters(model)
    assert [local(p).data_ptr() for p in model.parameters()] == before
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.ones(4, 3)
    for _ in range(2):
        model(x).sum().backward()  # the first pass puts other memory behind the shards
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(x)  # leaves the root gathered
    flat.find()
    for slot, own in zip(flat.slots, flat.layout.views([b.clone() for b in flat.buffers]), strict=True):
        assert is_sharded(slot.parameter) and torch.equal(own, local(slot.parameter))
    flat.buffers[0].zero_()
    assert not model(x).any()


def test_states_are_whole_again(mesh) -> None:
    model, plain = sharded(mesh), made()
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name]) and not is_sharded(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    saved = local_state(optimizer.state_dict())
    assert not any(is_sharded(x) for values in saved["state"].values() for x in values.values())
    other = sharded(mesh)
    restored = torch.optim.AdamW(other.parameters(), lr=0.5)
    load_optimizer(restored, saved)
    other(torch.ones(4, 3)).sum().backward()
    restored.step()
    assert restored.param_groups[0]["lr"] == 0.1
    assert is_sharded(restored.state[other[0].weight]["exp_avg"])
    assert restored.state[other[0].weight]["step"] == 2
