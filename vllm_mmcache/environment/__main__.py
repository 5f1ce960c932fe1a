# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_mmcache.environment`: repair this environment and print what was done, one line each.

Runs on its own, before any server. Exit status 0 when all is well afterwards, 2 when something is left that
this can't cure.
"""

import sys

from vllm_mmcache.base.errors import MMCacheError
from vllm_mmcache.environment import repair


def main() -> int:
    """Repair, and print what was done; returns the exit status. --force: also builds that were found well before."""
    try:
        done = repair(force="--force" in sys.argv[1:])
    except MMCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in done:
        print(f"environment: {line}")
    if not done:
        print("environment: nothing to repair")
    return 0


if __name__ == "__main__":
    sys.exit(main())
