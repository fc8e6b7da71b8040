"""The one way in which any model is loaded: config, remote code, weights, repairs, tokenizer, and what makes it refuse."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dispatch.errors import DrafterError, InputError, LoadError
from dispatch.int8_checkpoint import read_int8, stored_layers, write_int8
from dispatch.repairs import RepairReport, repair_config, repair_model, repair_transformers, verify_buffers
from dispatch.targets import ModelSpec

_PROBE = "def f(x):\n    return  x + 12345  # naïve 中文 🙂\n\n\tDon't STOP"
"""Text that any tokenizer must give back: indentation, accents, other scripts, a tab."""


_FROM_TRANSFORMERS = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What transformers and remote code raise for a folder they cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in eval mode that passed every check of `load_target`, and what decoding needs to know of it."""

    spec: ModelSpec
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    repairs: tuple[RepairReport, ...]
    folder: str
    files: str
    """"safetensors" or "bin": what the weights were read from."""
    context_limit: int
    eos_ids: frozenset[int]
    first_id: int | None
    """The id that every prompt begins with, if any."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with a beginning-of-sequence id where tokenizer_config.json asks for one."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids if self.first_id is None or ids[:1] == [self.first_id] else [self.first_id, *ids]

    def decode(self, ids: Any) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def load_target(spec: ModelSpec, *, device: str | torch.device = "cpu") -> LoadedModel:
    """Loads config, remote code, weights and tokenizer, repairs what transformers 5.x breaks, and refuses what is not right.

    Raises LoadError, naming module and value: missing, unexpected or mismatched keys; non-finite weights; buffers that are not
    what their class computes; a rotary variant no repair knows; an expected repair that matched nothing; a forward that is not
    finite or does not depend on position. Raises InputError for remote code the spec does not allow.
    """
    folder, files = _folder(spec)
    reports = list(repair_transformers()) if spec.remote_code else []
    config = _config(spec, folder)
    if spec.remote_code:
        reports.append(repair_config(config))
    model = _int8(spec, folder, config, device) if spec.int8_layers else _weights(spec, folder, files, config)
    model.to(device).eval()  # type: ignore[arg-type]
    reports += repair_model(model)
    _check_repairs(spec, reports)
    verify_buffers(model)
    _check_parameters(spec, model)
    _check_positions(spec, model)
    tokenizer, first_id, report = _tokenizer(spec, folder)
    reports.append(report)
    return LoadedModel(
        spec=spec,
        model=model,
        tokenizer=tokenizer,
        repairs=tuple(reports),
        folder=folder,
        files=files,
        context_limit=_context_limit(spec, config),
        eos_ids=_eos_ids(model, config),
        first_id=first_id,
    )


def save_int8(loaded: LoadedModel, folder: str | Path) -> None:
    """Writes a model loaded in int8, so that it loads again without its float weights: give the folder as --target.

    Raises InputError for a model in its original precision, and for a folder that holds anything.
    """
    if not loaded.spec.int8_layers:
        raise InputError(f"{loaded.spec.name} is in its original precision: load it with weights int8-experts or int8-all")
    write_int8(loaded.model, loaded.folder, folder, layers=loaded.spec.int8_layers)


def load_draft(target: LoadedModel, *, device: str | torch.device = "cpu") -> LoadedModel:
    """Loads the target's draft model; raises DrafterError unless both tokenizers give the same ids for the same text."""
    spec = target.spec.draft
    if spec is None:
        raise InputError(f"target {target.spec.name} names no draft model: give one with --draft, or draft by prompt lookup")
    draft = load_target(spec, device=device)
    check_same_tokenizer(target, draft)
    return draft


def check_same_tokenizer(target: LoadedModel, draft: LoadedModel) -> None:
    """Raises DrafterError naming both models and the first token they disagree on."""
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    between = f"target {target.spec.name} ({len(ours)} tokens) and draft {draft.spec.name} ({len(theirs)} tokens)"
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        token = different[0]
        raise DrafterError(
            f"{between} have different tokenizers: {token!r} is {ours.get(token)} in one and {theirs.get(token)} in the other, "
            f"{len(different)} differ in all. A draft's ids would mean other text to the target: use a draft of the same family"
        )
    # one vocabulary can be cut up by different rules
    if target.encode(_PROBE) != draft.encode(_PROBE):
        raise DrafterError(f"{between} share a vocabulary and split text differently: {_PROBE!r} gives different ids")


