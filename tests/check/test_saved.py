"""Files of each kind that scripts save: their tensors are found, by the names that the model has for them."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lsgd.check.saved import loaded
from lsgd.check.weights import tensor_digests


def _torch(model, folder):
    torch.save({"model": model.state_dict(), "step": 3}, folder / "model.pt")
    return folder / "model.pt"


def _pickled(model, folder):
    torch.save({"model": model.state_dict(), "class": type(model)}, folder / "whole.pt")
    return folder / "whole.pt"


def _safetensors(model, folder):
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def _npz(model, folder):
    np.savez(folder / "model.npz", **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    return folder / "model.npz"


def _archive(model, folder):
    (folder / "all").mkdir()
    _torch(model, folder / "all")
    (folder / "all" / "notes.txt").write_text("no tensors")
    return folder / shutil.make_archive(str(folder / "all"), "zip", folder / "all")


def _archive_of_others(model, folder):
    (folder / "all").mkdir()
    _npz(model, folder / "all")
    _safetensors(model, folder / "all")
    return folder / shutil.make_archive(str(folder / "all"), "zip", folder / "all")


@pytest.mark.parametrize("save", [_torch, _pickled, _safetensors, _npz, _archive, _archive_of_others])
def test_a_models_tensors_are_found(save, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    found = loaded(save(model, tmp_path))
    for name, digest in tensor_digests(model.state_dict()).items():
        assert {found[key] for key in found if key.rpartition("/")[2] == name} == {digest}


def test_one_array_has_no_name_and_its_value(tmp_path) -> None:
    np.save(tmp_path / "weight.npy", np.ones(3, np.float32))
    assert list(loaded(tmp_path / "weight.npy").values()) == list(tensor_digests({"weight": torch.ones(3)}).values())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no zip", b"a text"])
def test_other_files_have_none(content, tmp_path) -> None:
    for name in ("file.zip", "file.npy", "file.safetensors", "file"):
        (tmp_path / name).write_bytes(content)
        assert loaded(tmp_path / name) == {}


def test_a_file_that_is_gone_has_none(tmp_path) -> None:
    assert loaded(tmp_path / "epoch1.ckpt") == {}
    assert loaded(tmp_path) == {}


DRAWS = """
from torch.utils.data import DataLoader, IterableDataset

from lsgd.check.taps import tap_loaders

class Stream(IterableDataset):
    def __iter__(self):
        return iter([1.0, 2.0])

tap_loaders(lambda kind, **about: kind == "batch" and print(about["rows"], about["stream"]))
data = {"a": 1.0, "b": 2.0}
for dataset, sampler in ((data, list(data)), ([1.0, 2.0], None), (Stream(), None)):
    next(iter(DataLoader(dataset, sampler=sampler, batch_size=2)))
"""


def test_a_loader_whose_rows_have_keys_is_no_stream(tmp_path) -> None:
    (tmp_path / "script.py").write_text(DRAWS)
    noted = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert noted.stdout.splitlines() == ["None False", "[0, 1] False", "None True"]


WRITES = """
from lsgd.check.taps import tap_files

tap_files(lambda kind, **about: print(about["path"].rpartition("/")[2]), "/nowhere")
names = {"__name__": "torch._inductor.codecache"}
exec("def write(path): open(path, 'w').close()", names)
names["write"]("kernel.cpp")
open("own.txt", "w").close()
"""


def test_what_torch_compile_writes_is_not_the_scripts(tmp_path) -> None:
    (tmp_path / "script.py").write_text(WRITES)
    command = [sys.executable, "script.py"]
    assert subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout == "own.txt\n"
    assert (tmp_path / "kernel.cpp").exists()
