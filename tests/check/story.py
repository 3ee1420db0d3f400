"""Facts as a recorder would note them, in a few words."""

from itertools import count
from typing import Any

from lsgd.check.facts import Fact, Life, Run

SCRIPT = "/home/me/train.py"


def at(line: int) -> str:
    """Return where a line of the script is."""
    return f"{SCRIPT}:{line}"


class Story:
    """Tells what one process did, one fact after the other; a fact's values may be given by name."""

    def __init__(self, worker: int = 0, **joined: Any) -> None:
        self.facts: list[Fact] = []
        self._clock, self._steps = count(), 0
        about = {
            "step": 0,
            "iterations": 0,
            "workers": 2,
            "has_end": False,
            "parameters": 10,
            "muon": False,
            "nbytes": 40,
        }
        about |= {"restarted": False, "door": "loop", "pid": 1, "first": worker == 0}
        self.tell("join", worker=f"node0/worker{worker}", where=at(9), **{**about, **joined})
        self.place = int(joined.get("step", 0))

    def tell(self, kind: str, **values: Any) -> "Story":
        """Tell a fact."""
        self.facts.append({"kind": kind, "t": float(next(self._clock)), "made": self._steps, "over": False, **values})
        return self

    def step(self, **values: Any) -> "Story":
        """Tell of a step."""
        about = {"optimizer": 0, "number": self._steps, "place": self.place, "steps": 8, "progress": None, "lrs": [0.1]}
        about |= {"weights": [float(self.place), 1.0], "where": at(25)}
        about |= {"noise": [f"{self.facts[0]['worker']} {self.place} {k}" for k in range(3)]}
        self.tell("step", **{**about, **values})
        self._steps, self.place = self._steps + 1, self.place + 1
        return self

    def steps(self, number: int, **values: Any) -> "Story":
        """Tell of several steps."""
        for _ in range(number):
            self.step(**values)
        return self

    def draws(self, *batches: list[int], sampler: str = "RandomSampler", divided: bool = False) -> "Story":
        """Tell of a pass over a loader, with a step after each batch."""
        number = sum(fact["kind"] == "pass" for fact in self.facts)
        key = {"loader": 0, "number": number}
        about = {"length": 8, "epoch": None, "divided": divided, "batch_size": 2, "drop_last": False}
        self.tell("pass", where=at(20), sampler=sampler, dataset="TensorDataset", **key, **about)
        for place, rows in enumerate(batches):
            samples = [f"sample {row}" for row in rows]
            about = {"rows": rows, "stream": False, "deal": place // 2, "samples": samples, "digest": str(rows)}
            self.tell("batch", where=at(20), **about, **key)
            self.step()
        return self.tell("pass_ends", **key)

    def ends(self, consensus: bool = True, tensors: str = "w", **values: Any) -> "Story":
        """Tell of the end."""
        times = {"steps": 8, "compute_s": 4.0, "waiting_s": 1.0, "exchange_s": 1.0, "sent_nbytes": 80}
        about = {
            "tensors": {"weight": tensors},
            "buffers": [],
            "timings": times,
            "watching_s": 0.0,
            "peak_nbytes": 1e6,
            "where": "",
        }
        end = {"consensus": consensus, "step": self.place, "steps": 8, **about, **values}
        return self.tell("exit", over=consensus, **end)


def run_of(*stories: Story, name: str = "straight", **about: Any) -> Run:
    """Return a run of these processes."""
    lives = [Life(story.facts) for story in stories]
    return Run(name, about.pop("workers", 2), lives, about.pop("status", 0), **about)
