# SPDX-License-Identifier: Apache-2.0
"""The roles that a process plays: api (or the offline program), engine, worker. Any process; imports nothing."""

from typing import Literal

Role = Literal["api", "engine", "worker"]

ROLES: tuple[Role, ...] = ("api", "engine", "worker")
"""In the order in which one process takes them on."""
