# SPDX-License-Identifier: Apache-2.0
"""A transport for the `openai` client that sends each image once, and its name alone from then on.

Runs in the client's process, sync and async, over the httpx that the client has; works against stock vLLM. `images`
finds and names the images of one request, `sent` is what the server has been sent, `affinity` names the conversation
for routers, `transport` asks and asks again.
It must never let the caller see anything but the answer to the whole request. Imports neither vLLM nor torch.
"""

from vllm_mmcache.client.affinity import Affinity
from vllm_mmcache.client.sent import Sent
from vllm_mmcache.client.transport import AsyncOnceTransport, OnceTransport, async_http_client, http_client

__all__ = ["Affinity", "AsyncOnceTransport", "OnceTransport", "Sent", "async_http_client", "http_client"]
