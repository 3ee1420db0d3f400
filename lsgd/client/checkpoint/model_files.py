"""Saves the whole model as safetensors files, with the names and index that Hugging Face's libraries expect."""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lsgd.client.checkpoint.file import holds
from lsgd.client.control.island import Island
from lsgd.errors import ConfigError, LsgdError
from lsgd.shards import state_of, whole
from lsgd.store.objects import Store, patiently

logger = logging.getLogger("lsgd")

FILE_NBYTES = 5_000_000_000
"""Largest file, in bytes, unless a single tensor is larger."""

UPLOAD_PAUSES_S = (1.0, 4.0, 16.0)
"""Pauses between the attempts to upload a file, in seconds."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SEVERAL = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"

COMPILED = "_orig_mod."
"""Prefix that ``torch.compile(model)`` adds to the names of the model's tensors."""


def save_model(
    model: nn.Module,
    folder: Path,
    file_nbytes: int,
    island: Island,
    then: Callable[[list[Path]], None] = lambda paths: None,
) -> list[Path]:
    """Write a model to a folder, replacing the one there.

    All processes of an island call this together. The head writes, and holds the tensors of one file at a time in
    host memory. Tied tensors are written once, under their first name. A tensor larger than ``file_nbytes`` gets its
    own file. Returns the files: ``model.safetensors``, or several and then their index. The head calls ``then`` with
    them first.

    Raises:
        ConfigError: ``file_nbytes`` is less than 1.
        LsgdError: the files cannot be written, or cannot replace the earlier ones; or a tensor's dtype is none of
            safetensors'.
    """
    if file_nbytes < 1:
        raise ConfigError(f"file_nbytes = {file_nbytes}: no file of a model is so short; give 1 or more")
    state = state_of(model)
    first = {id(x): name for name, x in reversed(state.items())}
    tensors = {name.replace(COMPILED, ""): x for name, x in state.items() if first[id(x)] == name}
    if wrong := next((name for name, x in tensors.items() if x.layout != torch.strided or not holds(x.dtype)), None):
        kind = tensors[wrong].dtype if tensors[wrong].layout == torch.strided else tensors[wrong].layout
        raise LsgdError(
            f"the model cannot be saved: {wrong} is of {kind}, which safetensors does not have; save "
            f"worker.state_dict() by torch.save, or register buffers with persistent=False"
        )
    sizes = {name: x.numel() * x.element_size() for name, x in tensors.items()}
    files = _divided(sizes, file_nbytes)
    weight_map = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    with _Files(folder, files, index, then) as written:
        for file, held in files.items():
            copies = whole({name: tensors[name] for name in held}, here=island.is_head)
            paths = island.share("saves the model", partial(written.write, file, copies))
        return paths


class _Files:
    """The files of a model, in a temporary folder in the model's folder until all are written."""

    def __init__(
        self, folder: Path, files: Iterable[str], index: Mapping[str, object], then: Callable[[list[Path]], None]
    ) -> None:
        self._folder, self._files, self._index, self._then = folder, list(files), index, then
        self._unfinished: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def write(self, file: str, tensors: Mapping[str, Tensor]) -> list[Path]:
        """Write a file; after the last one, return the paths at which all are."""
        with _explaining(self._folder):
            if self._unfinished is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._unfinished = Path(tempfile.mkdtemp(".tmp", "model-", self._folder))
            save_file({name: x.contiguous() for name, x in tensors.items()}, self._unfinished / file, {"format": "pt"})
            if file != self._files[-1]:
                return []
            paths = _move(self._unfinished, self._index, self._files)
        self._then(paths)
        return paths


def save_to_store(model: nn.Module, url: str, file_nbytes: int, island: Island) -> list[str]:
    """Write a model to a store, as :func:`save_model` does to a folder; return the URLs.

    The files go there from a temporary folder, which must have room for the model, each tried several times. The last
    object is the index, or the only file.
    """
    store = Store(url)  # a wrong one is noticed before anything is written
    with tempfile.TemporaryDirectory(prefix="lsgd-model-") as folder:
        paths = save_model(model, Path(folder), file_nbytes, island, partial(_upload, store))
    return [f"{store.url}/{path.name}" for path in paths]


def _upload(store: Store, paths: Iterable[Path]) -> None:
    for path in paths:
        patiently(partial(store.upload, path.name, path), UPLOAD_PAUSES_S, logger.warning)
    logger.info("the model is in %s", store.url)


def _divided(sizes: Mapping[str, int], file_nbytes: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in order."""
    files: list[list[str]] = [[]]
    room = file_nbytes
    for name, nbytes in sizes.items():
        if nbytes > room and files[-1]:
            files.append([])
            room = file_nbytes
        files[-1].append(name)
        room -= nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def _move(unfinished: Path, index: Mapping[str, object], files: Iterable[str]) -> list[Path]:
    """Move the files into place, then write the index; return the paths."""
    folder = unfinished.parent
    for earlier in (folder / INDEX, *folder.glob(SEVERAL)):
        earlier.unlink(missing_ok=True)
    written = [(unfinished / file).replace(folder / file) for file in files]
    if len(written) > 1:
        (folder / SINGLE).unlink(missing_ok=True)
        written.append(folder / INDEX)
        written[-1].write_text(json.dumps(index, indent=2) + "\n")
    logger.info("the model is written to %s: %s", folder, ", ".join(path.name for path in written))
    return written


@contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise LsgdError(
            f"the model cannot be written to {folder}: {error}; free space there or let this user write there, or "
            f"save it in another folder"
        ) from None
