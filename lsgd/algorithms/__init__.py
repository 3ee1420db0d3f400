"""The algorithms, one file each; :func:`create` makes the one that the settings belong to."""

from lsgd.algorithms.allreduce import AllReduce
from lsgd.algorithms.base import Algorithm, Flat
from lsgd.algorithms.bytegrad import ByteGrad
from lsgd.algorithms.decentralized import DecentralizedSGD
from lsgd.algorithms.elastic import ElasticSGD
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.algorithms.leader import LeaderSGD
from lsgd.algorithms.local import LocalSGD
from lsgd.algorithms.low_precision_decentralized import LowPrecisionDecentralizedSGD
from lsgd.algorithms.qsgd import QSGD
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

__all__ = ["Algorithm", "Flat", "GradientAlgorithm", "create"]


def create(settings: AlgorithmSettings, parameters: Flat, run: str = "") -> Algorithm:
    """Return the algorithm that ``settings`` belong to, at its start for a model.

    Args:
        settings: the plan's.
        parameters: of the model, in flat tensors; copied where the algorithm keeps a model of its own.
        run: identity of the run, from which the seeds of stochastic rounding are made.
    """
    match settings:
        case LeaderSettings():
            return LeaderSGD(settings, parameters)
        case ByteGradSettings():
            return ByteGrad(settings, parameters, run)
        case QSGDSettings():
            return QSGD(settings, parameters, run)
        case DecentralizedSettings():
            return DecentralizedSGD(settings, parameters)
        case LowPrecisionDecentralizedSettings():
            return LowPrecisionDecentralizedSGD(settings, parameters, run)
        case AllReduceSettings():
            return AllReduce(settings, parameters)
        case ElasticSettings():
            return ElasticSGD(settings, parameters)
        case LocalSettings():
            return LocalSGD(settings, parameters, run)
    raise AssertionError(f"no algorithm has {type(settings).__name__}")
