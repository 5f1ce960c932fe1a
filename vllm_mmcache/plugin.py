# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins: mmcache`. vLLM calls `register` in every process, sometimes twice.

Only the standard library is imported here: an ImportError while vLLM loads this module would merely be logged, and
the server would run without us and say nothing. What can fail is imported inside `register`, and passes on.
"""

import os

_TRUE = frozenset({"1", "true", "yes", "on", "t", "y"})


def register() -> None:
    """Install every swap that fits this vLLM, and say so in one line. A second call changes nothing.

    Raises: SettingsError for a wrong MMCACHE_* variable; SwapError where a wrong answer would be possible without
    us. Anything that does not fit otherwise is left out, with its reason in the line.
    """
    if os.environ.get("MMCACHE_DISABLE", "").strip().lower() in _TRUE:
        return
    from vllm_mmcache.upstream.start import start

    start()
