"""One checkpoint as a file: tensors by path in safetensors, everything else as JSON in its metadata; no pickle."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lsgd.client.run_folder import checkpoint_path, counts
from lsgd.errors import ConfigError

FORMAT = "1"
"""Version of what a file holds."""

KEPT = 2
"""How many checkpoints of a worker stay."""


class DamagedError(ConfigError):
    """A file that is no whole checkpoint."""


@dataclass(frozen=True)
class Packed:
    """A state as a file can hold it.

    Args:
        tensors: copies on the CPU, by path.
        rest: the state as JSON text, with the paths of the tensors in their places.
    """

    tensors: dict[str, Tensor]
    rest: str


def pack(state: Any) -> Packed:
    """Return a copy of a state: dicts, lists, tuples, tensors, texts, numbers, true, false and None.

    Raises:
        TypeError: there is something else in it; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(tensors, json.dumps(_pack(state, "", tensors)))


def unpack(packed: Packed) -> Any:
    """Return the state that :func:`pack` was given."""
    return _unpack(json.loads(packed.rest), packed.tensors)


def write(folder: Path, count: int, worker: str, packed: Packed, about: dict[str, str]) -> Path:
    """Write a checkpoint, whole or not at all, and delete those of the worker but the last :data:`KEPT`.

    Args:
        folder: of the checkpoints of all workers.
        count: iterations of the run.
        worker: its name.
        packed: its state.
        about: what :func:`read` compares, and more for people.

    Raises:
        OSError, SafetensorError: it cannot be written; what was there before stays.
    """
    path = checkpoint_path(folder, count, worker)
    temporary = _temporary(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(packed.tensors, temporary, {"lsgd": FORMAT, "state": packed.rest, **about})
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    for changed in (path.parent, folder):
        _sync(changed)
    _delete_others(folder, count, worker)
    return path


def read(path: Path, model: str, model_summary: str) -> Any:
    """Return the state in a file.

    Args:
        path: of the file.
        model: digest of the model that it is for.
        model_summary: the same for people.

    Raises:
        DamagedError: it is cut short, or no checkpoint.
        ConfigError: it is of another version of lsgd, or of another model.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            version, digest = about["lsgd"], about["model"]
            if version != FORMAT:
                raise ConfigError(
                    f"the checkpoint {path} has format {version}, this lsgd reads {FORMAT}; go on with the lsgd that "
                    f"wrote it, or begin a new run"
                )
            if digest != model:
                raise ConfigError(
                    f"the checkpoint {path} is of another model: {about['model_summary']}, and this is "
                    f"{model_summary}; build the model that it was written from, or begin a new run"
                )
            # Copied: what safetensors returns is the file itself, mapped into memory.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        return unpack(Packed(tensors, about["state"]))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DamagedError(f"the checkpoint {path} cannot be read: {error}") from None


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            name = path if path not in tensors else f"{path}#{len(tensors)}"
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": name}
        case dict():
            return {"dict": [[_key(k, path), _pack(v, _join(path, k), tensors)] for k, v in value.items()]}
        case tuple():
            return {"tuple": [_pack(v, _join(path, i), tensors) for i, v in enumerate(value)]}
        case list():
            return [_pack(v, _join(path, i), tensors) for i, v in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"{path} is a {type(value).__name__}")


def _key(key: Any, path: str) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"{path} has a key that is a {type(key).__name__}")
    return key  # type: ignore[no-any-return]


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {key: _unpack(item, tensors) for key, item in items}
        case {"tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case list():
            return [_unpack(item, tensors) for item in value]
    return value


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_others(folder: Path, count: int, worker: str) -> None:
    """Delete the worker's files but those of ``count`` and the last before it; those after it are another run's."""
    found = counts(folder, worker)
    kept = [c for c in found if c <= count][-KEPT:]
    for other in set(found) - set(kept):
        path = checkpoint_path(folder, other, worker)
        path.unlink(missing_ok=True)
        _temporary(path).unlink(missing_ok=True)
        with suppress(OSError):  # other workers' files are there
            path.parent.rmdir()
