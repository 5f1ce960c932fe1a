# SPDX-License-Identifier: Apache-2.0
"""Lengths of time as settings have them: a number of seconds, or one with a unit, such as 7d. Any process."""

import re
from typing import Any

from pydantic_core import CoreSchema, core_schema

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MOST_S = 100 * 365 * 86400
"""Redis refuses an expiry that does not fit its clock."""
_WORDS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


class Duration(int):
    """Whole seconds, 0 to MOST_S."""

    def words(self) -> str:
        """Such as 7 days, or 90 minutes; in the largest unit that leaves no rest."""
        name, size = next(one for one in _WORDS if self % one[1] == 0)
        return f"{self // size} {name}{'' if self == size else 's'}"

    def until(self) -> str:
        """Until when something is kept that is removed after so long without use; 0 is no such time."""
        return f"until unused for {self.words()}" if self else "until there is no room"

    @classmethod
    def read(cls, given: object) -> "Duration":
        """A duration from what a variable or a configuration holds. Raises: ValueError."""
        if isinstance(given, str) and (found := re.fullmatch(r"\s*([0-9]{1,12})\s*([a-z]?)\s*", given)):
            unit = UNITS.get(found[2] or "s")
            seconds = int(found[1]) * unit if unit else -1
        else:
            seconds = given if isinstance(given, int) and not isinstance(given, bool) else -1
        if not 0 <= seconds <= MOST_S:
            raise ValueError("it is no length of time up to 100 years")
        return cls(seconds)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read, serialization=core_schema.plain_serializer_function_ser_schema(int)
        )
