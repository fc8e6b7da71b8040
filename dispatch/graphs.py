"""CUDA graphs: a step's some hundred kernel launches become one. Unproven: no GPU has run this yet."""

from collections.abc import Callable

import torch
from torch import Tensor


class Graphs:
    """One function of rows on a GPU, captured once for each number of rows and replayed from then on.

    The function must launch the same kernels on the same memory each time and never wait for the device. It is not kept: its
    owner holds this object, and a cycle would keep a cache on the GPU alive.
    """

    def __init__(self) -> None:
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __call__(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """function(rows); the result is the caller's to keep."""
        if len(rows) not in self._captured:
            self._captured[len(rows)] = self._capture(function, rows.clone())
        graph, given, result = self._captured[len(rows)]
        given.copy_(rows)
        graph.replay()
        # the next replay, of another width too, writes into the same memory
        return result.clone()

    def _capture(self, function: Callable[[Tensor], Tensor], given: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        # kernels are compiled at their first launch, which a capture does not allow
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            function(given)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # one pool for all: only one of them runs at a time
        pool = next((first.pool() for first, *_ in self._captured.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            result = function(given)
        return graph, given, result
