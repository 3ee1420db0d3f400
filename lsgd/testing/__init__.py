"""What tests of algorithms and codecs stand on: workers and their group as threads of one process, without servers."""

from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, generation_of, simulate, steps_at

__all__ = ["SimulatedGroup", "SimulatedWorker", "generation_of", "simulate", "steps_at"]
