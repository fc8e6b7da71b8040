"""Graphs of a step: captured once a width, replayed on fresh rows, results that stay. On the CPU with a made-up CUDA."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dispatch.graphs import Graphs


class Cuda:
    """Records what is asked of it; a captured function runs again, into the same result, at each replay."""

    def __init__(self, function):
        self.function, self.calls, self.recording, self.pools = function, [], None, []

    def __call__(self, rows):
        self.calls.append(("captured" if self.recording else "run", len(rows)))
        result = self.function(rows)
        if self.recording:
            self.recording.replay = lambda: result.copy_(self.function(rows))
        return result

    def new_graph(self):
        return SimpleNamespace(pool=lambda: "pool")

    @contextmanager
    def graph(self, graph, pool):
        self.recording = graph
        self.pools.append(pool)
        yield
        self.recording = None


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda(lambda rows: rows * 2)

    @contextmanager
    def stream(_):
        yield

    waiting = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "CUDAGraph": made.new_graph,
        "graph": made.graph,
        "Stream": lambda: waiting,
        "current_stream": lambda: waiting,
        "stream": stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_one_capture_a_width(cuda):
    graphs = Graphs()
    found = [graphs(cuda, torch.tensor(rows)).tolist() for rows in ([1], [2], [3, 4], [5], [6, 7])]
    assert found == [[2], [4], [6, 8], [10], [12, 14]]
    # each width runs once before it is captured, so that nothing is compiled in a capture
    assert cuda.calls == [("run", 1), ("captured", 1), ("run", 2), ("captured", 2)]
    assert cuda.pools == [None, "pool"]


def test_a_result_outlives_the_next_replay(cuda):
    graphs = Graphs()
    first = graphs(cuda, torch.tensor([1]))
    graphs(cuda, torch.tensor([100]))
    assert first.tolist() == [2]


def test_the_callers_rows_are_not_written_to(cuda):
    graphs, rows = Graphs(), torch.tensor([1])
    graphs(cuda, rows)
    graphs(cuda, torch.tensor([100]))
    assert rows.tolist() == [1]
