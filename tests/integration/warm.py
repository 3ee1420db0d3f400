"""Imported before workers are forked: loads algorithms and codecs, and compiles the kernels that most workers use."""

import sys
from pathlib import Path

import torch

from lsgd.algorithms import ALGORITHMS
from lsgd.codecs import CODECS, codec_of

list(ALGORITHMS)
list(CODECS)
x = torch.zeros(1 << 12)
for codec in map(codec_of, ("minmax8", "levels2")):
    codec.encode(x, codec.empty(x.numel(), x.device))
sys.path.insert(1, str(Path(__file__).parent / "light"))  # its digits
