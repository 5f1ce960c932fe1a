# SPDX-License-Identifier: Apache-2.0
"""The error of a load that took too long. Any process."""


class DeadlineExceeded(Exception):
    """A load was not complete when its time was over."""
