# SPDX-License-Identifier: Apache-2.0
"""Finds where a chat template breaks the prefix cache: turn n of a conversation that does not begin turn n + 1.

Runs in the process of `mmcache lint` alone, needs no server, no vLLM and no weights. Templates run in the sandbox that
Transformers runs them in.
"""
