"""Text that `tiny` was not trained on: two of the files held out by tests/models/train.py."""

import contextlib
import inspect
import shutil

import torch

WINDOWS, WINDOW = 10, 200


def windows(loaded):
    """Windows of tokens [WINDOWS, WINDOW + 1]; the last of each is only there to be predicted."""
    ids = [token for module in (contextlib, shutil) for token in loaded.encode(inspect.getsource(module))]
    return torch.tensor(ids[: WINDOWS * (WINDOW + 1)]).view(WINDOWS, WINDOW + 1)
