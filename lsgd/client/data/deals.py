"""What all workers must deal alike, because each takes its part of it: facts, which the servers compare."""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lsgd.client.data.first import head_of
from lsgd.client.data.passes import Passes
from lsgd.client.data.samplers import digest_of


def facts_of(dataset: Any, passes: Passes) -> dict[str, str]:
    """Return what all workers must deal alike of a dataset with a length."""
    facts = {"length": str(passes.length), "rows": rows_of(dataset), "sampler": passes.name, "seed": str(passes.seed)}
    return {name: fact for name, fact in {**facts, "order": passes.order()}.items() if fact}


def facts_of_stream(stream: Any) -> dict[str, str]:
    """Return what all workers must deal alike of a stream: its class, and how many files it has if it says so."""
    pipeline = getattr(stream, "pipeline", None)
    files = getattr(pipeline[0], "urls", None) if pipeline else None
    facts = {"stream": type(stream).__name__, "rows": "" if files is None else digest_of([*map(str, files)])}
    return {name: fact for name, fact in facts.items() if fact}


def rows_of(dataset: Any) -> str:
    """Return a digest of which rows a dataset has, as far as that shows; empty: it does not.

    It does in indices, and in tensors of whole numbers. Others may differ between processors by a rounding.
    """
    seen = [*_rows_in(dataset)]
    return hashlib.blake2b(b"".join(seen), digest_size=8).hexdigest() if seen else ""


def _rows_in(dataset: Any) -> Iterator[bytes]:
    if isinstance(dataset, Subset):
        yield _numbers(dataset.indices)
        yield from _rows_in(dataset.dataset)
    elif isinstance(dataset, ConcatDataset | TensorDataset):
        for part in dataset.datasets if isinstance(dataset, ConcatDataset) else dataset.tensors:
            yield from _rows_in(part)
    elif isinstance(dataset, Tensor):
        if not dataset.is_floating_point() and not dataset.is_complex():
            yield head_of(dataset)
    elif (indices := getattr(dataset, "_indices", None)) is not None:  # of ``datasets``, after a split or a shuffle
        yield _numbers(indices.column(0))


def _numbers(indices: Any) -> bytes:
    return repr(indices).encode() if isinstance(indices, range) else np.asarray(indices).tobytes()


def place_in_script() -> str:
    """Return where the script has called lsgd: the file's name and the line, which are the same on all workers."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("lsgd."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
