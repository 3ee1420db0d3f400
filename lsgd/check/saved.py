"""Reads the files that a script has saved, as far as they hold tensors."""

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lsgd.check.weights import digest_of


def loaded(path: Path) -> dict[str, str]:
    """Return digests of the tensors in a file, by their names; empty if it cannot be loaded, or has none.

    In a zip, such as NumPy's npz and what shutil.make_archive makes of a folder, each file is one of its own.
    """
    try:
        with path.open("rb") as file:
            found = _tensors(_read(path.name, file))
            return {name: digest_of(tensor) for name, tensor in found if tensor.layout == torch.strided}
    except OSError:  # such as an earlier checkpoint, which the script has deleted
        return {}


def _read(name: str, file: IO[bytes]) -> object:
    try:
        if name.endswith(".safetensors"):
            return safetensors.torch.load(file.read())
        if name.endswith(".npy"):
            return torch.from_numpy(np.load(file))
        return _unpacked(file) if zipfile.is_zipfile(file) else None
    except Exception:  # of any kind of file, in any state
        return None


def _unpacked(file: IO[bytes]) -> object:
    with zipfile.ZipFile(file) as archive:
        members = archive.namelist()
        if not any(each.endswith("/data.pkl") for each in members):
            return {each.removesuffix(".npy"): _read(each, io.BytesIO(archive.read(each))) for each in members}
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # it holds objects of libraries, too: the script has just written it
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)


def _tensors(found: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from _tensors(value, f"{name}/{key}" if name else str(key))
    elif isinstance(found, list | tuple):
        for number, value in enumerate(found):
            yield from _tensors(value, f"{name}/{number}")
