# SPDX-License-Identifier: Apache-2.0
"""What one process decoded, another knows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import LONG_S
from tests.unit.components.lazy_media.test_hooks import FILES, image_io, mm_hash
from tests.unit.components.lazy_media.test_restarts import is_known, restart, store
from vllm_mmcache.storage import record_store

__all__ = ["store"]

ANOTHER_PROCESS = """
import json, sys
from pathlib import Path
from tests.unit.components.lazy_media.test_hooks import image_io, mm_hash, component
from vllm_mmcache.metrics import counters
with component():
    media = image_io(json.loads(sys.argv[2])).load_bytes(Path(sys.argv[1]).read_bytes())
    seen = [mm_hash(media), *media.size, media.mode, counters.IMAGES_DECODED.value]
print(json.dumps(seen))
"""


@pytest.mark.process
def test_another_process_knows_it(store: Path, tmp_path: Path) -> None:
    content = FILES["jpeg rotated"]
    (tmp_path / "picture").write_bytes(content)

    def asked(**options: Any) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path / "picture"), json.dumps(options)],
            env=os.environ | {"MMCACHE_STORE": str(store)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first = image_io({}).load_bytes(content)
    expected = [mm_hash(first), *first.size, "RGB", 0]
    assert record_store.current().flush(LONG_S)
    assert asked() == expected
    # The control: settings that this image was not opened with.
    assert asked(image_mode="L")[3:] == ["L", 1]
    restart()
    assert is_known(content, "grey")  # from that process
