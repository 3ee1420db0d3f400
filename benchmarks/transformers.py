"""Small transformers: a decoder of bytes and a classifier of images."""

import math

from torch import Tensor, nn
from torch.nn import functional


class Transformer(nn.Module):
    """A decoder of bytes or other tokens, with tied embeddings (GPT-2's blocks, without dropout)."""

    def __init__(self, width: int, layers: int, heads: int, context: int, tokens: int = 256) -> None:
        super().__init__()
        self.bytes = nn.Embedding(tokens, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        _initialize(self, self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next tokens, shape (windows, context, tokens), for tokens (windows, context)."""
        y = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        return functional.linear(self.norm(y), self.bytes.weight)


class VisionTransformer(nn.Module):
    """A classifier of grey images in square patches (ViT, arXiv 2010.11929, with the mean over places for its token).

    Args:
        width: of a place's vector.
        layers: blocks.
        heads: of each attention.
        side: of the images, in pixels.
        patch: side of a patch.
        classes: number of them.
    """

    def __init__(self, width: int, layers: int, heads: int, side: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patch = patch
        self.enter = nn.Linear(patch * patch, width)
        self.places = nn.Embedding((side // patch) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)
        _initialize(self, self.blocks)
        nn.init.normal_(self.enter.weight, std=1 / patch)  # as large as a place's vector is wide
        nn.init.normal_(self.places.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape (images, classes), for images (images, 1, side, side)."""
        y = self.enter(functional.unfold(x, self.patch, stride=self.patch).transpose(1, 2)) + self.places.weight
        for block in self.blocks:
            y = block(y)
        logits: Tensor = self.classify(self.norm(y).mean(1))
        return logits


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.widen, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape of its input (windows, context, width)."""
        projected = self.project(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each (inputs, heads, places, width of a head)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.mix(attended.transpose(1, 2).flatten(-2))
        x = x + self.shrink(functional.gelu(self.widen(self.norm_perceptron(x))))
        return x


def _initialize(model: nn.Module, blocks: nn.ModuleList) -> None:
    """Draw the weights as GPT-2 does."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    for block in blocks:  # the sum of the residuals keeps its size
        assert isinstance(block, Block)
        for last in (block.mix, block.shrink):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * len(blocks)))
