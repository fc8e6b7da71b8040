"""Twenty prompts in one process through one target and one drafter: nothing may grow."""

import gc
from pathlib import Path

import pytest
import torch

from dispatch.speculative import decode_speculative

PAGE = 4096


def tensors_alive():
    """Bytes of every tensor storage that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.filterwarnings("ignore:.*torch.distributed:FutureWarning")  # from looking at every object there is
@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_twenty_prompts_leave_nothing_behind(target_name, drafter, target, cached_target, get_drafter):
    drafter = get_drafter(drafter)
    text = target.encode("def set(self, name, value=None):\n    self.name = name\n    self.value = value\n" * 4)

    def decode(length):
        result = decode_speculative(cached_target, drafter, text[:length], k=4, max_new_tokens=24, eos_ids=target.eos_ids)
        assert cached_target.length == length + len(result.tokens) - 1
        assert drafter.length <= length + len(result.tokens)

    lengths = [len(text) - step for step in range(20)]
    for length in lengths[:3]:
        decode(length)
    tensors, memory = tensors_alive(), resident()
    for length in [*lengths[3:], lengths[2]]:
        decode(length)
    # the last prompt is the one before the first reading, so the caches are as long as they were
    assert tensors_alive() == tensors
    # one cache left behind a prompt would be 17 of them; the allocator's own slack is less than 8 MiB
    grown = resident() - memory
    assert grown < 8 * 2**20, f"resident memory grew by {grown / 2**20:.1f} MiB over 18 prompts"