def shared_vocabulary(target: LoadedModel, draft: LoadedModel) -> int:
    """Number of token ids, counted from 0, that are real tokens and that both models have rows for; padded rows lie above."""
    rows = [int(loaded.model.get_output_embeddings().out_features) for loaded in (target, draft)]
    return min(*rows, 1 + max(int(index) for index in target.tokenizer.get_vocab().values()))


def _folder(spec: ModelSpec) -> tuple[str, str]:
    """The local folder that holds the model, downloaded if need be, and which kind of weight files it has."""
    folder = spec.source
    if not Path(folder).is_dir():
        wanted = ["*.json", "*.model", *(["*.py"] if spec.remote_code else [])]
        try:
            folder = snapshot_download(spec.source, revision=spec.revision, allow_patterns=[*wanted, "*.safetensors"])
            if not any(Path(folder).glob("*.safetensors")):
                folder = snapshot_download(spec.source, revision=spec.revision, allow_patterns=[*wanted, "*.bin"])
        except (OSError, ValueError) as error:
            raise LoadError(
                f"{spec.name}: {spec.source} at {spec.revision} is not in the local cache and could not be downloaded: {error}"
            ) from error
    for kind, pattern in (("safetensors", "*.safetensors"), ("bin", "*.bin")):
        if any(Path(folder).glob(pattern)):
            return folder, kind
    raise LoadError(f"{spec.name}: {folder} has no *.safetensors and no *.bin: not a model folder, or an unfinished download")


def _config(spec: ModelSpec, folder: str) -> PretrainedConfig:
    if not spec.remote_code:
        raw, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
        if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
            raise InputError(
                f"{spec.name} comes with its own Python code ({', '.join(sorted(raw['auto_map'].values()))}), and its spec "
                "does not allow that to run: read it, then pass --trust-remote-code"
            )
    with warnings.catch_warnings():
        # remote code sets rope_scaling, which 5.24 deprecates; repair_config looks after what it means
        warnings.filterwarnings("ignore", message="`rope_scaling` is deprecated", category=FutureWarning)
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                folder, trust_remote_code=spec.remote_code, local_files_only=True
            )
        except _FROM_TRANSFORMERS as error:
            raise LoadError(f"{spec.name}: config.json was not accepted: {type(error).__name__}: {error}") from error
    return config


def _tokenizer(spec: ModelSpec, folder: str) -> tuple[Any, int | None, RepairReport]:
    """The tokenizer as tokenizer.json defines it, whatever class tokenizer_config.json names, and the id prompts begin with.

    DeepSeek's files name LlamaTokenizerFast over a byte-level tokenizer.json; 5.x follows the name and loses every space
    (transformers #45488). Raises LoadError if text does not survive encoding and decoding.
    """
    path = Path(folder, "tokenizer_config.json")
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    generic = Path(folder, "tokenizer.json").exists()
    loader = PreTrainedTokenizerFast if generic else AutoTokenizer
    tokenizer = loader.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(_PROBE, add_special_tokens=False).input_ids
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if back != _PROBE:
        raise LoadError(
            f"{spec.name}: the tokenizer ({type(tokenizer).__name__}) turns {_PROBE!r} into {back!r}, expected it back"
        )
    renamed = generic and str(settings.get("tokenizer_class")).startswith("Llama")
    # the setting belongs to the class that the file names, so the class in use does not follow it
    first_id = tokenizer.bos_token_id if settings.get("add_bos_token") else None
    return tokenizer, first_id, RepairReport(name="tokenizer-class", matched=1, changed=int(renamed))


