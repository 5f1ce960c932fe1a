# SPDX-License-Identifier: Apache-2.0
"""Carries the counters of worker and engine to /metrics with what these send each other anyway.

A worker adds what it has counted since its last step to the step's output, the scheduler what it has counted since its
last statistics to the statistics; whoever receives takes it out again before vLLM's own code sees it. So counters of
engines on other machines arrive, too, and no file or port is needed. Of several tensor-parallel ranks the one whose
output vLLM uses is heard; the ranks run the same images.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_mmcache import events
from vllm_mmcache.observe.engine import send_outcome

_PREFIX = "mmcache:"
_NEWS = "mmcache_news"  # attribute of a step's ModelRunnerOutput


def tell(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.execute_model and Worker.sample_tokens; worker process."""
    output = wrapped(*args, **kwargs)
    # An output that is still being copied from the device holds the one that will be sent.
    sent = getattr(output, "_model_runner_output", output)
    if isinstance(sent, ModelRunnerOutput) and sent is not EMPTY_MODEL_RUNNER_OUTPUT:
        news = events.take_worker_news()
        if news is not None:
            setattr(sent, _NEWS, news)
    return output


def hear(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.update_from_output(_, model_runner_output); engine process. The room's one there."""
    output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
    news = vars(output).pop(_NEWS, None)
    if news is not None:
        events.receive_worker_news(news)
    return send_outcome(wrapped, instance, args, kwargs)


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
