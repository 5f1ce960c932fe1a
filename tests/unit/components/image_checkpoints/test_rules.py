# SPDX-License-Identifier: Apache-2.0
"""Which groups of the KV cache hold a state, as the rules tell them apart."""

from types import SimpleNamespace

import pytest

from vllm_mmcache.components.image_checkpoints.rules import state_in

pytestmark = pytest.mark.answers


@pytest.mark.parametrize(
    ("is_hybrid", "is_v2", "drafter", "said"),
    [
        (False, False, None, "None"),
        (True, False, None, "None"),
        (False, False, "ngram", "None"),
        (False, True, "ngram", "off: not shown to be right with speculative decoding by ngram on model runner V2"),
        (False, True, "eagle", "None"),
        (False, True, "draft_model", "None"),
        (False, False, "draft_model", "off: not shown to be right with speculative decoding by draft_model"),
        (False, False, "mtp", "off: not shown to be right with speculative decoding by mtp"),
        (True, False, "ngram", "off: wrong prefix hits of Mamba states are reported with speculative"),
        (True, False, "mtp", "off: wrong prefix hits of Mamba states are reported with speculative"),
        (True, True, "mtp", "None"),
        (False, True, "mtp", "off: not shown to be right with speculative decoding by mtp on model runner V2"),
        (True, True, "eagle", "off: not shown to be right with speculative decoding by eagle on a hybrid model on"),
    ],
)
def test_hybrids_and_other_drafters_have_none(is_hybrid: bool, is_v2: bool, drafter: str | None, said: str) -> None:
    assert str(state_in(config(is_hybrid, is_v2, drafter))).startswith(said)


@pytest.mark.parametrize(
    ("is_hybrid", "is_v2", "is_async", "drafter", "said"),
    [
        (False, False, False, None, "None"),
        (False, False, True, None, "off: with a KV connector, not shown to be right with async scheduling on model"),
        (False, True, True, None, "None"),
        (True, True, True, None, "off: with a KV connector, vLLM uses a Mamba state before the load that brings it"),
        (
            False,
            True,
            True,
            "eagle",
            "off: not shown to be right with a KV connector and speculative decoding together",
        ),
    ],
)
def test_beside_a_connector(is_hybrid: bool, is_v2: bool, is_async: bool, drafter: str | None, said: str) -> None:
    assert str(state_in(config(is_hybrid, is_v2, drafter, is_async, connector="SomeConnector"))).startswith(said)


@pytest.mark.parametrize(("ranks", "said"), [(1, "None"), (2, "off: which checkpoints pay is measured")])
def test_under_an_external_launcher(ranks: int, said: str) -> None:
    """Each rank has a scheduler of its own, and all must decide alike."""
    launched = config(True, False, None)
    launched.parallel_config.distributed_executor_backend = "external_launcher"
    launched.parallel_config.world_size = ranks
    assert str(state_in(launched)).startswith(said)


def config(
    is_hybrid: bool, is_v2: bool, drafter: str | None, is_async: bool = False, connector: str | None = None
) -> SimpleNamespace:
    """The parts of a VllmConfig that the rules read."""
    takes_images = SimpleNamespace(get_limit_per_prompt=lambda modality: 999)
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_hybrid=is_hybrid, multimodal_config=takes_images),
        speculative_config=SimpleNamespace(method=drafter) if drafter else None,
        kv_transfer_config=connector,
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        use_v2_model_runner=is_v2,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            distributed_executor_backend="mp",
            world_size=2,
        ),
    )
