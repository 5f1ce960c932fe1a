# SPDX-License-Identifier: Apache-2.0
"""What an answer must satisfy, with every tolerance that the checks of exactness use.

float32: log-probabilities within 1e-3 of Transformers on the cold prompt, and equal greedy tokens but for ties (TIE).
bfloat16 (qwen3.5 and qwen3.5-moe, whose GDN kernel wants it on the CPU): the reference is vLLM's own cold run, since
two correct bfloat16 programs differ by far more than 1e-3; Transformers gives a coarse second bound. What a wrong
picture does is measured by `assert_detects`: it must exceed these bounds many times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_mmcache.prove.engines import Answer, Rig
from vllm_mmcache.prove.oracle import Oracle

TOLERANCE = 1e-3
TIE = 1e-4  # tokens closer than both errors together are both the greedy one; float32 was seen to be 4e-5 off
BF16_SELF_TOLERANCE = 0.5  # against vLLM's own cold run: a hit computes the same sums in other chunks
BF16_ORACLE_TOLERANCE = 0.7  # against Transformers in float32


class Inexact(AssertionError):
    """The answer is not that of a cold run. The only failure that a strict xfail may stand for."""


def step_deltas(answer: Answer, oracle: torch.Tensor) -> list[float]:
    """Per step, the largest |delta logprob| over the chosen token and the engine's best ones.

    Shapes: oracle (num_answer_tokens, vocab) float32.
    """
    return [
        max(abs(value - float(oracle[i, token])) for token, value in step.items())
        for i, step in enumerate(answer.logprobs)
    ]


def assert_equals_oracle(answer: Answer, oracle: Oracle, tolerance: float = TOLERANCE) -> float:
    """The largest delta to Transformers; Inexact when over the tolerance or when a greedy token differs."""
    prompt_ids, expected = oracle.log_probabilities(answer.prompt, answer.images, answer.token_ids)
    assert tuple(prompt_ids) == answer.prompt_ids, "vLLM and Transformers expand the prompt differently"
    delta = max(step_deltas(answer, expected))
    if delta > tolerance:
        raise Inexact(f"log-probabilities differ by {delta:.2e} > {tolerance:.0e} for {answer.prompt[-80:]!r}")
    greedy = expected.argmax(-1).tolist()
    gaps = expected.max(-1).values - expected[torch.arange(len(greedy)), list(answer.token_ids)]
    tie = TIE if tolerance <= TOLERANCE else 2 * tolerance
    if bool((gaps > tie).any()):
        raise Inexact(f"tokens {list(answer.token_ids)} instead of {greedy}")
    return delta


def assert_equals_answer(answer: Answer, other: Answer, tolerance: float, whose: str) -> float:
    """The largest delta to another answer to the same prompt; Inexact when over the tolerance or when a token differs.

    After a tie the answers go on from other tokens, and nothing more is compared.
    """
    assert answer.prompt_ids == other.prompt_ids, f"the prompt has other tokens than in {whose}"
    worst = 0.0
    tie = TIE if tolerance <= TOLERANCE else 2 * tolerance
    for step, (seen, expected) in enumerate(zip(answer.logprobs, other.logprobs, strict=True)):
        shared = seen.keys() & expected.keys()
        delta = max(abs(seen[token] - expected[token]) for token in shared) if shared else float("inf")
        worst = max(worst, delta)
        if delta > tolerance:
            raise Inexact(f"step {step}: log-probabilities differ by {delta:.2e} > {tolerance:g} from {whose}")
        if answer.token_ids[step] != other.token_ids[step]:
            gap = expected[other.token_ids[step]] - expected.get(answer.token_ids[step], float("-inf"))
            if gap > tie:
                raise Inexact(
                    f"step {step}: token {answer.token_ids[step]}, not {other.token_ids[step]} as in {whose}, "
                    f"where it is worse by {gap:.2e}"
                )
            break
    return worst


def assert_equals_own_cold_run(rig: Rig, answers: Sequence[Answer], tolerance: float) -> float:
    """The largest delta to cold runs of the same prompts on the same engine. Empties the caches."""
    worst = 0.0
    for answer in answers:
        rig.make_cold()
        cold = rig.ask_again(answer)
        assert cold.num_cached_tokens == 0
        worst = max(worst, assert_equals_answer(answer, cold, tolerance, "the own cold run"))
    return worst


def tolerance_of(rig: Rig) -> float:
    """How far two runs of one engine may be apart, whatever its caches hold."""
    return TOLERANCE if rig.dtype is torch.float32 and not rig.has_other_kv else BF16_SELF_TOLERANCE


def assert_exact(rig: Rig, answers: Sequence[Answer], oracle: Oracle | None = None) -> float:
    """Every answer is that of a cold run, by the rule of the engine's dtype. Returns the largest delta.

    Without an oracle, and where the KV cache holds less than was calculated, the own cold run is all there is.
    """
    oracle = oracle or rig.oracle
    tolerance = tolerance_of(rig)
    if oracle is not None and tolerance == TOLERANCE:
        return max(assert_equals_oracle(answer, oracle) for answer in answers)
    worst = assert_equals_own_cold_run(rig, answers, tolerance)
    if oracle is None or rig.has_other_kv:
        return worst
    far = max(assert_equals_oracle(answer, oracle, BF16_ORACLE_TOLERANCE) for answer in answers)
    print(f"bfloat16: {worst:.2f} from the own cold run, {far:.2f} from Transformers in float32")
    return worst


def assert_detects(answer: Answer, other: Answer, oracle: Oracle) -> float:
    """Negative control: `answer`, had it been given to the question of `other`, is far out of tolerance.

    Returns the delta, which must be at least three times the widest bound.
    """
    _, expected = oracle.log_probabilities(other.prompt, other.images, answer.token_ids)
    delta = max(step_deltas(answer, expected))
    print(f"wrong picture: {delta:.2f}")
    assert delta > 3 * BF16_ORACLE_TOLERANCE, f"a wrong picture moves log-probabilities by {delta:.3f} only"
    return delta
