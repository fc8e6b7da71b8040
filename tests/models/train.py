"""Makes the embedded models from nothing: a byte-level BPE tokenizer, the MoE target, and a draft distilled beside it.

The text is the Python standard library's own source, without its tests, which is on every machine that has Python.

    python tests/models/train.py --minutes 80            # resumes from build/tiny-training/checkpoint.pt if it is there
    python tests/models/train.py --export-only           # writes the model folders from the checkpoint as it is

The learning rate falls linearly with the time spent, so a run always ends at rate zero; the checkpoint keeps the time.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache

from dispatch.repairs import repair_config, repair_transformers

HERE = Path(__file__).resolve().parent
TARGET, DRAFT = HERE / "tiny-moe", HERE / "tiny-draft"
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__", "turtledemo"}
HELD_OUT_EVERY = 40  # every 40th file is never trained on
SEQUENCE = 256
BATCH = 10


def library_files():
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        files += [Path(folder) / name for name in sorted(names) if name.endswith(".py")]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    texts = [text for text in texts if text.strip()]
    held_out = texts[::HELD_OUT_EVERY]
    return [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY], held_out


def train_tokenizer(texts, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|begin|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", model_max_length=SEQUENCE
    )


def encode(tokenizer, texts):
    """All files after one another, each as <|begin|> ... <|end|>: int64 [tokens]."""
    ids = []
    for piece in tokenizer(texts, add_special_tokens=False).input_ids:
        ids += [tokenizer.bos_token_id, *piece, tokenizer.eos_token_id]
    return torch.tensor(ids)


def build_models(vocab_size):
    repair_transformers()
    config = AutoConfig.from_pretrained(TARGET, trust_remote_code=True)
    repair_config(config)
    target = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.float32)
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=SEQUENCE,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        )
    )
    return target, draft


def make_optimizer(model):
    """AdamW; what is not a matrix (the norms) does not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def balance_loss(model):
    return sum(module.aux_loss for module in model.modules() if getattr(module, "aux_loss", None) is not None)


@torch.no_grad()
def continue_greedily(target, tokens, generator, *, prompts=64, new=128):
    """Random pieces of the text, and what the target makes of them.

    Returns the sequences, int64 [prompts, length + new], the pieces' length, and the target's distribution behind each new
    token, sharpened towards its choice: the 16 likeliest ids, int64 [prompts, new, 16], and their probabilities.
    """
    length = int(torch.randint(12, 100, (1,), generator=generator))
    starts = torch.randint(len(tokens) - length, (prompts,), generator=generator)
    sequences = torch.stack([tokens[s : s + length] for s in starts.tolist()])
    cache = DynamicCache(config=target.config)
    latest, ids, weights = sequences, [], []
    for _ in range(new):
        best = target(input_ids=latest, past_key_values=cache, use_cache=True).logits[:, -1].topk(16)
        ids.append(best.indices)
        weights.append((2 * best.values).softmax(-1))
        latest = best.indices[:, :1]
        sequences = torch.cat([sequences, latest], dim=-1)
    return sequences, length, torch.stack(ids, dim=1), torch.stack(weights, dim=1)


