"""What is said of the machine, and that a broken GPU is never taken for no GPU."""

import pytest
import torch

from dispatch import environment
from dispatch.environment import describe_environment, gpu_problem


def test_description_is_strings_and_names_what_matters():
    facts = describe_environment()
    assert {"python", "torch", "transformers", "triton", "cpu", "gpu", "driver"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
    assert facts["torch"] == torch.__version__


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def init():
        raise RuntimeError("Found no NVIDIA driver\nmore lines")

    monkeypatch.setattr(torch.cuda, "init", init)


def test_no_gpu(no_gpu, monkeypatch):
    monkeypatch.setattr(environment, "_driver", lambda: None)
    monkeypatch.setattr(environment, "_devices", list)
    problem = gpu_problem()
    assert not problem.broken
    assert problem.message.startswith(f"no usable GPU: Found no NVIDIA driver [torch {torch.__version__} (CUDA ")
    assert problem.message.endswith("driver not found]")


@pytest.mark.parametrize(("driver", "devices"), [("570.1", []), (None, ["/dev/nvidia0"]), ("570.1", ["/dev/nvidia0"])])
def test_broken_gpu(no_gpu, monkeypatch, driver, devices):
    monkeypatch.setattr(environment, "_driver", lambda: driver)
    monkeypatch.setattr(environment, "_devices", lambda: devices)
    problem = gpu_problem()
    assert problem.broken
    assert (driver or "driver not found") in problem.message
    assert not devices or devices[0] in problem.message


def test_gpu_that_is_listed_and_runs_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def ones(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch, "ones", ones)
    problem = gpu_problem()
    assert problem.broken
    assert "no kernel image is available" in problem.message
