# SPDX-License-Identifier: Apache-2.0
"""KV events in the form that the settings ask for. Engine process, main thread; installed only where one asks.

An event is copied, never changed: it is plain data of the scheduler, a few for each step that has stored blocks.
"""

from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockStored

from vllm_mmcache.base import settings
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.components.identity import kv_events
from vllm_mmcache.hooking.hook import Hooks

hook = Hooks(
    "kv_events",
    "engine",
    why="routers read the ids of images in other forms than vLLM publishes, and take a salt for an image",
    upstream="none: vLLM publishes one form",
    remove_when="consumers of KV events agree on a form",
)


@hook(
    "vllm.distributed.kv_events:ZmqEventPublisher.publish",
    name="publish",
    args=("events",),
    reads=("vllm.distributed.kv_events:BlockStored", "vllm.v1.core.kv_cache_utils:to_event_extra_keys"),
)
def publish_for_routers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of ZmqEventPublisher.publish(events): the extra keys of stored blocks have the form that is asked for."""
    batch = argument(wrapped, args, kwargs, "events")
    with failsafe("KV events"):
        batch.events = [_published(event) for event in batch.events]
    return wrapped(*args, **kwargs)


def _published(event: Any) -> Any:
    if not isinstance(event, BlockStored) or not event.extra_keys:
        return event
    chosen = settings.current()
    keys = kv_events.published(event.extra_keys, event.lora_name, chosen.kv_event_ids, chosen.kv_event_salts)
    return msgspec.structs.replace(event, extra_keys=keys)
