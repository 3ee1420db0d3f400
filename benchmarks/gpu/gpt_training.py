"""What the two workers of part 4 train, and how they are measured."""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.transformers import Transformer

POLL_S = 0.02
NOISE = 0.1
"""Share of the tokens that nothing foretells."""


@dataclass(frozen=True)
class Size:
    """A GPT-2, and the batches of one worker."""

    width: int
    layers: int
    heads: int
    context: int
    vocabulary: int
    batch: int


SIZES = {"gpt2": Size(768, 12, 12, 512, 50257, 4), "small": Size(64, 2, 4, 64, 512, 2)}
"""GPT-2 with 124 million parameters, and one of a tenth of a million, by name."""


def parser() -> argparse.ArgumentParser:
    """Return the arguments that every worker has."""
    found = argparse.ArgumentParser()
    found.add_argument("--size", choices=SIZES, required=True)
    found.add_argument("--steps", type=int, required=True, help="that are measured")
    found.add_argument("--warm-up", type=int, required=True, help="steps before those, of a model that is not kept")
    found.add_argument("--notes", type=Path, required=True, help="folder that both workers write to")
    return found


def made(size: Size, home: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, the same on every worker, and its optimizer."""
    torch.manual_seed(0)
    with home:
        model = Transformer(size.width, size.layers, size.heads, size.context, size.vocabulary)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def warm_up(size: Size, steps: int, home: torch.device) -> None:
    """Train a model that is not kept, so that no method's first steps wait for what every process does once."""
    model, optimizer = made(size, home)
    for tokens in islice(generated(size, 0, home), steps):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of a batch's next tokens, computed in bfloat16 where that is safe."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def generated(size: Size, seed: int, home: torch.device) -> Iterator[Tensor]:
    """Yield batches of text, int64 (batch, context + 1), without end, made where the model is.

    Each text counts up from a random token by a random number from 1 to 8; some of its tokens are random.
    """
    random = torch.Generator(home).manual_seed(seed)
    places = torch.arange(size.context + 1, device=home)
    shape = (size.batch, len(places))
    while True:
        first = torch.randint(size.vocabulary, (size.batch, 1), generator=random, device=home)
        by = torch.randint(1, 9, (size.batch, 1), generator=random, device=home)
        others = torch.randint(size.vocabulary, shape, generator=random, device=home)
        is_noise = torch.rand(shape, generator=random, device=home) < NOISE
        yield torch.where(is_noise, others, (first + by * places) % size.vocabulary)


class Meter:
    """Times a worker's steps, from when both workers are ready.

    Args:
        given: of :func:`parser`. The clock is read before the first step and after the last that is measured, when the
            GPU has made them. The folder is for what the workers say, and for the word to go.
        rank: of this worker.
        workers: how many there are.
        home: the model's device.
    """

    def __init__(self, given: argparse.Namespace, rank: int, workers: int, home: torch.device) -> None:
        self._notes: Path = given.notes
        self._rank, self._workers, self._home = rank, workers, home
        self._end: int = given.steps
        self._made = 0
        self._began_s = 0.0

    def step_begins(self) -> bool:
        """Note that a step begins; return whether all those that are measured are made."""
        if self._made == 0:
            (self._notes / f"{self._rank}.ready").touch()
            while not (self._notes / "go").exists():
                time.sleep(POLL_S)
            self._began_s = self._now()
        if self._made == self._end:
            self._write((self._now() - self._began_s) / self._end)
        self._made += 1
        return self._made > self._end

    def all_have_measured(self) -> bool:
        """Return whether the other workers have made all their steps, too: until then this one goes on beside them."""
        return all((self._notes / f"{rank}.json").exists() for rank in range(self._workers))

    def _now(self) -> float:
        if self._home.type == "cuda":
            torch.cuda.synchronize(self._home)
        return time.perf_counter()

    def _write(self, step_s: float) -> None:
        write(self._notes / f"{self._rank}.json", {"step_s": step_s, "memory_nbytes": self._memory_nbytes()})

    def _memory_nbytes(self) -> int:
        """Return the most that tensors took on the GPU; on a CPU, the most that the process took."""
        if self._home.type == "cuda":
            return torch.cuda.max_memory_allocated(self._home)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(path: Path, found: object) -> None:
    """Write a file that is whole as soon as it is there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found))
    unfinished.rename(path)
