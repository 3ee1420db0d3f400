"""Damaged frames, a few; ``python tests/server/fuzz.py`` sends a million."""

import random

import pytest

from .fuzz import fuzz_decoder, fuzz_global, fuzz_local

FRAMES = 20_000


@pytest.mark.parametrize("fuzz", [fuzz_decoder, fuzz_global, fuzz_local])
def test_damaged_frames_change_nothing(fuzz) -> None:
    fuzz(FRAMES, random.Random(1))
