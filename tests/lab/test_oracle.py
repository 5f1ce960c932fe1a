# SPDX-License-Identifier: Apache-2.0
"""The judge of the exactness tests: which differences from Transformers are none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmcache_tools.harness.oracle import assert_equals_oracle
from mmcache_tools.harness.tolerances import TIE, TOLERANCE

from vllm_mmcache.exactness.answers import Answer, Inexact

pytestmark = pytest.mark.answers

PROMPT_IDS = (5, 6)


def says(*scores: float) -> Any:
    """An oracle whose log-probabilities of one step, before they are normalised, are these."""
    expected = torch.tensor([scores]).log_softmax(-1)
    return SimpleNamespace(log_probabilities=lambda prompt, images, token_ids: (PROMPT_IDS, expected))


def answered(token: int, oracle: Any, off: float = 0.0) -> Answer:
    """An engine's answer of one token, with log-probabilities that are `off`."""
    _, expected = oracle.log_probabilities("", (), ())
    logprobs = ({number: float(value) + off for number, value in enumerate(expected[0])},)
    return Answer("", (), PROMPT_IDS, (token,), logprobs, 0, "")


def test_another_token_is_right_in_a_tie_alone() -> None:
    tie = says(1.0, 1.0 - TIE / 2, 0.0)
    assert assert_equals_oracle(answered(0, tie), tie) == 0
    assert assert_equals_oracle(answered(1, tie), tie) == 0
    apart = says(1.0, 1.0 - TIE * 2, 0.0)
    with pytest.raises(Inexact, match="tokens"):
        assert_equals_oracle(answered(1, apart), apart)


def test_log_probabilities_out_of_tolerance() -> None:
    oracle = says(1.0, 0.5)
    assert_equals_oracle(answered(0, oracle, TOLERANCE / 2), oracle)
    with pytest.raises(Inexact, match="log-probabilities"):
        assert_equals_oracle(answered(0, oracle, TOLERANCE * 2), oracle)
