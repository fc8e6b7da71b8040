"""Gate: an int8 model is still the original one, teacher-forced over text that `tiny` was not trained on."""

import pytest
import torch
from held_out import windows

from dispatch.gates import compare_logits


@torch.inference_mode()
def teacher_forced(loaded):
    """Logits [positions, vocab] on the CPU, and the token that follows each."""
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
