"""Speculative decoding, greedy and exact: propose, verify in one target forward, accept, roll back (arXiv:2211.17192).

With greedy decoding the accept rule is plain equality: a drafted token stays if it is the one the target would have picked.
"""

import time
from collections.abc import Callable, Collection, Sequence

from dispatch.decoding import Target, check_prompt, pick
from dispatch.drafters import Drafter
from dispatch.errors import CacheError, DrafterError, InputError
from dispatch.results import FinishReason, Result, Step


def decode_speculative(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    k: int,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    to_text: Callable[[Sequence[int]], str] = str,
) -> Result:
    """Greedy continuation of prompt token ids, drafting at most k tokens a round. Target and drafter are reset first.

    Ends after the first end-of-sequence id, after max_new_tokens, or when prompt and output fill the context limit.
    Raises InputError for a bad prompt, k or budget; DrafterError for a drafter that breaks its contract; CacheError when a
    cache is not as long as the committed tokens say; NonFiniteLogitsError for logits no token can be picked from.
    """
    check_prompt(prompt, max_new_tokens, target.vocab_size, target.context_limit)
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1 drafted token a round; for plain decoding use decode_greedy")
    target.reset()
    drafter.reset()
    sequence = list(prompt)
    steps: list[Step] = []
    most = min(len(prompt) + max_new_tokens, target.context_limit)

    started = time.perf_counter()
    new = pick(target.forward(prompt)[-1:])
    sequence += new
    drafter.observe(sequence)
    prefilled = time.perf_counter()
    while new[-1] not in eos_ids and len(sequence) < most:
        # a round always adds one token of the target's own, so that much room is not for drafts
        room = min(k, most - len(sequence) - 1)
        drafted = _checked(drafter.propose(sequence, room), room, target.vocab_size) if room else []
        picked = pick(target.forward([sequence[-1], *drafted]))
        accepted, forwarded = accept(drafted, picked), 1 + len(drafted)
        new = [*drafted[:accepted], picked[accepted]]
        end = next((i for i, token in enumerate(new) if token in eos_ids), None)
        if end is not None:
            # what was drafted after the end of the sequence counts nowhere
            new, drafted, accepted = new[: end + 1], drafted[: end + 1], min(accepted, end + 1)
        sequence += new
        # the newest token is not in the cache: it goes in with the next round
        target.rollback(forwarded - len(new))
        drafter.observe(sequence)
        _check_lengths(target, drafter, len(sequence))
        steps.append(Step(drafted=len(drafted), accepted=accepted))
    ended = time.perf_counter()

    reason: FinishReason = "context_limit"
    if new[-1] in eos_ids:
        reason = "eos"
    elif len(sequence) == len(prompt) + max_new_tokens:
        reason = "max_new_tokens"
    tokens = tuple(sequence[len(prompt) :])
    return Result(
        tokens=tokens,
        text=to_text(tokens),
        finish_reason=reason,
        prefill_seconds=prefilled - started,
        decode_seconds=ended - prefilled,
        forwards=len(steps),
        steps=tuple(steps),
    )


def accept(drafted: Sequence[int], picked: Sequence[int]) -> int:
    """Length of the longest prefix of `drafted` that the target picked too; picked[i] is its token in place of drafted[i]."""
    for i, token in enumerate(drafted):
        if token != picked[i]:
            return i
    return len(drafted)


def _checked(drafted: list[int], room: int, vocab_size: int) -> list[int]:
    if len(drafted) > room:
        raise DrafterError(f"the drafter returned {len(drafted)} tokens, asked for at most {room}")
    for i, token in enumerate(drafted):
        if not 0 <= token < vocab_size:
            raise DrafterError(
                f"drafted token {i} is {token}, outside the target's vocabulary [0, {vocab_size}): do both use one tokenizer?"
            )
    return drafted


def _check_lengths(target: Target, drafter: Drafter, committed: int) -> None:
    if target.length != committed - 1:
        raise CacheError(f"the target's cache holds {target.length} tokens, expected {committed - 1} of {committed} committed")
    if drafter.length > committed:
        raise CacheError(f"the drafter's state covers {drafter.length} tokens, and only {committed} are committed")
