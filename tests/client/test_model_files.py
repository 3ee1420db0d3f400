"""A model as safetensors files: what other libraries read of it, and what a failed write leaves."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from lsgd.client.checkpoint.model_files import FILE_NBYTES, save_model
from lsgd.client.control.island import Island
from lsgd.errors import ConfigError, LsgdError
from tests import golden

from .test_checkpoints import disk_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.logits = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 9, bias=False)
        self.logits.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_small_model_is_one_file_with_tied_tensors_once(tmp_path) -> None:
    model, other = Tied(), Tied()
    for saved in (model, torch.compile(model, backend="eager")):
        (path,) = save_model(saved, tmp_path / "new", FILE_NBYTES, Island())
        assert path == tmp_path / "new" / "model.safetensors"
        assert set(load_file(path)) == set(model.state_dict()) - {"logits.weight"}
        nn.init.zeros_(other.embedding.weight)
        load_model(other, path)  # strict
        assert torch.equal(other.logits.weight, model.embedding.weight)


@pytest.mark.slow  # another package
def test_transformers_reads_files_of_a_limited_size(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    config.save_pretrained(tmp_path)
    *files, index = save_model(model, tmp_path, 8000, Island())
    found = json.loads(index.read_text())
    assert len(files) > 3 and {path.name for path in files} == set(found["weight_map"].values())
    assert found["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    assert all(sum(x.nbytes for x in load_file(path).values()) <= 8000 for path in files)
    other = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for (name, x), value in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(x, value), name

    plain, again = (
        nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 1)),
        nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 1)),
    )
    save_model(plain, tmp_path, 100, Island())  # the first weight is longer than that
    transformers.trainer_utils.load_sharded_checkpoint(again, str(tmp_path), strict=True)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), again.parameters(), strict=True))


def test_another_model_takes_the_place_of_the_one_before(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    three = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"]
    save_model(model, tmp_path, 60, Island())
    assert names(tmp_path) == three
    save_model(model, tmp_path, 10**6, Island())
    assert names(tmp_path) == ["model.safetensors"]
    save_model(model, tmp_path, 80, Island())
    assert len(names(tmp_path)) == 3
    save_model(model, tmp_path, 60, Island())
    assert names(tmp_path) == three


def test_a_write_that_fails_is_told_and_leaves_what_was_there(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    save_model(model, tmp_path, FILE_NBYTES, Island())
    before = (tmp_path / "model.safetensors").read_bytes()
    nn.init.zeros_(model[0].weight)
    with disk_of(1000), pytest.raises(LsgdError, match=golden.pattern("model_files.not_written", path=tmp_path)):
        save_model(model, tmp_path, 20000, Island())
    assert names(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(ConfigError, match="file_nbytes = 0: no file"):
        save_model(model, tmp_path, 0, Island())
    (tmp_path / "file").touch()
    with pytest.raises(LsgdError, match="cannot be written"):
        save_model(model, tmp_path / "file", 1, Island())


@pytest.mark.parametrize(
    ("phases", "kind"),
    [(torch.ones(2, dtype=torch.complex128), "complex128"), (torch.eye(2).to_sparse(), "sparse_coo")],
)
def test_a_tensor_that_no_file_holds_is_named(tmp_path, phases, kind) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("phases", phases)
    with pytest.raises(LsgdError, match=golden.pattern("model_files.no_such_dtype", kind=kind)):
        save_model(model, tmp_path, FILE_NBYTES, Island())
