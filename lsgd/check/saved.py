"""Reads the files that a script has saved, as far as they hold tensors."""

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from lsgd.check.weights import digest_of


def loaded(path: Path) -> dict[str, str]:
    """Return digests of the tensors in a file, by their names; empty if it cannot be loaded, or has none."""
    try:
        if path.suffix == ".safetensors":
            found: object = load_file(path)
        else:
            found = _unpickled(path)
    except Exception:  # of any kind of file, in any state
        return {}
    return {name: digest_of(tensor) for name, tensor in _tensors(found) if tensor.layout == torch.strided}


def _unpickled(path: Path) -> object:
    """Return what a file of torch.save holds; with objects of libraries in it, too: the script has just written it."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return torch.load(path, map_location="cpu", weights_only=False)


def _tensors(found: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from _tensors(value, f"{name}/{key}" if name else str(key))
    elif isinstance(found, list | tuple):
        for number, value in enumerate(found):
            yield from _tensors(value, f"{name}/{number}")
