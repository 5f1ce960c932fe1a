# SPDX-License-Identifier: Apache-2.0
"""One side's work in a process of its own: calls the function that a task names, and prints what it gives.

The task comes as JSON on stdin, its result is the last line of stdout. The function gets a folder for models, which is
there for this process alone unless the task names one: `root`.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Do the task."""
    task: dict[str, Any] = json.load(sys.stdin)
    module, _, name = task.pop("call").partition(":")
    function = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(function(Path(task.pop("root", root)), **task)), flush=True)


if __name__ == "__main__":
    main()
