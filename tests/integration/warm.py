"""Imported before workers are forked: reads the registries and compiles the kernels that most workers use, once."""

from lsgd.algorithms import ALGORITHMS
from lsgd.codecs import CODECS, codec_of
from lsgd.kernels import few_bits
from lsgd.kernels.dispatch import path_for

list(ALGORITHMS)
list(CODECS)
path_for("cpu")
levels2 = codec_of("levels2")
few_bits.path("cpu", levels2.family, levels2.unit, *levels2.form)  # type: ignore[attr-defined]
