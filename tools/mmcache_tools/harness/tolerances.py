# SPDX-License-Identifier: Apache-2.0
"""How far log-probabilities may be from Transformers', and from another run's, on the zoo's tiny models.

float32: within 1e-3, and equal greedy tokens but for ties. This is stricter than what holds for any model
(vllm_mmcache/exactness/distance.py). bfloat16, and a KV cache that holds less than was calculated: two correct programs
differ by far more.
"""

from __future__ import annotations

from vllm_mmcache.exactness.answers import Answer, Inexact

TOLERANCE = 1e-3
TIE = 1e-4  # tokens closer than both errors together are both the greedy one; float32 was seen to be 4e-5 off
BF16_SELF_TOLERANCE = 0.5  # against vLLM's own cold run: a hit computes the same sums in other chunks


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
