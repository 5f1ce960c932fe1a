# SPDX-License-Identifier: Apache-2.0
"""An engine in this process, the requests that are put to it, and what is counted of each, on stock too."""

import contextlib
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.ImageFile import ImageFile

from benchmarks.workloads import Asks
from vllm_mmcache.metrics import counters
from vllm_mmcache.prove.engines import NUM_LOGPROBS, Answer, EngineConfig, Rig
from vllm_mmcache.prove.workloads import reusable, shared
from vllm_mmcache.zoo import ZooOptions, build_cached


@dataclass(frozen=True)
class Shape:
    """How large an image is to a family's tower: options of the zoo's model, and arguments of vLLM's LLM()."""

    zoo: ZooOptions | None = None
    engine: tuple[tuple[str, Any], ...] = ()


# Qwen's towers see as many patches as the picture has: 4,096 of 1024x1024 pixels. Gemma 4's is a setting of servers;
# the zoo's 70 tokens are 630 patches, too few to show. 560 tokens are 5,040, and 20 pictures are more than vLLM's own
# encoder cache, which has room for the tokens of a step. The window holds an image, as in the published larger models.
SHAPES = {
    "gemma4": Shape(ZooOptions(sliding_window=1024), (("mm_processor_kwargs", {"max_soft_tokens": 560}),)),
}


@contextlib.contextmanager
def started(
    root: Path, family: str, settings: Mapping[str, Any], zoo: ZooOptions | None = None, **engine: Any
) -> Iterator[Rig]:
    """An engine with vLLM's own block size and token budget; settings of the plugin are nothing to stock.

    Its model is in `root`: a process that is to find what another one saved needs the same, for vLLM's name of an image
    holds the path.
    """
    shape = SHAPES.get(family, Shape())
    more = (("additional_config", {"mmcache": dict(settings)}), *shape.engine, *engine.pop("more", ()))
    config = EngineConfig(family, **{"block_tokens": None, "batched_tokens": None, **engine}, more=more)
    rig = Rig(config, build_cached(family, root, options=zoo or shape.zoo))
    try:
        yield rig
    finally:
        rig.close()


class Work:
    """Counts the images that the vision tower of an engine runs for, and the pictures that are decoded."""

    def __init__(self, rig: Rig) -> None:
        self.tower_runs = self.decodes = 0
        embed, load = rig.runner.model.embed_multimodal, ImageFile.load

        def counted_embed(**kwargs: Any) -> Any:
            outputs = embed(**kwargs)
            self.tower_runs += len(outputs)
            return outputs

        def counted_load(picture: ImageFile) -> Any:
            self.decodes += bool(picture.tile)  # what is left to decode
            return load(picture)

        rig.runner.model.embed_multimodal = counted_embed
        ImageFile.load = counted_load  # type: ignore[method-assign, assignment]


def replay(
    root: Path, benchmark: str, cases: list[str], family: str, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """The requests of some cases of a benchmark of replays.py, by case, each from cold, on one engine."""
    from benchmarks.replays import REPLAYS

    replay, given = REPLAYS[benchmark], Namespace(**options)
    found: dict[str, list[dict[str, Any]]] = {}
    for kv_share in {replay.cases[case].kv_share: None for case in cases}:
        engine = dict(replay.engine)
        chosen = [case for case in cases if replay.cases[case].kv_share == kv_share]
        if kv_share:
            with started(root, family, settings, replay.zoo, **engine) as rig:
                engine["num_blocks"] = blocks_of(rig, replay.cases[chosen[0]].asks(given, family), kv_share)
        with started(root, family, settings, replay.zoo, **engine) as rig:
            work = Work(rig)
            for case in chosen:
                rig.make_cold()
                found[case] = list(requests(rig, work, replay.cases[case].asks(given, family), replay.max_tokens))
    return found


def blocks_of(rig: Rig, asks: Asks, share: float) -> int:
    """KV blocks for this share of what all requests of a workload take together."""
    managers = rig.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers
    (_, conversation), *others = list(asks)
    (answer,) = rig.ask(conversation, max_tokens=1)
    blocks = -(-len(answer.prompt_ids) // rig.block_tokens)
    return int((1 + len(others)) * len(managers) * blocks * share)


def requests(rig: Rig, work: Work, asks: Asks, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Put all requests of a workload, one after the other; what each was and what it cost. Units: seconds, tokens.

    `best_tokens` is the longest prefix that a request shares with an earlier one of its tenant, floored to the block
    size and without the last token. `whole_request_tokens` is what a key over all images of a request would have found:
    the same where the two have the same images.
    """
    seen: dict[str | None, list[tuple[list[Any], list[Any]]]] = {}
    mark, conversation = next(asks)
    while True:
        counts, tower_runs, decodes = counters.totals(), work.tower_runs, work.decodes
        ask = asker(rig, conversation, max_tokens, mark.salt)
        start = time.perf_counter()
        answer = ask()
        seconds = time.perf_counter() - start
        tower_runs, decodes = work.tower_runs - tower_runs, work.decodes - decodes
        pictures = pictures_of(conversation)
        content = contents(rig, answer, pictures)
        before = seen.setdefault(mark.salt, [])
        longest = [(shared(content, other), names == pictures) for other, names in before]
        yield {
            "counts": mark.counts, "case": mark.case, "time_s": seconds, "prompt_tokens": len(content),
            "cached_tokens": answer.num_cached_tokens,
            "best_tokens": reusable(max((length for length, _ in longest), default=0), content, rig.block_tokens),
            "whole_request_tokens": reusable(
                max((length for length, is_same in longest if is_same), default=0), content, rig.block_tokens
            ),
            "tower_runs": tower_runs, "decodes": decodes, "answer": list(answer.token_ids),
            "counters": counted(counts),
        }  # fmt: skip
        before.append(([*content, *answer.token_ids], pictures))
        try:
            mark, conversation = asks.send(answer)
        except StopIteration:
            return


def counted(before: Mapping[str, float]) -> dict[str, float]:
    """What the plugin has counted since `before`."""
    return {name: n - before[name] for name, n in counters.totals().items() if n != before[name]}


def asker(rig: Rig, conversation: list[Any], max_tokens: int, salt: str | None) -> Callable[[], Answer]:
    """Puts a conversation: as clients' messages where its pictures are URLs, else as a prompt with pictures."""
    if not any(isinstance(part, dict) and part["type"] == "image_url" for part in parts_of(conversation)):
        return lambda: rig.ask_rendered([rig.render(conversation)], [max_tokens], salts=[salt])[0]
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    return lambda: Answer.of("", (), rig.llm.chat([conversation], params, use_tqdm=False)[0])


def parts_of(conversation: list[Any]) -> list[Any]:
    return [part for message in conversation if not isinstance(message["content"], str) for part in message["content"]]


def pictures_of(conversation: list[Any]) -> list[Any]:
    """What tells the pictures apart, one after the other."""
    urls = [part["image_url"]["url"] for part in parts_of(conversation) if part["type"] == "image_url"]
    images = [part["image"] for part in parts_of(conversation) if part["type"] == "image"]
    return urls or [hash((image.size, image.tobytes())) for image in images]


def contents(rig: Rig, answer: Answer, pictures: list[Any]) -> list[Any]:
    """The prompt, position by position: a token id, or what tells the picture there from others."""
    found: list[Any] = list(answer.prompt_ids)
    for (start, end), name in zip(rig.image_spans(answer), pictures, strict=True):
        found[start:end] = [name] * (end - start)
    return found
