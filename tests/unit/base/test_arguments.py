# SPDX-License-Identifier: Apache-2.0
"""Arguments of wrapped calls by name, however they were passed, and whoever overrode the method."""

from typing import Any

import pytest
import wrapt

from vllm_mmcache.base.arguments import argument, named


def function(first: int, second: int = 2, *, third: int = 3) -> None: ...


class Base:
    def method(self, first: int, second: int = 2) -> None: ...


class Own(Base):
    def method(self, *args: Any, **kwargs: Any) -> None:
        super().method(*args, **kwargs)


@pytest.mark.parametrize("call", [function, Base().method, Own().method, wrapt.FunctionWrapper(function, print)])
def test_by_position_by_name_and_by_default(call: Any) -> None:
    assert argument(call, (1, 5), {}, "first") == 1
    assert argument(call, (1, 5), {}, "second") == 5
    assert argument(call, (1,), {"second": 6}, "second") == 6
    assert argument(call, (1,), {}, "second") == 2
    assert named(call, (1,), {"second": 6}) == {"first": 1, "second": 6}
    assert named(call, (1, 5), {}) == {"first": 1, "second": 5}


@pytest.mark.parametrize("call", [function, Base().method, Own().method])
def test_an_argument_that_is_not_there(call: Any) -> None:
    with pytest.raises(KeyError, match="fourth"):
        argument(call, (1, 5), {}, "fourth")
