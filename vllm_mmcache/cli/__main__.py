# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_mmcache.cli`: the same as the command `mmcache`, where the script is not on PATH.

Tests use it too, so that they run the interpreter that they themselves run in.
"""

from vllm_mmcache.cli import main

main()
