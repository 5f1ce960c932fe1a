# SPDX-License-Identifier: Apache-2.0
"""Ids of images that are good for one request alone. API server process."""


class RequestScopedId(str):
    """An id that vLLM made for one item of one request."""

    __slots__ = ()
