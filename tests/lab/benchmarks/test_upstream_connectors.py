# SPDX-License-Identifier: Apache-2.0
"""What docs/features.md says of vLLM's own connectors is in the committed result."""

from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import committed


def test_the_comparison_is_one() -> None:
    """Stock must have left its own cache, or rotation says nothing; a fault that upstream mends changes the page."""
    content = committed("upstream_connectors")
    images, found, sides = content["options"]["images"], content["found"], content["details"]
    runs = {case: counted["tower_runs"] for case, counted in found.items() if "tower_runs" in counted}
    assert set(BENCHMARKS["upstream_connectors"].options["sides"]) == set(runs["first"])
    assert [runs[case]["stock"] for case in ("first", "rotation", "restart")] == [images] * 3
    assert [runs[case]["mmcache"] for case in ("first", "rotation", "restart")] == [images, 0, 0]
    assert runs["restart"]["ECCPUConnector"] == images
    assert min(found["new weights"]["changed_weights"].values()) > 0
    assert runs["new weights"] == {"ECCPUConnector": 0, "mmcache": 1}
    assert found["memory full"]["answered"] == {"ECCPUConnector": 0, "mmcache": 1}
    assert sides["mmcache"]["known_beside_new"].startswith("answered")
    assert sides["ECCPUConnector"]["known_beside_new"].startswith("RuntimeError: Encoder cache miss")
