# SPDX-License-Identifier: Apache-2.0
"""vLLM's own command line, also where its distribution is not called `vllm`; nothing of the plugin is imported here."""

import importlib.metadata
import sys
from types import SimpleNamespace

if __name__ == "__main__":
    from vllm.entrypoints.cli import main
    from vllm.version import __version__

    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        main.importlib = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: __version__))
    sys.argv[0] = "vllm"
    main.main()