def _weights(spec: ModelSpec, folder: str, kind: str, config: PretrainedConfig) -> PreTrainedModel:
    in_int8 = stored_layers(folder)
    if in_int8:
        raise LoadError(f"{spec.name}: {folder} holds an int8 model ({in_int8}): ask for its weights as int8-{in_int8}")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=spec.dtype,
            trust_remote_code=spec.remote_code,
            use_safetensors=kind == "safetensors",
            weights_only=True,
            local_files_only=True,
            output_loading_info=True,
            # not to be ignored, but to be named below; by itself transformers says only that there is one
            ignore_mismatched_sizes=True,
        )
    except _FROM_TRANSFORMERS as error:
        raise LoadError(f"{spec.name}: the model could not be built: {type(error).__name__}: {error}") from error
    model: PreTrainedModel
    model, info = loaded
    found = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if spec.remote_code and kind == "safetensors":
        # remote code may tell transformers which missing keys to keep quiet about, so they are counted here as well
        stored = {key for file in Path(folder).glob("*.safetensors") for key in safe_open(file, framework="pt").keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        found["missing_keys"] = sorted({*found["missing_keys"], *(model.state_dict().keys() - stored - tied)})
    for name, keys in found.items():
        if keys:
            raise LoadError(
                f"{spec.name}: {len(keys)} {name.replace('_', ' ')} between checkpoint and model, the first {keys[0]}: "
                "every parameter must come from the checkpoint, and everything in it must be used"
            )
    return model


def _int8(spec: ModelSpec, folder: str, config: PretrainedConfig, device: str | torch.device) -> PreTrainedModel:
    assert spec.int8_layers is not None
    try:
        model: PreTrainedModel = read_int8(
            folder, config, layers=spec.int8_layers, dtype=spec.dtype, remote_code=spec.remote_code, device=device
        )
    except LoadError as error:
        raise LoadError(f"{spec.name}: {error}") from error
    except _FROM_TRANSFORMERS as error:
        raise LoadError(f"{spec.name}: the int8 model could not be built: {type(error).__name__}: {error}") from error
    return model


def _check_repairs(spec: ModelSpec, reports: list[RepairReport]) -> None:
    matched = {report.name for report in reports if report.matched}
    for name in spec.expected_repairs:
        if name not in matched:
            raise LoadError(
                f"{spec.name}: the repair {name!r} was expected and matched nothing (matched: {', '.join(sorted(matched))}). "
                "The model's code has changed its names, and may run broken: see dispatch/repairs.py"
            )


def _check_parameters(spec: ModelSpec, model: nn.Module) -> None:
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise LoadError(f"{spec.name}: {name} has no data (meta device): the checkpoint did not fill it")
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            index = tuple((~finite).nonzero()[0].tolist())
            raise LoadError(f"{spec.name}: {name}{list(index)} is {tensor[index].item()}, expected finite weights")


@torch.inference_mode()
def _check_positions(spec: ModelSpec, model: Any) -> None:
    """Two tokens at positions 0 and 1, and the same two both at position 0, must give finite and different logits."""
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor([[1, 2]], device=device)
    apart, together = (
        model(input_ids=tokens, position_ids=torch.tensor([[0, at]], device=device), use_cache=False).logits[0, 1]
        for at in (1, 0)
    )
    if not bool(torch.isfinite(apart).all()):
        bad = int((~torch.isfinite(apart)).nonzero()[0])
        raise LoadError(
            f"{spec.name}: a forward over two tokens gives {float(apart[bad])} at logit {bad}, expected finite logits"
        )
    if torch.equal(apart, together):
        raise LoadError(
            f"{spec.name}: moving a token changes no logit (the first is {float(apart[0]):.6g} both times), "
            "expected a dependence on position: are the rotary frequencies all zero?"
        )


def _context_limit(spec: ModelSpec, config: PretrainedConfig) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 2:
        raise LoadError(f"{spec.name}: config.max_position_embeddings is {limit!r}, expected the context limit in tokens")
    return limit


def _eos_ids(model: Any, config: PretrainedConfig) -> frozenset[int]:
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stated is None:
        stated = getattr(config, "eos_token_id", None)
    if stated is None:
        return frozenset()
    return frozenset([stated] if isinstance(stated, int) else stated)
