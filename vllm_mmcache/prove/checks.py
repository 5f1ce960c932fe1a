# SPDX-License-Identifier: Apache-2.0
"""What the checks of an item share, whichever model it is on: components in force, components at work, and a control.

Each check is passed, failed or not checked, with a reason. A pass needs more than right answers: the components are
really in force, what they are for really happened, and two controls show that a wrong answer would have been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_mmcache.base import status
from vllm_mmcache.base.errors import one_line
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.exactness.answers import Answer, Inexact
from vllm_mmcache.exactness.conversations import filler, one, picture, user
from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS, engine_here, why_unproven
from vllm_mmcache.metrics import counters
from vllm_mmcache.prove import load, workers, workloads
from vllm_mmcache.prove.arguments import given, taken
from vllm_mmcache.prove.rig import Rig, replaced
from vllm_mmcache.trial.worker import tower_images

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"


class NotChecked(Exception):
    """The check has no meaning here; the message says why."""


@dataclass(frozen=True)
class Row:
    """What one check found. `inexact` says that it failed because an answer was wrong."""

    check: str
    state: str
    reason: str = ""
    inexact: bool = False


def row_of(check: str, run: Callable[[], Any]) -> Row:
    """Run one check. Nothing that it raises ends the others."""
    try:
        run()
    except NotChecked as why:
        return Row(check, NOT_CHECKED, str(why))
    except Inexact as error:
        return Row(check, FAILED, str(error), inexact=True)
    except Exception as error:
        return Row(check, FAILED, one_line(error, 300))
    return Row(check, PASSED)


def engine_of(rig: Rig) -> dict[str, Any]:
    """What the item ran on."""
    return {
        "model_runner": type(rig.runner).__module__ if rig.runner is not None else "in worker processes",
        "block_tokens": rig.block_tokens,
        "dtype": str(rig.dtype).removeprefix("torch."),
        "compiled": not rig.vllm_config.model_config.enforce_eager,
        "async_scheduling": schedules_ahead(rig),
    }


def place_of(rig: Rig) -> dict[str, Any]:
    """What a proof of this item is tied to, which components are on without one, and what its model has a use for."""
    # Its engines have arguments of their own, so what passes holds for any.
    scope = replace(user_proofs.ProofScope.of(rig.vllm_config), configuration="")
    engine = engine_here(rig.vllm_config)
    uses = {
        "image_spans": rig.images_attend_both_ways,
        "resumed_images": scope.runner == 1 and not rig.vllm_config.model_config.is_hybrid,
        "image_checkpoints": not rig.keeps_all_kv,
        "inner_checkpoints": rig.vllm_config.model_config.is_hybrid,
    }
    return {
        "place": asdict(scope),
        "proven": [component for component in ENGINE_COMPONENTS if not why_unproven(component, engine)],
        "of_use": [component for component in ENGINE_COMPONENTS if uses.get(component, True)],
    }


def arguments_of(arguments: Sequence[str], fixed: Sequence[str] = ()) -> dict[str, Any]:
    """What the item's engine takes of vLLM's arguments, by name; what is left out was said before the first item."""
    return taken(given(arguments), fixed)[0] if arguments else {}


def alone_on_small_steps(components: Sequence[str]) -> bool:
    """Whether an item is there to show that small steps don't split images."""
    return tuple(components) == ("image_spans",)


def schedules_ahead(rig: Rig) -> bool:
    """Whether the next step is scheduled before the last one's tokens are known."""
    return isinstance(rig.scheduler, AsyncScheduler)


def assert_on(rig: Rig, component: str) -> None:
    """The report of this deployment, which asks every process, says that the component is on, or has nothing to do."""
    found = status.in_force()
    assert found, "no process has reported: is the plugin loaded?"
    assert found[component].state != "mixed", str(found[component])
    if found[component].state == "off":
        raise NotChecked(f"off here: {found[component].reason}")


def use_where_on(rig: Rig, component: str, use: Callable[[Rig], None]) -> None:
    """What the component is for happens; it is not tried where the component is off, as its configuration may say."""
    assert_on(rig, component)
    use(rig)


def assert_off(components: set[str]) -> None:
    """A component that should be off would lend its name's pass to another."""
    on = [
        component
        for component, found in status.in_force().items()
        if component in components and found.state in ("on", "mixed")
    ]
    assert not on, f"{', '.join(on)} should be off"


