"""A checkpoint file: tensors by path in safetensors; all else, and a digest of everything, as JSON in the metadata."""

import hashlib
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from lsgd.errors import ConfigError
from lsgd.run_folder import checkpoint_path, counts, file_name

FORMAT = "2"
"""Version of the file format."""

FORMATS_WITHOUT_DIGEST = ("1",)

KEPT = 2
"""How many checkpoints to keep, per worker and run."""


class DamagedError(ConfigError):
    """A damaged or incomplete checkpoint file."""


@dataclass(frozen=True)
class Unsaved:
    """What stands in a state for something that cannot be saved."""

    what: str


@dataclass(frozen=True)
class Packed:
    """A state as copies of its tensors on the CPU, by path, and JSON text with these paths in the tensors' places."""

    tensors: dict[str, Tensor]
    rest: str


@cache
def holds(dtype: torch.dtype) -> bool:
    """Return whether safetensors has a dtype; for example, it has no complex128."""
    try:
        save({"x": torch.empty(0, dtype=dtype, device="cpu")})
    except Exception:  # of which kind, its versions disagree
        return False
    return True


def pack(state: Any) -> Packed:
    """Return a copy of a state: dicts, lists, tuples, tensors, dtypes, texts, numbers, true, false and None.

    A subclass of Tensor that wraps others, such as a state in 8 bits, is taken apart by ``__tensor_flatten__``.

    Raises:
        TypeError: it contains something else, or a tensor in a dtype that no file holds; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(tensors, json.dumps(_pack(state, "", tensors)))


def unpack(packed: Packed) -> Any:
    """Return the state that :func:`pack` was given."""
    return _unpack(json.loads(packed.rest), packed.tensors)


def to_bytes(packed: Packed) -> tuple[bytes, str]:
    """Return a packed state for another process."""
    return save(packed.tensors), packed.rest


def from_bytes(tensors: bytes, rest: str) -> Packed:
    """Return what :func:`to_bytes` was given."""
    return Packed(load(tensors), rest)


def write(folder: Path, run: str, count: int, worker: str, packed: Packed, about: Mapping[str, str]) -> Path:
    """Write a checkpoint atomically, and delete all but the last of the worker's earlier ones of this run.

    Files of other runs are never touched.

    Raises:
        OSError, SafetensorError: it cannot be written; earlier files are kept.
    """
    path = checkpoint_path(folder, run, count, worker)
    sweep(folder, worker)
    folder.mkdir(parents=True, exist_ok=True)
    # A unique name: an earlier process of this worker may only be frozen, and must not write to this file.
    temporary = folder / f"{file_name(worker)}.{secrets.token_hex(4)}.tmp"
    about = {"lsgd": FORMAT, **about, "run": run, "count": str(count), "worker": worker, "state": packed.rest}
    try:
        save_file(packed.tensors, temporary, {**about, "digest": digest(packed.tensors, about)})
        _sync(temporary)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    for changed in (path.parent, path.parent.parent, folder):
        _sync(changed)
    _delete_earlier(folder, run, count, worker)
    return path


def sweep(folder: Path, worker: str) -> None:
    """Delete the unfinished files that earlier processes of a worker left when they were killed."""
    for path in folder.rglob(f"{file_name(worker)}*.tmp"):
        with suppress(OSError):
            path.unlink()


def read(path: Path, model: str, model_summary: str, key: str = "model") -> Any:
    """Return the state in a file of the model with this digest, which the metadata have under ``key``.

    Raises:
        DamagedError: it is truncated, has changed since it was written, or is no checkpoint.
        ConfigError: it is from another version of lsgd, or of another model.
    """
    try:
        about, tensors = _contents(path)
        written = about.pop("digest", "")
        whole = written == digest(tensors, about)
        version = about["lsgd"]
    except Exception as error:  # a parser may raise anything on garbage
        raise _damaged(path, error) from None
    if version != FORMAT and (whole or version in FORMATS_WITHOUT_DIGEST):
        raise ConfigError(
            f"the checkpoint {path} has format {version}, this lsgd reads {FORMAT}; continue with the lsgd that "
            f"wrote it, or begin a new run"
        )
    if not whole:
        raise DamagedError(f"the checkpoint {path} cannot be read: it has changed since it was written")
    if key not in about:
        raise ConfigError(
            f"the checkpoint {path} is of an earlier lsgd, and only for a worker of as many processes as before: "
            f"continue with as many (lsgd launch --processes-per-worker), or begin a new run from the saved model"
        )
    if about[key] != model:
        raise ConfigError(
            f"the checkpoint {path} is of another model: {about['model_summary']}, and this is "
            f"{model_summary}; build the model that it was written from, or begin a new run"
        )
    try:
        return unpack(Packed(tensors, about["state"]))
    except ConfigError as error:
        raise ConfigError(f"the checkpoint {path} cannot be used: {error}") from None
    except (KeyError, ValueError) as error:
        raise _damaged(path, error) from None


def digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Return the digest of a file's tensors (on the CPU) and the rest of its metadata.

    It is the same in all formats from 2 on, so a file of a later format can be recognized as undamaged.
    """
    hashed = hashlib.blake2b(json.dumps(sorted(about.items())).encode(), digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name]
        hashed.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        row = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one number may have any stride
        hashed.update(row.view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    # By its descriptor: safetensors takes no path that is not UTF-8.
    with path.open("rb") as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", "pt") as file:
        # Copied: safetensors returns views of the memory-mapped file.
        return dict(file.metadata()), {name: file.get_tensor(name).clone() for name in file.keys()}


def _damaged(path: Path, error: Exception) -> DamagedError:
    why = error if isinstance(error, SafetensorError | OSError) else repr(error)
    return DamagedError(f"the checkpoint {path} cannot be read: {why}")


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor() if hasattr(value, "__tensor_flatten__"):
            return {"subclass": _pack_subclass(value, path, tensors)}
        case Tensor() if holds(value.dtype):
            name = path if path not in tensors else f"{path}#{len(tensors)}"
            tensors[name] = _copied(value, path)
            return {"tensor": name}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case dict():
            kind = "counter" if isinstance(value, Counter) else "dict"  # MultiStepLR has one
            return {kind: [[_key(k, path), _pack(v, _join(path, k), tensors)] for k, v in value.items()]}
        case tuple():
            return {"tuple": [_pack(v, _join(path, i), tensors) for i, v in enumerate(value)]}
        case list():
            return [_pack(v, _join(path, i), tensors) for i, v in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
        case Unsaved():
            raise TypeError(f"{path} is a {value.what}")
    kind = f" of {value.dtype}" if isinstance(value, Tensor) else ""
    raise TypeError(f"{path} is a {type(value).__name__}{kind}")


def _pack_subclass(value: Any, path: str, tensors: dict[str, Tensor]) -> list[Any]:
    """Take a tensor apart by its own means: the tensors in it, and what else makes it, as torch.compile does."""
    kind = type(value)
    try:
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        shape = list(value.shape), list(value.stride())
    except Exception as error:  # another library's code
        raise TypeError(f"{path} is a {kind.__name__}, which cannot be taken apart ({error})") from error
    inner = _pack(parts, path, tensors), _pack(context, path, tensors)
    return [kind.__module__, kind.__qualname__, *inner, *shape]


def _unpack_subclass(saved: list[Any], tensors: dict[str, Tensor]) -> Any:
    """Put a tensor together; only a class that the script has imported can do that, since a file may name any."""
    module, kind, parts, context, shape, strides = saved
    found: Any = sys.modules.get(module)
    for name in kind.split("."):
        found = getattr(found, name, None)
    if not (isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise ConfigError(f"it has a {kind} of {module}: import {module} before Worker.join")
    inner = _unpack(parts, tensors), _unpack(context, tensors)
    return found.__tensor_unflatten__(*inner, torch.Size(shape), tuple(strides))


def _copied(x: Tensor, path: str) -> Tensor:
    """Return a plain copy on the CPU."""
    try:
        return x.detach().to("cpu", copy=True).contiguous().as_subclass(Tensor)
    except Exception as error:  # a class of tensors may refuse any operation
        raise TypeError(f"{path} is a {type(x).__name__} that cannot be copied ({error})") from error


def _key(key: Any, path: str) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"{path} has a key that is a {type(key).__name__}")
    return key  # type: ignore[no-any-return]


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"subclass": saved}:
            return _unpack_subclass(saved, tensors)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"dict": items}:
            return {key: _unpack(item, tensors) for key, item in items}
        case {"counter": items}:
            return Counter(dict(items))
        case {"tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case list():
            return [_unpack(item, tensors) for item in value]
    return value


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_earlier(folder: Path, run: str, count: int, worker: str) -> None:
    """Delete the worker's files of this run up to ``count``, except the last :data:`KEPT`."""
    for other in [c for c in counts(folder, run, worker) if c <= count][:-KEPT]:
        path = checkpoint_path(folder, run, other, worker)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other workers' files are there
            path.parent.rmdir()
