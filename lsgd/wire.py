"""How many bytes an algorithm sends, by arithmetic; the simulated workers' counts are tested against it."""

from collections.abc import Sequence

from lsgd.settings import (
    AlgorithmSettings,
    AllReduceSettings,
    ByteGradSettings,
    DecentralizedSettings,
    ElasticSettings,
    LeaderSettings,
    LocalSettings,
    LowPrecisionDecentralizedSettings,
    QSGDSettings,
)
from lsgd.topology import complete, ring

FULL = 4.0
"""Bytes of a float32 number."""


def coded(block: int) -> float:
    """Return the bytes of a number in 8 bits: its code and its share of the block's two float32 scales."""
    return 1 + (8 / block if block else 0)


def sent_nbytes(settings: AlgorithmSettings, numel: int, workers: int) -> float:
    """Return the bytes that a worker sends per iteration, on average, where each worker has a node of its own.

    Args:
        settings: the algorithm and its settings.
        numel: parameters of the model, float32.
        workers: how many there are.
    """
    return numel * _per_number(settings, workers)


def _per_number(settings: AlgorithmSettings, workers: int) -> float:
    share = (workers - 1) / workers
    match settings:
        case LeaderSettings():  # one sends to all others, however that is relayed
            return share * _form(settings.compression, settings.block) / settings.period
        case ByteGradSettings() | QSGDSettings():
            return 2 * share * coded(settings.block)
        case AllReduceSettings():
            return 2 * share * FULL
        case DecentralizedSettings():
            if settings.peers == "all":
                return 2 * share * FULL / settings.interval
            return (share if workers % 2 else 1.0) * FULL / settings.interval
        case LowPrecisionDecentralizedSettings():
            graph: Sequence[Sequence[int]] = {"ring": ring, "all": complete}[settings.topology](workers)
            return len(graph[0]) * coded(settings.block) / settings.interval
        case ElasticSettings():
            return 2 * share * FULL / settings.period
        case LocalSettings():
            return 2 * share * _form(settings.compression, settings.block) / settings.period
    raise AssertionError(f"no formula for {type(settings).__name__}")


def _form(compression: str, block: int) -> float:
    return coded(block) if compression == "minmax8" else FULL
