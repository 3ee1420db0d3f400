"""What the codec minmax8 in torch and its kernels share: the numbers of its arithmetic, and its random bits.

The bits come from Philox4x32-7 (Salmon, Moraes, Dror and Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011,
section 3.3). Seven rounds are the fewest that pass BigCrush; the paper's default is ten.
"""

from __future__ import annotations

from typing import Final

from lsgd.lazy import Tensor, torch

LEVELS: Final = 255
SMALLEST_UNIT: Final = 2.0**-126
BIG: Final = 2.0**126
BIG_UNIT: Final = 2.0**118
HALF_OF_MAX: Final = (2 - 2.0**-23) * 2.0**126

ROUNDS: Final = 7
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
LANES: Final = 8

_MASK: Final = 0xFFFFFFFF


def philox(counter: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of each call, as int64; ``seed`` is the 64-bit key.

    ``counter`` is int64 and not negative; the upper two words of the 128-bit counter are zero.
    """
    words = (counter & _MASK, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter))
    keys = (seed & _MASK, seed >> 32)
    for _ in range(ROUNDS):
        # An int64 product wraps; the bits that mask and shift keep are those of the unsigned product.
        product0 = words[0] * MULTIPLIERS[0]
        product1 = words[2] * MULTIPLIERS[1]
        words = (
            ((product1 >> 32) & _MASK) ^ words[1] ^ keys[0],
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ words[3] ^ keys[1],
            product0 & _MASK,
        )
        keys = ((keys[0] + KEY_STEPS[0]) & _MASK, (keys[1] + KEY_STEPS[1]) & _MASK)
    return words


def dither(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each element from start to stop, int32 in 0..65535, shape (stop - start,).

    Element i takes lane i % 8 of call i // 8; lane k is half k % 2 (the low one first) of word k // 2.
    """
    first = start // LANES
    calls = torch.arange(first, -(-stop // LANES), dtype=torch.int64, device=device)
    lanes = torch.stack([half for word in philox(calls, seed) for half in (word & 0xFFFF, word >> 16)], dim=1)
    return lanes.view(-1)[start - first * LANES : stop - first * LANES].to(torch.int32)
