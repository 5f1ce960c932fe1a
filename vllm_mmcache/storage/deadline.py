# SPDX-License-Identifier: Apache-2.0
"""What a load raises whose time is over. Any process."""


class DeadlineExceeded(Exception):
    """The time of a load was over before its bytes were there."""
