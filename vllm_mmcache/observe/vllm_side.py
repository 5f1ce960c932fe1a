# SPDX-License-Identifier: Apache-2.0
"""Carries the engine's counters to /metrics with the statistics that its scheduler sends anyway.

The scheduler's side adds what was counted since its last statistics, the API server's side takes it out again before
vLLM's own loggers see it. So counters of engines on other machines arrive, too, and no file or port is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_mmcache import events

_PREFIX = "mmcache:"


def send(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.make_stats; engine process, scheduler thread."""
    stats = wrapped(*args, **kwargs)
    if stats is not None:
        for name, amount in events.take_engine_counts().items():
            stats.num_kv_fetch_reqs_by_stage[_PREFIX + name] = amount
    return stats


def receive(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of StatLoggerManager.record; API server, or the offline program."""
    stats = args[0] if args else kwargs["scheduler_stats"]
    if stats is not None:
        by_name = stats.num_kv_fetch_reqs_by_stage
        for key in [key for key in by_name if key.startswith(_PREFIX)]:
            events.show_engine_count(key.removeprefix(_PREFIX), by_name.pop(key))
    return wrapped(*args, **kwargs)


def probe(renderer: Any, template: str | None) -> Callable[[Sequence[dict[str, str]], bool], list[int]]:
    """A function that renders messages as vLLM does, to token ids; `template` is the server's own, if it has one."""
    from vllm.renderers import ChatParams

    def render(messages: Sequence[dict[str, str]], opens_answer: bool) -> list[int]:
        params = ChatParams(template, chat_template_kwargs={"add_generation_prompt": opens_answer})
        prompt = renderer.render_messages(list(messages), params)[1]
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        return list(renderer.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False))

    return render
