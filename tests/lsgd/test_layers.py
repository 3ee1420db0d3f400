"""The layers of a model: few enough to look at, and together all of it."""

from collections import Counter

import pytest
import torch

from lsgd.layers import MOST, WHOLE, Layers, layers_of


def blocks(number: int) -> list[str]:
    """Return the names of the parameters of a transformer of so many blocks, as torch.compile has them."""
    parts = [
        f"h.{i}.{part}.{kind}" for i in range(number) for part in ("attn", "mlp.up") for kind in ("weight", "bias")
    ]
    return [f"_orig_mod.{name}" for name in ("wte.weight", *parts, "ln.weight", "head.weight")]


def made(names: list[str]) -> Layers:
    """Return the layers of parameters of 10 elements each, every second one in a vector of its own, with padding."""
    vectors = [index % 2 for index in range(len(names))]
    starts = [16 * (index // 2) for index in range(len(names))]
    lengths = [16 * vectors.count(vector) for vector in range(max(vectors) + 1)]
    return layers_of(list(zip(names, vectors, starts, strict=True)), lengths)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["weight", "bias"], ("weight", "bias")),
        (["0.weight", "0.bias", "2.weight", "2.bias"], ("0", "2")),
        (blocks(2), ("wte", "h.0.attn", "h.0.mlp.up", "h.1.attn", "h.1.mlp.up", "ln", "head")),
        (blocks(12), ("wte", *(f"h.{i}" for i in range(12)), "ln", "head")),
        (blocks(22), ("wte-h.0", *(f"h.{i}-{i + 1}" for i in range(1, 21, 2)), "h.21-ln", "head")),
        (["a b.weight"], ("a_b",)),
    ],
)
def test_layers_are_modules_of_one_depth_or_neighbours_together(names: list[str], shown: tuple[str, ...]) -> None:
    assert made(names).names == shown and len(shown) <= MOST


@pytest.mark.parametrize("names", [["weight", "bias"], blocks(3), blocks(100)])
def test_parts_are_all_of_a_vector_wherever_it_is_cut(names: list[str]) -> None:
    layers = made(names)
    for vector, spans in enumerate(layers.spans):
        x = torch.arange(spans[-1][0])
        whole = Counter({layer: part.numel() for layer, part in layers.parts(vector, 0, x)})
        assert sum(whole.values()) == len(x)
        for cut in (0, 7, 16, 25, len(x)):
            pieces = [
                part for start, piece in ((0, x[:cut]), (cut, x[cut:])) for part in layers.parts(vector, start, piece)
            ]
            assert torch.equal(torch.cat([part for _, part in pieces]), x)
            assert sum((Counter({layer: len(part)}) for layer, part in pieces), Counter()) == whole
    assert [(layer, len(part)) for layer, part in WHOLE.parts(3, 5, torch.zeros(4))] == [(0, 4)]
