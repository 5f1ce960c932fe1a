# SPDX-License-Identifier: Apache-2.0
"""What comes of a step whose states were not written."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.components.inner_checkpoints import hooks_worker, vllm_gdn
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.components.inner_checkpoints.vllm_gdn import StateNotWritten


@pytest.mark.parametrize(("num_ranks", "raised"), [(1, StateNotWritten), (2, SystemExit)])
def test_the_engine_ends_where_a_state_was_not_written(
    num_ranks: int, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks vLLM would lose the error of all but one."""

    def end() -> None:
        raise StateNotWritten("2 layers kept no state, says a test")

    monkeypatch.setattr(vllm_gdn, "Step", lambda *args: SimpleNamespace(end=end))
    step = SimpleNamespace(**{CUTS: {"a request": [128]}})
    worker: Any = SimpleNamespace(model_runner=None, parallel_config=SimpleNamespace(world_size=num_ranks))

    def execute_model(scheduler_output: Any) -> str:
        return "an output"

    with pytest.raises(raised, match="2 layers kept no state"):
        hooks_worker.compute_step(execute_model, worker, (step,), {})
    assert hooks_worker._step is None
    plain = SimpleNamespace()
    assert hooks_worker.compute_step(execute_model, worker, (plain,), {}) == "an output"
