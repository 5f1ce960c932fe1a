# SPDX-License-Identifier: Apache-2.0
"""Known videos on real engines: they are not decoded, and the answer stays the same."""

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.tolerances import assert_equals_answer

from tests.support.films import Part, chat, file_of, frames_of, takes_videos
from vllm_mmcache.metrics import counters

pytestmark = pytest.mark.engine

CONFIGS = [
    pytest.param(takes_videos(family), id=family, marks=[pytest.mark.any_engine] * (family == "qwen3-vl"))
    for family in ("qwen3-vl", "qwen3.5", "glm4v")  # tests/engine/features asks the others
]


class Decoded:
    """Videos that were decoded since the last look."""

    def __init__(self) -> None:
        self._seen = counters.VIDEOS_DECODED.value

    def new(self) -> int:
        before, self._seen = self._seen, counters.VIDEOS_DECODED.value
        return int(self._seen - before)


@pytest.mark.parametrize("film", [file_of("known"), frames_of("known")], ids=["file", "frames"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_known_video_is_not_decoded(pool: EnginePool, config: EngineConfig, film: Part) -> None:
    """Cold, then warm from every cache, then with vLLM's caches empty, where the processor wants the frames."""
    rig, decoded = pool.get(config), Decoded()
    cold = chat(rig, film)
    assert decoded.new() <= 1  # another family's test may have had it
    warm = chat(rig, film)
    assert decoded.new() == 0
    assert warm.num_cached_tokens > 0 or not rig.keeps_all_kv
    other = chat(rig, file_of("unknown " + config.family))  # negative control
    assert decoded.new() == 1
    rig.make_cold()
    late = chat(rig, film)
    assert decoded.new() == 1
    assert late.num_cached_tokens == 0
    assert other.token_ids != cold.token_ids
    for answer in (warm, late):
        assert_equals_answer(answer, cold, rig.tolerance, "the cold run")
