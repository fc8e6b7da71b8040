"""Gate: an int8 model is still the original one, teacher-forced over text that `tiny` was not trained on."""

import contextlib
import inspect
import shutil

import pytest
import torch

from dispatch.gates import compare_logits

WINDOWS, WINDOW = 10, 200


def windows(loaded):
    """Windows of tokens [WINDOW + 1] from two of the files held out in training (tests/models/train.py)."""
    ids = [token for module in (contextlib, shutil) for token in loaded.encode(inspect.getsource(module))]
    return torch.tensor(ids[: WINDOWS * (WINDOW + 1)]).view(WINDOWS, WINDOW + 1)


@torch.inference_mode()
def teacher_forced(loaded):
    """Logits [WINDOWS * WINDOW, vocab] on the CPU, and the token that follows each."""
    text = windows(loaded).to(loaded.model.device)
    logits = [loaded.model(input_ids=window[None, :-1], use_cache=False).logits[0].float().cpu() for window in text]
    return torch.cat(logits), text[:, 1:].flatten().cpu()


def test_int8_is_still_the_model(target_name, target, original, evidence, record_property):
    found, following = teacher_forced(target)
    expected, _ = teacher_forced(original)
    comparison = compare_logits(expected, found, following)
    evidence.write("int8-quality", {"target": target_name, "found": str(comparison), "problems": comparison.problems()})
    record_property("dispatch_line", f"{target_name} against its original weights: {comparison}")
    if comparison.problems():
        pytest.fail(f"{target_name}: {'; '.join(comparison.problems())}. {comparison}", pytrace=False)
