"""Loading fails closed: each way in which a model folder can be wrong, as an error that names what and where."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from dispatch import loading
from dispatch.errors import DrafterError, InputError, LoadError, RepairError
from dispatch.loading import check_same_tokenizer, load_draft, load_target, shared_vocabulary
from dispatch.targets import TARGETS, ModelSpec, target_spec

TINY = TARGETS["tiny"]


@pytest.fixture(scope="module")
def tiny():
    return load_target(TINY)


@pytest.fixture
def folder(tmp_path, request):
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)
    return Path(shutil.copytree(TINY.source, tmp_path / f"copy_{name}"))


def spec(folder, **changes):
    return replace(TINY, name="copy", source=str(folder), **changes)


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_code(folder, old, new):
    path = folder / "modeling_tiny_moe.py"
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_tiny_and_its_draft(tiny):
    assert tiny.context_limit == 256
    assert tiny.eos_ids == {1}
    assert tiny.files == "safetensors"
    assert not tiny.model.training
    assert next(tiny.model.parameters()).dtype == torch.float32
    reports = {report.name: (report.matched, report.changed) for report in tiny.repairs}
    assert reports["rope-scaling"] == (1, 1)
    assert reports["rotary-buffers"] == (4, 4)
    assert reports["tokenizer-class"] == (1, 1)
    draft = load_draft(tiny)
    assert type(draft.model).__name__ == "LlamaForCausalLM"
    assert shared_vocabulary(tiny, draft) == 2048
    active = sum(p.numel() for n, p in tiny.model.named_parameters() if "embed" not in n and ".experts." not in n)
    active += sum(p.numel() for n, p in tiny.model.named_parameters() if ".experts." in n) * 4 // 16  # top-4 of 16
    drafted = sum(p.numel() for n, p in draft.model.named_parameters() if "embed" not in n)
    assert active >= 4 * drafted


def test_second_load_in_one_process_gives_the_same_model(tiny):
    tokens = torch.tensor([[5, 6, 7]])
    again = load_target(TINY)
    with torch.inference_mode():
        assert torch.equal(tiny.model(input_ids=tokens).logits, again.model(input_ids=tokens).logits)


def test_weights_in_bin_files(folder, tiny):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loaded = load_target(spec(folder))
    assert loaded.files == "bin"
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert torch.equal(tiny.model(input_ids=tokens).logits, loaded.model(input_ids=tokens).logits)


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="no \\*.safetensors and no \\*.bin"):
        load_target(spec(folder))


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


def test_missing_weights(folder):
    edit_weights(folder, lambda weights: weights.pop(NAME))
    with pytest.raises(LoadError, match=f"copy: 1 missing keys between checkpoint and model, the first {NAME}"):
        load_target(spec(folder))


def test_missing_weights_that_the_remote_code_keeps_quiet_about(folder):
    # transformers #48892, #46620
    edit_weights(folder, lambda weights: weights.pop(NAME))
    edit_code(
        folder,
        "    _supports_sdpa = True\n",
        "    _supports_sdpa = True\n    _keys_to_ignore_on_load_missing = ['experts.3']\n",
    )
    with pytest.raises(LoadError, match=f"1 missing keys between checkpoint and model, the first {NAME}"):
        load_target(spec(folder))


def test_unexpected_weights(folder):
    edit_weights(folder, lambda weights: weights.update({"model.layers.9.extra": torch.ones(2)}))
    with pytest.raises(LoadError, match="1 unexpected keys between checkpoint and model, the first model.layers.9.extra"):
        load_target(spec(folder))


def test_mismatched_weights(folder):
    edit_weights(folder, lambda weights: weights.update({NAME: torch.ones(4, 5)}))
    sizes = r"torch.Size\(\[4, 5\]\), torch.Size\(\[96, 192\]\)"
    with pytest.raises(LoadError, match=rf"1 mismatched keys .* the first \('{NAME}', {sizes}\)"):
        load_target(spec(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights(folder, value):
    def edit(weights):
        weights[NAME][7, 3] = value

    edit_weights(folder, edit)
    with pytest.raises(LoadError, match=rf"copy: model.layers.1.mlp.experts.3.up_proj.weight\[7, 3\] is {value}"):
        load_target(spec(folder))


def test_expected_repair_that_matches_nothing(folder):
    # the frequencies under another name: no repair finds them, and garbage would decode fluently
    edit_code(folder, "inv_freq", "inverse_freq")
    with pytest.raises(LoadError, match="the repair 'rotary-buffers' was expected and matched nothing"):
        load_target(spec(folder))
    with pytest.raises(RepairError, match=r"rotary_emb.\w+ \(TinyMoeRotaryEmbedding\) is .*; its own class computes"):
        load_target(spec(folder, expected_repairs=()))


def test_unknown_rotary_variant(folder):
    edit_code(folder, "        self.base = base\n", "        self.base = base * 1.5\n")
    with pytest.raises(RepairError, match="constructor turned base=15000.0 into 22500.0"):
        load_target(spec(folder))


def test_model_that_does_not_depend_on_position(folder):
    edit_code(folder, "    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin\n", "    return q, k\n")
    with pytest.raises(LoadError, match="moving a token changes no logit"):
        load_target(spec(folder))


def test_forward_that_overflows(folder):
    def edit(weights):
        weights["lm_head.weight"][11] = 3e38

    edit_weights(folder, edit)
    with pytest.raises(LoadError, match="a forward over two tokens gives -?(inf|nan) at logit 11"):
        load_target(spec(folder))


def test_rope_scaling_that_the_remote_code_does_not_know(folder):
    edit_json(folder / "config.json", rope_scaling={"type": "strange", "factor": 2.0})
    with pytest.raises(LoadError, match="copy: .*(ValueError|KeyError).*strange"):
        load_target(spec(folder))


def test_remote_code_that_fails_is_a_load_error(folder):
    edit_code(folder, "import math\n", "import math\nraise ValueError('written for another version')\n")
    with pytest.raises(LoadError, match="copy: the model could not be built: ValueError: written for another version"):
        load_target(spec(folder))


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(LoadError, match="copy: config.json was not accepted"):
        load_target(spec(folder))


@pytest.mark.parametrize("limit", [None, 1, "256"])
def test_context_limit_must_be_stated(limit):
    class Config:
        max_position_embeddings = limit

    with pytest.raises(LoadError, match=f"tiny: config.max_position_embeddings is {limit!r}, expected the context limit"):
        loading._context_limit(TINY, Config())


def test_remote_code_runs_only_when_the_spec_says_so(folder):
    marker = folder / "ran"
    edit_code(folder, "import math\n", f"import math\nopen({str(marker)!r}, 'w').close()\n")
    with pytest.raises(InputError, match=r"comes with its own Python code .* pass --trust-remote-code"):
        load_target(spec(folder, remote_code=False))
    assert not marker.exists()
    load_target(spec(folder))
    assert marker.exists()


@pytest.mark.parametrize("revision", [None, "main", "521d2bc", "521D2BC4FB69A3F3AE565310FCC3B65F97AF2580"])
def test_hub_ids_must_be_pinned(revision):
    with pytest.raises(InputError, match="expected a full commit hash of 40 hexadecimal digits"):
        ModelSpec(name="x", source="deepseek-ai/deepseek-moe-16b-base", revision=revision, remote_code=True)


def test_hub_model_that_cannot_be_had(monkeypatch, tmp_path):
    def offline(source, revision, allow_patterns):
        raise FileNotFoundError("outgoing traffic has been disabled")

    monkeypatch.setattr(loading, "snapshot_download", offline)
    with pytest.raises(LoadError, match=r"deepseek-moe-16b: deepseek-ai/.* at 521d2bc.* could not be downloaded: outgoing"):
        load_target(TARGETS["deepseek-moe-16b"])


def test_hub_model_is_fetched_at_its_commit_and_bin_files_only_without_safetensors(monkeypatch, tmp_path):
    asked = []

    def download(source, revision, allow_patterns):
        asked.append((source, revision, allow_patterns))
        if "*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").touch()
        return str(tmp_path)

    monkeypatch.setattr(loading, "snapshot_download", download)
    hub = ModelSpec(name="x", source="org/name", revision="0" * 40)
    assert loading._folder(hub) == (str(tmp_path), "bin")
    assert asked == [
        ("org/name", "0" * 40, ["*.json", "*.model", "*.safetensors"]),
        ("org/name", "0" * 40, ["*.json", "*.model", "*.bin"]),
    ]
    (tmp_path / "model.safetensors").touch()
    assert loading._folder(replace(hub, remote_code=True)) == (str(tmp_path), "safetensors")
    assert asked[2:] == [("org/name", "0" * 40, ["*.json", "*.model", "*.py", "*.safetensors"])]


@pytest.mark.parametrize("text", ["tinny", "deepseek-moe", "", "no/such/folder", "../elsewhere"])
def test_unknown_targets(text):
    with pytest.raises(InputError, match="unknown target|expected an existing folder, or a hub id"):
        target_spec(text)


def test_target_specs(folder):
    assert target_spec("tiny") is TINY
    hub = target_spec("org/name@" + "0123456789" * 4, remote_code=True, draft=str(folder))
    assert (hub.name, hub.source, hub.revision, hub.remote_code) == ("name", "org/name", "0123456789" * 4, True)
    assert (hub.draft.source, hub.draft.remote_code) == (str(folder.resolve()), False)
    local = target_spec(str(folder))
    assert (local.name, local.revision, local.remote_code, local.draft) == (folder.name, None, False, None)
    assert (local.weights, local.int8_layers) == ("original", None)


def test_target_specs_in_int8(folder):
    local = target_spec(str(folder), weights="int8-all", draft=str(folder))
    assert (local.weights, local.int8_layers) == ("int8-all", "all")
    assert local.draft.weights == "int8-all"
    assert target_spec(str(folder), draft=str(folder)).draft.weights == "original"
    assert {name: spec.draft.weights for name, spec in TARGETS.items() if name.startswith("tiny")} == {
        "tiny": "original",
        "tiny-int8-experts": "int8-all",
        "tiny-int8-all": "int8-all",
    }
    hub = target_spec("org/name@" + "0123456789" * 4, weights="int8-experts")
    assert (hub.weights, hub.int8_layers) == ("int8-experts", "experts")
    # a named target says for itself
    assert target_spec("tiny", weights="int8-all") is TINY
    assert target_spec("tiny-int8-all").weights == "int8-all"
    with pytest.raises(InputError, match="weights 'int8': expected one of original, int8-experts, int8-all"):
        target_spec(str(folder), weights="int8")


def test_tokenizer_that_loses_text(folder):
    # transformers #45488, #48206: the class the file names drops every space of a byte-level tokenizer
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(LoadError, match=r"the tokenizer .* turns .* into .*, expected it back"):
        load_target(spec(folder))


def test_prompts_keep_their_spaces(tiny):
    ids = tiny.encode("def f(x):\n    return x")
    assert ids[0] == 0
    assert tiny.decode(ids) == "<|begin|>def f(x):\n    return x"


@pytest.mark.parametrize(("setting", "expected"), [(True, [0, 5]), (False, [5]), (None, [5])])
def test_beginning_of_sequence_as_the_settings_say(folder, setting, expected):
    edit_json(folder / "tokenizer_config.json", add_bos_token=setting)
    loaded = load_target(spec(folder))
    assert loaded.encode(loaded.decode([5])) == expected


def test_drafts_with_another_tokenizer(tiny, tmp_path):
    draft = load_draft(tiny)
    vocabulary = json.loads(draft.tokenizer.backend_tokenizer.to_str())
    (a, b), tokens = ("def", "re"), vocabulary["model"]["vocab"]
    tokens[a], tokens[b] = tokens[b], tokens[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    other = replace(draft, tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")))
    message = r"target tiny \(2048 tokens\) and draft tiny-draft \(2048 tokens\) have different tokenizers: 'def' is \d+ in one"
    with pytest.raises(DrafterError, match=message):
        check_same_tokenizer(tiny, other)


def test_drafts_that_split_text_differently(tiny, tmp_path):
    draft = load_draft(tiny)
    settings = json.loads(draft.tokenizer.backend_tokenizer.to_str())
    settings["model"]["merges"] = settings["model"]["merges"][:50]
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    other = replace(
        draft, tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|begin|>")
    )
    with pytest.raises(DrafterError, match="share a vocabulary and split text differently"):
        check_same_tokenizer(tiny, other)


def test_target_without_a_draft(tiny):
    with pytest.raises(InputError, match="target tiny names no draft model: give one with --draft"):
        load_draft(replace(tiny, spec=replace(TINY, draft=None)))


@pytest.mark.parametrize(("stated", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_end_of_sequence_ids(tiny, stated, expected):
    class Generation:
        eos_token_id = stated

    class Model:
        generation_config = Generation()

    class Config:
        eos_token_id = stated

    assert loading._eos_ids(Model(), Config()) == expected