def imitate(target, draft, tokens, *, minutes, rate, seed):
    """Teaches the draft the target's own greedy continuations, which is what it will have to guess.

    A third of the time goes into writing them, the rest into learning them.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    target.eval()
    written, started, budget = [], time.monotonic(), minutes * 60
    with tqdm(total=round(budget), unit="s", desc="imitate") as bar:
        while (spent := time.monotonic() - started) < budget:
            bar.n = round(spent)
            bar.update(0)
            if spent < budget / 3 or not written:
                written.append(continue_greedily(target, tokens, generator))
                optimizer = make_optimizer(draft.train())
                average = None
                continue
            sequences, length, ids, weights = written[int(torch.randint(len(written), (1,), generator=generator))]
            some = torch.randperm(len(sequences), generator=generator)[:16]
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - spent / budget) * 1.5
            logits = draft(input_ids=sequences[some, :-1], use_cache=False).logits[:, length - 1 :]
            loss = -(logits.log_softmax(-1).gather(-1, ids[some]) * weights[some]).sum(-1).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
            bar.set_postfix(loss=f"{average:.3f}", written=64 * len(written), refresh=False)


@torch.no_grad()
def held_out_loss(model, tokens, windows=200):
    """Mean next-token loss in nats over the first `windows` windows of held-out text."""
    model.eval()
    total = count = 0
    for start in range(0, min(windows * SEQUENCE, len(tokens) - SEQUENCE - 1), SEQUENCE):
        window = tokens[start : start + SEQUENCE + 1]
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += F.cross_entropy(logits.float(), window[1:], reduction="sum").item()
        count += len(window) - 1
    model.train()
    return total / count


def export(target, draft, tokenizer, held_out, figures):
    """Writes both model folders in bfloat16, and the losses that the rounded weights have."""
    for folder, model in ((TARGET, target), (DRAFT, draft)):
        rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: tensor.float() for name, tensor in rounded.items()})
        figures[f"held_out_loss_{folder.name}"] = round(held_out_loss(model, held_out), 4)
        if model is draft:
            draft.config.dtype = torch.bfloat16
            draft.config.save_pretrained(folder)
        save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)
        # the class DeepSeek's files name, which does not fit a byte-level tokenizer.json: the loader must cope
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (HERE / "training.json").write_text(json.dumps(figures, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80, help="time budget over all resumed runs (default 80)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate at the start (default 3e-3)")
    parser.add_argument("--work", type=Path, default=Path("build/tiny-training"), help="where checkpoints go")
    parser.add_argument("--restart-draft", action="store_true", help="resume the target with a new draft beside it")
    parser.add_argument(
        "--imitate-minutes", type=float, default=20, help="then teach the draft the target's greedy output (default 20)"
    )
    parser.add_argument("--export-only", action="store_true", help="write the model folders from the checkpoint")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work / "checkpoint.pt"

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    texts, held_out_texts = library_files()
    vocab_size = json.loads((TARGET / "config.json").read_text())["vocab_size"]
    tokenizer_folder = args.work / "tokenizer"
    if not tokenizer_folder.exists():
        train_tokenizer(texts, vocab_size).save_pretrained(tokenizer_folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    held_out = encode(tokenizer, held_out_texts)
    target, draft = build_models(vocab_size)
    pair = {"target": target, "draft": draft}
    optimizers = {name: make_optimizer(model) for name, model in pair.items()}
    step, spent, draft_from, imitated = 0, 0.0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        step, spent, draft_from, imitated = (state[name] for name in ("step", "spent", "draft_from", "imitated"))
        if args.restart_draft:
            draft_from = step
        for name in ("target",) if args.restart_draft else pair:
            pair[name].load_state_dict(state[name])
            optimizers[name].load_state_dict(state["optimizers"][name])
    if not args.export_only:
        tokens = encode(tokenizer, texts)
        print(f"{len(texts)} files, {len(tokens):,} tokens to train on, {len(held_out):,} held out", file=sys.stderr)

    def save():
        torch.save(
            {
                **{name: model.state_dict() for name, model in pair.items()},
                "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
                "step": step,
                "spent": spent,
                "draft_from": draft_from,
                "imitated": imitated,
            },
            checkpoint.with_suffix(".new"),
        )
        shutil.move(checkpoint.with_suffix(".new"), checkpoint)

    budget = args.minutes * 60
    last = saved = time.monotonic()
    average = {}
    with tqdm(total=round(budget), initial=round(spent), unit="s", disable=args.export_only) as bar:
        while spent < budget and not args.export_only:
            # one generator a step, so that a resumed run sees the batches it would have seen
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
            starts = torch.randint(len(tokens) - SEQUENCE - 1, (BATCH,), generator=generator)
            batch = torch.stack([tokens[s : s + SEQUENCE + 1] for s in starts.tolist()])
            inputs, labels = batch[:, :-1], batch[:, 1:].reshape(-1)
            for optimizer, since in ((optimizers["target"], 0), (optimizers["draft"], draft_from)):
                for group in optimizer.param_groups:
                    group["lr"] = args.rate * min(1.0, (step + 1 - since) / 100) * max(0.0, 1 - spent / budget)
            target.train()
            draft.train()
            logits = target(input_ids=inputs, use_cache=False).logits.view(-1, vocab_size)
            target_loss = F.cross_entropy(logits, labels)
            (target_loss + balance_loss(target)).backward()
            drafted = draft(input_ids=inputs, use_cache=False).logits.view(-1, vocab_size)
            draft_loss = F.cross_entropy(drafted, logits.detach().softmax(-1))
            draft_loss.backward()
            for name, model in pair.items():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizers[name].step()
                optimizers[name].zero_grad(set_to_none=True)
            for name, value in (("target", target_loss.item()), ("draft", draft_loss.item())):
                if not math.isfinite(value):
                    raise RuntimeError(f"step {step}: {name} loss is {value}")
                average[name] = 0.98 * average.get(name, value) + 0.02 * value
            step += 1
            now = time.monotonic()
            spent, last = spent + now - last, now
            bar.n = round(min(spent, budget))
            bar.set_postfix({"step": step, **{name: f"{value:.3f}" for name, value in average.items()}}, refresh=False)
            bar.update(0)
            if now - saved > 300:
                save()
                saved = now
    if not args.export_only:
        save()
        if not imitated:
            imitate(target, draft, tokens, minutes=args.imitate_minutes, rate=args.rate / 2, seed=args.seed)
            imitated = args.imitate_minutes
            save()
    figures = {
        "steps": step,
        "tokens_seen": step * BATCH * SEQUENCE,
        "draft_from_step": draft_from,
        "imitation_minutes": imitated,
        "minutes": round(spent / 60, 1),
        "seed": args.seed,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "parameters_tiny-moe": sum(p.numel() for p in target.parameters()),
        "parameters_tiny-draft": sum(p.numel() for p in draft.parameters()),
    }
    export(target, draft, tokenizer, held_out, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
