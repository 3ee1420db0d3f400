"""Flat parameters: the model does not notice, and what would go wrong silently is said."""

import copy
import io

import pytest
import torch
from torch import nn

from lsgd.errors import ConfigError, DetachedError
from lsgd.flat import ALIGNMENT_NBYTES, FlatParameters, describe, floating_buffers


class Odd(nn.Module):
    """Everything that a model's parameters can be: several dtypes, frozen, tied, channels_last, empty, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.low = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_model_keeps_its_values_objects_and_strides() -> None:
    model = Odd()
    before, objects = snapshot(model), list(model.parameters())
    strides = [p.stride() for p in objects]
    flat = FlatParameters(model)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
    assert [p.stride() for p in objects] == strides
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.head.weight is model.embedding.weight
    assert {b.dtype for b in flat.buffers} == {torch.float32, torch.bfloat16}
    flat.check()


def test_a_change_of_the_buffer_is_one_of_the_model_and_the_other_way_round() -> None:
    model = Odd()
    flat = FlatParameters(model)
    frozen = model.frozen.weight.clone()
    for buffer in flat.buffers:
        buffer.fill_(3.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(bool((p == 3).all()) for p in trained)
    assert torch.equal(model.frozen.weight, frozen)

    optimizer = torch.optim.SGD(trained, lr=1.0)
    x = torch.ones(2, 4)
    model.head(x).sum().backward()
    optimizer.step()
    assert torch.equal(model.embedding.weight, torch.full((6, 4), 1.0))
    assert flat.buffers[0].eq(1.0).sum() == 24


def test_parameters_are_aligned_and_the_padding_is_zero() -> None:
    model = Odd()
    flat = FlatParameters(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.data_ptr() % ALIGNMENT_NBYTES == 0 for p in trained if p.numel())
    total = sum(b.double().sum().item() for b in flat.buffers)
    assert total == pytest.approx(sum(p.double().sum().item() for p in trained), rel=1e-12)


def test_tied_parameters_are_there_once() -> None:
    tied = Odd()
    untied = Odd()
    untied.head.weight = nn.Parameter(untied.head.weight.clone())
    sizes = [sum(b.nbytes for b in FlatParameters(model).buffers) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == -(-6 * 4 * 4 // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def test_windows_onto_other_buffers_have_the_shapes_and_strides_of_the_model() -> None:
    model = Odd()
    flat = FlatParameters(model)
    values = dict(zip([s.name for s in flat.slots], flat.layout.views([b.clone() for b in flat.buffers]), strict=True))
    assert values.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, value in values.items():
        assert torch.equal(value, model.get_parameter(name))
        assert value.stride() == model.get_parameter(name).stride()
        assert value.data_ptr() != model.get_parameter(name).data_ptr() or not value.numel()


def test_a_saved_submodule_has_its_own_bytes_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(1000, 1000))
    FlatParameters(model)
    stream = io.BytesIO()
    torch.save(model[0].state_dict(), stream)
    assert len(stream.getvalue()) < 5_000
    loaded = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    assert torch.equal(loaded["weight"], model[0].weight)


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = Odd()
    flat = FlatParameters(model)
    twin = copy.deepcopy(model)
    before = snapshot(twin)
    for buffer in flat.buffers:
        buffer.zero_()
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert twin.head.weight is twin.embedding.weight
    flat.check()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    flat.check()


def test_loading_a_state_dict_keeps_the_windows() -> None:
    model = Odd()
    state = snapshot(model)
    flat = FlatParameters(model)
    flat.buffers[0].zero_()
    model.load_state_dict(state)
    flat.check()
    assert torch.equal(model.conv.weight, state["conv.weight"])
    assert flat.buffers[0].count_nonzero() > 0


def replace_data(model: Odd) -> None:
    model.low.weight.data = torch.zeros(3, 7, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.to(torch.float64), "scale"),
        (lambda m: m.low.half(), "low.weight"),
        (replace_data, "low.weight"),
        (lambda m: m.conv.to(memory_format=torch.contiguous_format), "conv.weight"),
    ],
)
def test_a_replaced_parameter_is_noticed_and_named(change, name) -> None:
    model = Odd()
    flat = FlatParameters(model)
    change(model)
    with pytest.raises(DetachedError, match=f"the parameter {name} was replaced after Worker.join"):
        flat.check()


def test_a_thawed_parameter_is_noticed() -> None:
    model = Odd()
    flat = FlatParameters(model)
    model.frozen.weight.requires_grad_()
    with pytest.raises(DetachedError, match=r"of shape \(4, 4\) was frozen at Worker.join and is trainable now"):
        flat.check()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (nn.Linear(2, 2, device="meta"), "the parameter weight is on the meta device"),
        (
            nn.ParameterList([nn.Parameter(torch.eye(3)), nn.Parameter(torch.eye(3).to_sparse())]),
            "the parameter 1 is of layout torch.sparse_coo",
        ),
        (nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "0 is torch.complex64"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_and_nothing_is_changed(model, message) -> None:
    addresses = [p.data_ptr() for p in model.parameters() if p.layout == torch.strided]
    with pytest.raises(ConfigError, match=message):
        FlatParameters(model)
    assert addresses == [p.data_ptr() for p in model.parameters() if p.layout == torch.strided]


def test_descriptions_differ_where_models_do() -> None:
    wide, odd = nn.Linear(4, 5), Odd()
    digests = {describe(m)[0] for m in (wide, odd, nn.Linear(5, 4), nn.Linear(4, 5).double())}
    assert len(digests) == 4
    assert describe(wide) == describe(nn.Linear(4, 5))
    assert describe(odd) != describe(Odd().requires_grad_(False))
    assert "25 parameters in 2 tensors of float32" in describe(wide)[1]


def test_another_memory_format_is_another_description_where_buffers_differ() -> None:
    wide, narrow = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 1)
    for model, differs in ((wide, True), (narrow, False)):
        usual = describe(model)
        other = describe(model.to(memory_format=torch.channels_last))
        assert (usual[0] != other[0]) is ("2 tensors of float32, 1 of them in another memory format" in other[1])
        assert (usual[0] != other[0]) is differs


def test_only_buffers_with_numbers_to_average_are_exchanged() -> None:
    model = Odd()
    model.register_buffer("table", torch.arange(3))
    model.register_buffer("empty", torch.empty(0))
    buffers = floating_buffers(model)
    assert [id(b) for b in buffers] == [id(model.norm.running_mean), id(model.norm.running_var)]
