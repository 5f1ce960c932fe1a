# SPDX-License-Identifier: Apache-2.0
"""The identity of an image is its content within its tenant. A client's uuid is another name for it, an alias.

`identifiers` computes ids, `aliases` holds what a tenant's uuids stand for, and `audit` counts what clients should not
do. `middleware` and `vllm_endpoints` find a request's tenant, and `hooks` uses all of it between vLLM's request and its
processor. API server process; docs/identity.md.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "identity",
    __name__,
    hooks={"api": ("hooks",)},
    rule="rules:state_in",
)
