# SPDX-License-Identifier: Apache-2.0
"""What identity costs: per image in the processor's thread, and in conversations that name their images by uuid alone.

Targets: at most 50 microseconds an image, warm, at a payload of 1 MB, beyond the digest; uuid-only turns within 5 % of
stock's. The image is warm: its bytes are known, so that their digest is remembered, as on every turn but the first.
What is left is what this component adds: alias, tenant and arguments. The turns are those of real servers. Finding the
tenant of a request, by each way of naming it: at most 20 microseconds.
"""

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import Coroutine
from statistics import median
from typing import Any

from starlette.requests import Request
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from benchmarks import scenarios
from benchmarks.pictures import PNG, picture, variant
from benchmarks.results import Result, in_turn, medians
from benchmarks.server_scenarios import uuid_turns
from vllm_mmcache.base import tenant
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.identity.middleware import FindTenant
from vllm_mmcache.components.identity.vllm_endpoints import find_tenant_in_body
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import COMPONENTS

PAYLOAD_BYTES = 1 << 20
SALT = {"salt": "a salt of forty-three characters, as advised"}
UUID = {"uuid": "conversation-17-image"}
ARGUMENTS = {"arguments": {"max_pixels": 602112, "min_pixels": 3136}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "uuid": UUID, "salt": SALT, "uuid and salt": UUID | SALT,
    "uuid, salt and arguments": UUID | SALT | ARGUMENTS,
}  # fmt: skip
# A request's headers by the setting tenant_from, beside those that every request has.
TENANTS = {
    "cache_salt": [],
    "header:X-Tenant": [(b"x-tenant", b"team-0123456789")],
    "api_key": [(b"authorization", b"Bearer sk-0123456789abcdef0123456789abcdef")],
}
HEADERS = [
    (b"host", b"localhost:8000"), (b"accept", b"application/json"), (b"content-type", b"application/json"),
    (b"user-agent", b"OpenAI/Python 2.0"), (b"x-stainless-lang", b"python"), (b"x-stainless-os", b"Linux"),
    (b"accept-encoding", b"gzip, deflate"), (b"connection", b"keep-alive"), (b"content-length", b"2097152"),
]  # fmt: skip


def measure(options: Namespace) -> Result:
    """Case -> median seconds per image of vLLM's digest (without the component), and of the warm component."""
    result, content = Result(), picture(PNG, 0)
    content = variant(content, "\0" * (PAYLOAD_BYTES - len(content)))
    stock = per_image_s(content, options.rounds)
    for group in ("lazy_media", "identity"):
        outcome = installer.install(group, COMPONENTS[group].all_hooks(), vllm_version())
        assert outcome.state == "on", outcome.reason
    try:
        for case, headers in TENANTS.items():
            result.add(f"tenant in {case}", "tenant_s", {"mmcache": tenant_s(case, headers, options.rounds)})
        for case, more in CASES.items():
            result.add(case, "digest_s", {"stock": stock})
            result.add(case, "warm_s", {"mmcache": per_image_s(content, options.rounds, **more)})
    finally:
        installer.undo("identity")
        installer.undo("lazy_media")
    return scenarios.measure(scenarios.Scenario(uuid_turns), options, in_turn(options.swaps), result)


def per_image_s(content: bytes, num_rounds: int, uuid: str = "", salt: str = "", arguments: Any = None) -> float:
    """Median seconds from a parsed item to its mm_hash."""
    before = tenant.SALT.set(salt or None)
    try:
        loader = ImageMediaIO()
        loader.load_bytes(content)
        items = MultiModalDataParser().parse_mm_data({"image": [loader.load_bytes(content)]})
        names = {"image": [uuid]} if uuid else None

        def digest() -> object:
            return ProcessorInputs([], items, names, arguments or {}).get_mm_hashes("zoo", "blake3")

        warm_up = num_rounds // 10
        return medians({"": lambda: digest}, num_rounds - warm_up, warm_up)[""]
    finally:
        tenant.SALT.reset(before)


def tenant_s(setting: str, headers: list[tuple[bytes, bytes]], num_rounds: int) -> float:
    """Median seconds that a request takes longer from the layer to its endpoint, its body parsed, for its tenant.

    The layer and the dependency are those of a server; stock's dependency is what would run without us.
    """
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [*HEADERS, *headers]}
    body = json.dumps({"model": "m", "messages": []} | ({"cache_salt": SALT["salt"]} if not headers else {})).encode()

    async def endpoint(dependency: Any) -> None:
        request = Request(scope)
        request._body, request._json = body, json.loads(body)  # as FastAPI has left them there
        await dependency(request)

    async def with_tenant(scope: Any, receive: Any, send: Any) -> None:
        await endpoint(find_tenant_in_body)

    layer = FindTenant(with_tenant, tenant.parse_source(setting))

    async def once(job: Coroutine[Any, Any, None]) -> float:
        start = time.perf_counter()
        await job
        return time.perf_counter() - start

    async def both() -> float:
        longer = []
        for _ in range(num_rounds):
            ours = await once(layer(dict(scope), None, None))  # type: ignore[arg-type]
            longer.append(ours - await once(endpoint(validate_json_request)))
        return median(longer)

    return asyncio.run(both())
