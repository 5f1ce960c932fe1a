# SPDX-License-Identifier: Apache-2.0
"""An image's identity is its content, within its tenant; the uuid of a client is an alias, recorded and never trusted.

`identifiers` makes them, `aliases` is what a tenant's uuids stand for, `audit` counts what should not happen, and
`hooks` puts all of it between vLLM's request and its processor. API server process; docs/identity.md.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "identity",
    __name__,
    hooks={"api": ("hooks",)},
    rule="rules:state_in",
)
