"""Models read straight into int8, and int8 models on disk."""

import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dispatch import int8_checkpoint
from dispatch.errors import InputError, LoadError
from dispatch.loading import load_target, save_int8
from dispatch.moe import Int8Experts, quantize_experts
from dispatch.targets import TARGETS, ModelSpec

TOKENS = torch.arange(5, 25)[None]


@torch.inference_mode()
def logits(loaded):
    return loaded.model(input_ids=TOKENS).logits


@pytest.fixture(params=["int8-experts", "int8-all"])
def spec(request):
    return TARGETS[f"tiny-{request.param}"]


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(TARGETS["tiny"].source, tmp_path / "model"))


def edit(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_same_model_as_converting_a_loaded_one(spec):
    stock = load_target(TARGETS["tiny"])
    quantize_experts(stock.model, layers=spec.int8_layers)
    straight = load_target(spec)
    assert torch.equal(logits(straight), logits(stock))
    names = {name: (tensor.dtype, tensor.shape) for name, tensor in stock.model.state_dict().items()}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in straight.model.state_dict().items()} == names
    assert not straight.model.training
    assert straight.eos_ids == stock.eos_ids
    assert {report.name: report.matched for report in straight.repairs}["rotary-buffers"] == 4


def test_a_dense_draft():
    draft = TARGETS["tiny"].draft
    stock, straight = load_target(draft), load_target(replace(draft, weights="int8-all"))
    quantize_experts(stock.model, layers="all")
    assert torch.equal(logits(straight), logits(stock))
    assert straight.eos_ids == stock.eos_ids
    with pytest.raises(LoadError, match="tiny-draft: .*has no layer to quantise"):
        load_target(replace(draft, weights="int8-experts"))


def test_bin_files(spec, folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(load_target(replace(spec, source=str(folder)))), logits(load_target(spec)))


def most_alive(spec, monkeypatch):
    """The most tensors of the checkpoint that were alive at once while it was read."""
    refs, counts = [], []
    read = int8_checkpoint._tensors

    def watched(folder):
        for key, tensor in read(folder):
            refs.append(weakref.ref(tensor))
            counts.append(sum(ref() is not None for ref in refs))
            yield key, tensor

    monkeypatch.setattr(int8_checkpoint, "_tensors", watched)
    load_target(spec)
    assert len(counts) == 186
    return max(counts)


def test_float_tensors_are_never_held_together(spec, monkeypatch):
    # the one that is being read, and the last one, which the loops' variables still name
    assert most_alive(spec, monkeypatch) <= 2


def test_holding_them_is_seen(spec, monkeypatch):
    kept, put = [], Int8Experts.put

    def keep(self, expert, projection, weight, name):
        kept.append(weight)
        put(self, expert, projection, weight, name)

    monkeypatch.setattr(Int8Experts, "put", keep)
    assert most_alive(spec, monkeypatch) >= 48 * 3


def test_written_and_read_again(spec, tmp_path):
    loaded = load_target(spec)
    save_int8(loaded, tmp_path / "out")
    again = load_target(replace(spec, source=str(tmp_path / "out")))
    assert torch.equal(logits(again), logits(loaded))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.down_values"].dtype == torch.int8
    with pytest.raises(InputError, match="is not empty: nothing is overwritten"):
        save_int8(loaded, tmp_path / "out")
    with pytest.raises(LoadError, match=f"holds an int8 model \\({spec.int8_layers}\\): ask for its weights as {spec.weights}"):
        load_target(replace(spec, source=str(tmp_path / "out"), weights="original"))
    other = "int8-all" if spec.weights == "int8-experts" else "int8-experts"
    with pytest.raises(LoadError, match=f"holds its {spec.int8_layers} layers in int8.*ask for {spec.weights}"):
        load_target(replace(spec, source=str(tmp_path / "out"), weights=other))


def test_in_shards(spec, tmp_path, monkeypatch):
    loaded = load_target(spec)
    save = int8_checkpoint.save_torch_state_dict
    monkeypatch.setattr(int8_checkpoint, "save_torch_state_dict", lambda *a, **o: save(*a, **o, max_shard_size=2**20))
    save_int8(loaded, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert torch.equal(logits(load_target(replace(spec, source=str(tmp_path / "out")))), logits(loaded))


def test_the_original_is_not_written_as_int8(tmp_path):
    with pytest.raises(InputError, match="tiny is in its original precision: load it with weights int8-experts or int8-all"):
        save_int8(load_target(TARGETS["tiny"]), tmp_path / "out")


EXPERT = "model.layers.2.mlp.experts.7.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop(EXPERT), f"1 tensors are missing from .*, the first {re.escape(EXPERT)}"),
        (lambda w: w.pop("model.norm.weight"), "1 tensors are missing from .*, the first model.norm.weight"),
        (lambda w: w.update({"extra.weight": torch.ones(1)}), "extra.weight in .* is unexpected"),
        (lambda w: w.update({EXPERT: torch.ones(3, 4)}), rf"{re.escape(EXPERT)} is \(3, 4\), expected \(192, 96\)"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight is \(3,\), expected \(192,\)"),
        (lambda w: w[EXPERT].fill_(torch.nan), rf"{re.escape(EXPERT)}\[0, 0\] is nan"),
    ],
    ids=["expert missing", "norm missing", "unexpected", "misshapen expert", "misshapen norm", "nan"],
)
def test_fails_closed(spec, folder, change, words):
    edit(folder, change)
    with pytest.raises(LoadError, match=f"tiny-{spec.weights}: .*{words}"):
        load_target(replace(spec, source=str(folder)))


@pytest.mark.parametrize(
    "change",
    [lambda w: w.pop("model.layers.1.mlp.experts.down_scales"), lambda w: w.pop("model.layers.1.mlp.experts.gate_up_values")],
)
def test_an_int8_checkpoint_fails_closed(spec, tmp_path, change):
    save_int8(load_target(spec), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="1 tensors are missing from .*mlp.experts"):
        load_target(replace(spec, source=str(tmp_path / "out")))


def test_unknown_weights():
    with pytest.raises(InputError, match="weights 'int4': expected one of original, int8-experts, int8-all"):
        ModelSpec(name="m", source=TARGETS["tiny"].source, weights="int4")
