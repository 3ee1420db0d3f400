"""Error feedback: the next exchange adds back what rounding lost in the last one."""

from __future__ import annotations

from typing import Any

from lsgd.lazy import Tensor, torch


class ErrorFeedback:
    """What rounding has lost of a tensor on one member (DoubleSqueeze, arXiv 1905.05957, algorithm 1).

    An exchange writes new residuals beside the current ones, and :meth:`commit` swaps them in. So a failed exchange
    changes nothing.

    Attributes:
        residual: what this member's own contributions have lost, float32, shape (numel,).
        results: what the results that this member rounded for all have lost, by where in the tensor each begins.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self.results: dict[int, Tensor] = {}
        self._next_residual: Tensor | None = None
        self._next_results: dict[int, Tensor] = {}

    def added_to(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the residual, float32, from which the exchange subtracts what it sends."""
        if self._next_residual is None:
            self._next_residual = torch.empty_like(self.residual)
        return torch.add(x, self.residual, out=self._next_residual)

    def added_in_place(self, x: Tensor, decay: float) -> Tensor:
        """Do the same with ``decay`` times the residual, in float32 ``x`` itself, which then belongs to this."""
        self._next_residual = x.add_(self.residual, alpha=decay)
        return x

    def added_to_result(self, result: Tensor, start: int) -> Tensor:
        """Add what the last result at ``start`` lost to ``result`` and return it, for the exchange to do the same."""
        if start in self.results:
            result.add_(self.results[start])
        self._next_results[start] = result
        return result

    def commit(self, unless: Tensor | None = None) -> None:
        """Replace the residuals by those of the completed exchange, unless a boolean on the tensor's device is true."""
        if self._next_residual is None:
            return
        if unless is None:
            self.residual, self._next_residual = self._next_residual, None
            self.results = self._next_results
        else:
            self.residual.copy_(torch.where(unless, self.residual, self._next_residual))
            for start, new in self._next_results.items():
                self.results[start] = torch.where(unless, self.results.get(start, torch.zeros_like(new)), new)
        self._next_results = {}

    def begin_generation(self, *, same_members: bool) -> None:
        """Drop a pending exchange and, unless the members are the same, the residuals of results."""
        self._next_residual, self._next_results = None, {}
        if not same_members:
            self.results = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, not copied."""
        return {"residual": self.residual, "results": dict(self.results)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the residuals of a tensor of the same size."""
        self.residual.copy_(state["residual"])
        self.results = {start: residual.clone() for start, residual in state["results"].items()}
