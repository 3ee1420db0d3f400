"""Lets torchvision be imported beside a CPU build of torch, copied into the programs' environment.

PyPI's torchvision has its compiled operators for CUDA builds of torch alone, and cannot be imported without their
schemas.
The programs use none of them.
"""

import sys
from typing import Any

OPERATORS = ("nms", "qnms")
ARGUMENTS = "Tensor dets, Tensor scores, float iou_threshold"


class Schemas:
    """Defines the schemas when torchvision is imported; finds no module."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Define them once."""
        if name == "torchvision._meta_registrations":
            from torch import library, ops

            if not hasattr(ops.torchvision, OPERATORS[0]):
                for operator in OPERATORS:
                    library.define(f"torchvision::{operator}", f"({ARGUMENTS}) -> Tensor")


sys.meta_path.insert(0, Schemas())