def words_before(rig: Rig) -> int:
    """Words before an image that fill more than a block, and more than a window where there is one, if that fits."""
    managers = rig.scheduler.kv_cache_manager.coordinator.single_type_managers
    windows = [int(getattr(manager.kv_cache_spec, "sliding_window", None) or 0) for manager in managers]
    longest = int(rig.vllm_config.model_config.max_model_len) // 3
    return min(max(180, rig.block_tokens * 5 // 4, max(windows) * 5 // 4), longest)


def use_block_keys(rig: Rig) -> None:
    """The engine has the component's hasher."""
    hasher = rig.llm.llm_engine.engine_core.engine_core.request_block_hasher  # of the engine in this process
    assert type(hasher).__module__.startswith("vllm_mmcache."), f"the engine's block hasher is {hasher}"


def use_image_spans(rig: Rig) -> None:
    """Mixed requests on small steps: no step ends inside an image, and every answer is exact."""
    if not rig.images_attend_both_ways:
        raise NotChecked("the model's images don't attend both ways")
    if not rig.has_small_steps:
        raise NotChecked("this item's steps hold whole prompts")
    rig.make_cold()
    with load.counted(rig) as counts:
        answers = load.run(rig, 16, seed=1)
    assert counts["split"] == 0, f"{counts['split']} images were split in {counts['steps']} steps"
    assert counts["steps"] > len(answers), "the steps are too large for this check to mean anything"
    rig.assert_exact(answers)


def use_resumed_images(rig: Rig) -> None:
    """A request loses its blocks and its image's features, and comes back; stock's first model runner dies of it."""
    if rig.vllm_config.model_config.is_hybrid:
        raise NotChecked("this model's hit does not cover the image in this check")
    rig.make_cold()
    rig.assert_exact(resume_without_blocks(rig))


def resume_without_blocks(rig: Rig) -> list[Answer]:
    """A request that starts on a hit over its picture loses its KV blocks and the encoder output, and comes back.

    Features would stand in for the picture, if they are there in time: there are none.
    """
    engine = rig.llm.llm_engine
    ask = [user(picture(70), "What is in this picture?" + filler(max(80, rig.block_tokens * 5 // 4)))]
    (cold,) = rig.ask(ask)
    rig.forget_features()
    rig.enqueue(ask, max_tokens=8)
    outputs: list[Any] = []
    try:
        while not any(request.num_output_tokens for request in rig.scheduler.running):
            outputs += engine.step()
        assert rig.llm.reset_prefix_cache(reset_running_requests=True)
        engine.reset_encoder_cache()
        while engine.has_unfinished_requests():
            outputs += engine.step()
    finally:
        engine.abort_request(list(rig.scheduler.requests), internal=True)
    assert outputs[-1].num_cached_tokens >= rig.image_spans(cold)[0][1], "its first hit must cover the image"
    resumed = tuple(outputs[-1].outputs[0].token_ids)
    assert resumed == cold.token_ids, f"{resumed} after it came back, {cold.token_ids} cold"
    return [cold]


def use_image_checkpoints(rig: Rig, shape: workloads.Shape | None = None) -> None:
    """The second question about an image resumes at a checkpoint behind it. `shape` is of the questions."""
    if rig.keeps_all_kv:
        raise NotChecked("the model keeps every block; there is nothing to checkpoint")
    rig.make_cold()
    before = counters.CHECKPOINTS_USED.value
    shape = shape or workloads.Shape((448, 448), words_before(rig))
    answers = workloads.run(rig, workloads.questions(shape, 3, 2))
    assert counters.CHECKPOINTS_USED.value > before, "no hit ended on a checkpoint"
    found = workloads.reuse(rig, answers)
    assert found["cached_tokens"] >= 0.98 * found["best_tokens"] > 0, f"reused: {found}"
    rig.assert_exact([answer for _, answer in answers])


def use_inner_checkpoints(rig: Rig) -> None:
    """The same, with states that were kept inside a chunk of the prefill."""
    if not rig.vllm_config.model_config.is_hybrid:
        raise NotChecked("the model has no Mamba layers")
    schedule, steps = rig.scheduler.schedule, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        steps.append(hasattr(step, CUTS))
        return step

    with replaced(rig.scheduler, "schedule", noting):
        use_image_checkpoints(rig)
    assert any(steps), f"no state was kept inside a chunk in {len(steps)} steps"


def use_metrics(rig: Rig) -> None:
    """What is counted in the engine is on /metrics after the next step."""
    counter, name = counters.TOWER_TOKENS, "mmcache:tower_tokens_total"
    before = REGISTRY.get_sample_value(name) or 0
    counter.add(1000)
    one(rig, user(filler(20)))
    grown = (REGISTRY.get_sample_value(name) or 0) - before
    assert grown >= 1000, f"{name} grew by {grown} for 1000 counted"


def use_features(rig: Rig) -> None:
    """The vision tower does not run again for an image that it has seen, and the answer is exact."""
    rig.make_cold()
    runs = []
    answers: list[Answer] = []
    for question in ("What is it?", "And what is at its edge?"):
        rig.forget_all_but_features()
        before = max(rig.in_workers(tower_images))
        answers.append(one(rig, user(filler(60), picture(42), question)))
        runs.append(max(rig.in_workers(tower_images)) - before)
    assert runs == [1, 0], f"runs of the vision tower: {runs}"
    rig.assert_exact(answers)


USES: dict[str, Callable[[Rig], None]] = {
    "block_keys": use_block_keys,
    "image_spans": use_image_spans,
    "resumed_images": use_resumed_images,
    "image_checkpoints": use_image_checkpoints,
    "inner_checkpoints": use_inner_checkpoints,
    "metrics": use_metrics,
    "features": use_features,
}


def assert_spoiled_kv_is_seen(rig: Rig) -> None:
    """A hit on blocks that hold other values is judged wrong, so hits really read the cache, and wrong ones fail."""
    rig.make_cold()
    ask = user(filler(words_before(rig)), picture(32), "What is in this picture?" + filler(20))
    rig.assert_exact([one(rig, ask)])
    one(rig, ask)  # what is compared with an own cold run has emptied the cache
    if not all(rig.in_workers(workers.spoil_kv)):
        raise NotChecked("this model runner does not show its KV cache")
    hit = one(rig, ask)
    assert hit.num_cached_tokens > 0, "the request was no hit"
    try:
        rig.assert_exact([hit])
    except Inexact:
        return
    finally:
        rig.make_cold()
    raise AssertionError("an answer from a spoiled KV cache was judged right")
