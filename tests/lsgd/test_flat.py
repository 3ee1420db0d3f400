"""Flat parameters: the model does not notice, and what would go wrong silently is said."""

import copy

import pytest
import torch
from torch import nn

from lsgd.errors import ConfigError, LsgdError
from lsgd.flat import ALIGNMENT_NBYTES, FlatParameters, describe, floating_buffers
from tests import golden


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


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def test_nothing_of_the_model_changes() -> None:
    model = Odd()
    before, objects = snapshot(model), list(model.parameters())
    places = [(p.data_ptr(), p.stride(), p._version, p.untyped_storage().data_ptr()) for p in objects]
    flat = FlatParameters(model)
    flat.find()

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
    assert [(p.data_ptr(), p.stride(), p._version, p.untyped_storage().data_ptr()) for p in objects] == places
    assert model.head.weight is model.embedding.weight
    assert {b.dtype for b in flat.buffers} == {torch.float32, torch.bfloat16}


def test_a_change_of_a_vector_is_one_of_the_model_and_the_other_way_round() -> None:
    model = Odd()
    flat = FlatParameters(model)
    frozen = model.frozen.weight.clone()
    for buffer in flat.buffers:
        buffer.fill_(3.0)
    assert all(bool((p == 3).all()) for p in trained(model))
    assert torch.equal(model.frozen.weight, frozen)

    optimizer = torch.optim.SGD(trained(model), lr=1.0)
    x = torch.ones(2, 4)
    model.head(x).sum().backward()
    optimizer.step()
    assert torch.equal(model.embedding.weight, torch.full((6, 4), 1.0))
    assert flat.buffers[0].eq(1.0).sum() == 24


def test_torch_notices_that_a_weight_changes_under_a_live_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    flat = FlatParameters(model)
    for change in (lambda x: x.copy_(torch.ones(x.shape)), lambda x: x.lerp_(torch.ones(x.shape), 0.5), torch.zero_):
        loss = model(torch.ones(1, 3)).sum()
        change(flat.buffers[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(torch.ones(1, 3)).sum().backward()


def test_parameters_are_aligned_and_the_padding_is_zero() -> None:
    model = Odd()
    flat = FlatParameters(model)
    assert all(slot.offset * slot.parameter.element_size() % ALIGNMENT_NBYTES == 0 for slot in flat.slots)
    total = sum(b.double().sum().item() for b in flat.buffers)
    assert total == pytest.approx(sum(p.double().sum().item() for p in trained(model)), rel=1e-12)


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
        assert value._base is None  # so that optimizers may detach gradients in place


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = Odd()
    flat = FlatParameters(model)
    twin = copy.deepcopy(model)
    before = snapshot(twin)
    for buffer in flat.buffers:
        buffer.zero_()
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert twin.head.weight is twin.embedding.weight
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    flat.find()


def replace_data(model: Odd) -> None:
    model.low.weight.data = torch.full((3, 7), 2.0, dtype=torch.bfloat16)


def replace_parameter(model: Odd) -> None:
    model.low.weight = nn.Parameter(torch.full((3, 7), 2.0, dtype=torch.bfloat16))


def replace_module(model: Odd) -> None:
    model.low = nn.Linear(7, 3, dtype=torch.bfloat16)


def assign_state(model: Odd) -> None:
    model.load_state_dict({name: value + 1 for name, value in Odd().state_dict().items()}, assign=True)
    model.head.weight = model.embedding.weight  # as it was: torch makes two of them


def join_in_one_memory(model: Odd) -> None:
    """What cuDNN does with the weights of an LSTM, in flatten_parameters()."""
    weights = [model.head.weight, model.norm.weight, model.norm.bias]
    memory = torch.cat([p.detach().reshape(-1) for p in weights])
    for p, part in zip(weights, memory.split([p.numel() for p in weights]), strict=True):
        p.data = part.view(p.shape)


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        replace_parameter,
        replace_module,
        assign_state,
        join_in_one_memory,
        lambda m: m.conv.to(memory_format=torch.contiguous_format),
        lambda m: setattr(m, "low", nn.Sequential(m.low)),  # its parameters have other names now
    ],
)
def test_parameters_are_found_wherever_they_are(change) -> None:
    model = Odd()
    flat = FlatParameters(model)
    change(model)
    flat.find()
    for slot, own in zip(flat.slots, flat.layout.views([b.clone() for b in flat.buffers]), strict=True):
        assert slot.parameter in set(model.parameters()) and torch.equal(own, slot.parameter)
    for buffer in flat.buffers:
        buffer.copy_(torch.arange(len(buffer)))
    for slot, new in zip(flat.slots, flat.layout.views([b.clone() for b in flat.buffers]), strict=True):
        assert torch.equal(new, slot.parameter) and new.reshape(-1).sum() == slot.parameter.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.to(torch.float64), "scale had the shape () in torch.float32, and is () in torch.float64"),
        (lambda m: setattr(m, "low", nn.Linear(7, 2, dtype=torch.bfloat16)), "low.weight had the shape (3, 7)"),
        (lambda m: m.norm.register_parameter("bias", None), "norm.bias was removed"),
        (lambda m: m.frozen.weight.requires_grad_(), golden.text("flat.was_frozen")),
        (lambda m: setattr(m, "more", nn.Linear(1, 1)), golden.text("flat.more_was_frozen")),
    ],
)
def test_another_set_of_parameters_is_an_error_that_names_one(change, message) -> None:
    model = Odd()
    flat = FlatParameters(model)
    change(model)
    with pytest.raises(LsgdError, match=golden.pattern("flat.parameter", message=message)):
        flat.find()


def test_a_layer_that_is_to_train_later_is_joined_and_then_frozen() -> None:
    model = Odd()
    flat = FlatParameters(model)
    for thawed in (False, True):
        model.low.requires_grad_(thawed)
        flat.find()
        assert model.frozen.weight in set(flat.frozen) and model.low.weight not in set(flat.frozen)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (nn.Linear(2, 2, device="meta"), golden.pattern("flat.on_meta")),
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
    assert golden.text("flat.elements") in describe(wide)[1]


def test_another_memory_format_is_another_description_where_buffers_differ() -> None:
    wide, narrow = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 1)
    for model, differs in ((wide, True), (narrow, False)):
        usual = describe(model)
        other = describe(model.to(memory_format=torch.channels_last))
        assert (usual[0] != other[0]) is (golden.text("flat.memory_format") in other[1])
        assert (usual[0] != other[0]) is differs


def test_only_buffers_with_numbers_to_average_are_exchanged() -> None:
    model = Odd()
    model.register_buffer("table", torch.arange(3))
    model.register_buffer("empty", torch.empty(0))
    buffers = floating_buffers(model)
    assert [id(b) for b in buffers] == [id(model.norm.running_mean), id(model.norm.running_var)]
