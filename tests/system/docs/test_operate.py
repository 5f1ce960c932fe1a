# SPDX-License-Identifier: Apache-2.0
"""docs/operate.md has every line that we log at WARNING and above, every alert and table, and numbers of the code."""

import ast
import base64
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM
from pydantic import ByteSize

from vllm_mmcache.base.lru import Size
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.components.image_extraction.extract import extract
from vllm_mmcache.components.image_extraction.request_shapes import WALKERS
from vllm_mmcache.content.base64_image import CONTENT_IDS
from vllm_mmcache.metrics import counters

REPO = Path(__file__).parents[3]
PAGE = (REPO / "docs" / "operate.md").read_text()
LOUD = {"warning", "error", "exception", "critical", "fatal", "warn", "warning_once", "log"}


def is_loud(node: ast.AST, aliases: set[str]) -> bool:
    """Whether it names a method that logs at WARNING or above; `log` takes a level, which we don't look into."""
    if isinstance(node, ast.Attribute):
        return node.attr in LOUD and isinstance(node.value, ast.Name) and node.value.id in {"logger", "logging"}
    return isinstance(node, ast.Name) and node.id in aliases


def lines_of(source: str) -> set[str]:
    """The lines that a file may log at WARNING and above, `…` for what differs. Raises: ValueError for other forms."""
    tree = ast.parse(source)
    aliases = {
        target.id
        for assignment in ast.walk(tree)
        if isinstance(assignment, ast.Assign) and any(is_loud(one, set()) for one in ast.walk(assignment.value))
        for target in assignment.targets
        if isinstance(target, ast.Name) and not isinstance(assignment.value, ast.Call)
    }
    found = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and is_loud(call.func, aliases):
            message = call.args[0]
            if not (isinstance(message, ast.Constant) and isinstance(message.value, str)):
                raise ValueError(f"line {call.lineno}: a message has to be a plain text with %s")
            found.add(re.sub(r"%[-+ #0-9.]*[a-z]", "…", message.value))
    return found


def section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


@pytest.mark.slow
def test_every_loud_line_of_the_log_is_on_the_page() -> None:
    logged = set().union(*(lines_of(path.read_text()) for path in (REPO / "vllm_mmcache").rglob("*.py")))
    rows = re.findall(r"^\| (`[^|]+`) \| \S.*\|$", section("Lines in the log"), re.MULTILINE)
    explained = [line for row in rows for line in re.findall(r"`([^`]+)`", row)]
    assert len(explained) == len(set(explained))
    assert set(explained) == logged
    assert all("mmcache" in line for line in logged), "a log holds lines of others, too"


@pytest.mark.parametrize(
    "source",
    [
        'logger.warning("lost %s of %d")',
        'logger.exception("lost %s "\n "of %.0f", 1)',
        'def f():\n    log = logger.debug if x else logger.error\n    log("lost %s of %g", 1)',
    ],
)
def test_the_lines_are_found(source: str) -> None:
    """Negative control of the test above."""
    assert lines_of(source) == {"lost … of …"}
    assert lines_of(source.replace("logger.", "other.")) == set()


def test_quiet_lines_are_none_and_other_forms_are_refused() -> None:
    assert lines_of('logger.info("all is well")\nlogger.debug("x")') == set()
    with pytest.raises(ValueError, match="plain text"):
        lines_of('logger.warning(f"{name} is gone")')


def test_every_alert_is_on_the_page() -> None:
    rules = yaml.safe_load((REPO / "docker" / "alerts.yaml").read_text())["groups"][0]["rules"]
    rows = re.findall(r"^\| (Mmcache[\w, ]+) \|", section("Alerts"), re.MULTILINE)
    assert {name for row in rows for name in row.split(", ")} == {rule["alert"] for rule in rules}


def test_every_metric_is_on_the_page() -> None:
    labelled = [*counters.TIER_COUNTERS.values(), *counters.RECORD_COUNTERS.values()]
    labelled += [counters.PROMPT_TOKENS, counters.PROMPT_IMAGES, counters.AUDIT]
    labelled += [counters.FILE_REQUESTS, counters.FILES_NAMED]
    plain = [*counters.COUNTERS, counters.ITEMS_PROCESSED, counters.ITEMS_DEFERRED]
    names = {f"{name}_total" for name in [*(one.name for one in labelled), *(one.name for one in plain)]}
    names |= {counters.RECORD_DISK_BYTES.name, counters.RECORD_DISK_BUDGET_BYTES.name}
    names |= {counters.COMPONENT_INFO.name, counters.ROOM_INFO.name}
    names |= {f"{prefix}_{what}" for prefix in ("table", "engine_table") for what in Size._fields}
    assert set(re.findall(r"`mmcache:(\w+)`", section("Metrics"))) == names


def test_every_table_is_on_the_page() -> None:
    code = "\n".join(path.read_text() for path in (REPO / "vllm_mmcache").rglob("*.py"))
    named = set(re.findall(r'sizes\.of_(?:server|engine)\("(\w+)"', code))
    named |= {"features_disk", "waiting_for_disk", "waiting_for_remote"}  # by tier
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", section("How large things are"), re.MULTILINE)
    assert {name for row in rows for name in row if name} == named


def test_defaults_on_the_page_are_the_settings() -> None:
    rows = re.findall(r"\| ([\d,]+)(?: (MiB|GiB))?, `MMCACHE_(\w+)` \|", section("How large things are"))
    assert len(rows) >= 7
    for number, unit, name in rows:
        field = Settings.model_fields[name.lower()]
        size = int(number.replace(",", "")) << {"MiB": 20, "GiB": 30, "": 0}[unit]
        assert field.default == size, name
        assert (field.annotation is ByteSize) == bool(unit)


def test_what_fits_is_computed() -> None:
    from vllm_mmcache.components.identity.aliases import ALIAS_COST_BYTES
    from vllm_mmcache.components.lazy_media import media_info
    from vllm_mmcache.components.lazy_media.video import video_info

    budget = 64 << 20
    assert f"{budget // media_info.RECORD_COST_BYTES:,} known images" in PAGE
    assert f"{budget // video_info.RECORD_COST_BYTES:,} known videos" in PAGE
    assert 65536 * ALIAS_COST_BYTES == 32 << 20
    warm_turn = (REPO / "docs" / "warm_turn.md").read_text()
    assert f"{budget // media_info.RECORD_COST_BYTES:,} images" in warm_turn
    pictures = re.findall(r"\| (\d+) MiB \| (\d+) \|", section("How large things are"))
    assert pictures
    for each, ram in pictures:
        assert int(ram) == (2 << 10) // int(each)


def test_the_memory_of_an_api_server_is_summed() -> None:
    from vllm_mmcache.components.identity.aliases import ALIAS_COST_BYTES
    from vllm_mmcache.components.observe.record.recorder import Recorder
    from vllm_mmcache.content.base64_image import TEXT_COST_BYTES
    from vllm_mmcache.files import named, store
    from vllm_mmcache.storage.record_store import MOST_WAITING_BYTES

    def default(name: str) -> int:
        return int(Settings.model_fields[name].default)

    def mib(size_bytes: int) -> int:
        return round(size_bytes / 2**20)

    def row(table: str) -> str:
        (found,) = re.findall(rf"^\| `{table}` \| (.*) \|$", section("How large things are"), re.MULTILINE)
        return str(found)

    images_and_videos = 2 * default("media_records_bytes")
    texts = default("media_records") * TEXT_COST_BYTES
    uuids = default("image_aliases") * ALIAS_COST_BYTES
    always = images_and_videos + texts + default("records_ram_bytes") + uuids
    answers = Recorder()._answers.size().budget_bytes or 0
    file_uuids = named.MOST_REMEMBERED.size_bytes
    assert f"in {mib(texts)} MiB" in row("texts")
    assert f"in {mib(uuids)} MiB when full" in row("uuids")
    assert row("records_waiting").startswith(f"{mib(MOST_WAITING_BYTES)} MiB for each place of the store |")
    assert row("answers").startswith(f"{mib(answers)} MiB |")
    assert f"in {mib(file_uuids)} MiB when full" in row("file_uuids")
    said = " ".join(section("How large things are").partition("### Memory of an API server")[2].split())
    assert f"take {mib(always)} MiB when all are full" in said
    assert f"{mib(MOST_WAITING_BYTES)} MiB more for each place of the store" in said
    assert f"{mib(always + 2 * MOST_WAITING_BYTES)} MiB with a directory and Redis or Valkey" in said
    assert f"{mib(default('observe_bytes') + answers)} MiB more with `observe`" in said
    assert f"{mib(file_uuids)} MiB more with `MMCACHE_FILES_UUIDS`" in said
    unclaimed = store._MOST_ALONE.size_bytes
    assert f"at most {mib(unclaimed)} MiB, and {mib(2 * unclaimed)} MiB with `MMCACHE_FILES_UUIDS`" in said


def test_what_serve_keeps_is_said_where_it_is_offered() -> None:
    readme = " ".join((REPO / "README.md").read_text().split())
    features, records = (Settings.model_fields[f"{name}_disk_bytes"].default >> 30 for name in ("store", "records"))
    assert f"`~/.cache/mmcache` (at most {features} GiB of features and {records} GiB of image records;" in readme


@pytest.mark.slow
def test_what_a_body_takes_is_measured() -> None:
    """The page's three factors, of a body with images alone, within a tenth."""
    texts = [base64.b64encode(os.urandom(400_000)).decode() for _ in range(10)]
    urls = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}} for text in texts]
    sent = json.dumps({"model": "m", "messages": [{"role": "user", "content": urls}]}).encode()
    walker = WALKERS["/v1/chat/completions"]

    def peak(work: Callable[[], object]) -> float:
        tracemalloc.start()
        try:
            assert work()
            return tracemalloc.get_traced_memory()[1] / len(sent)
        finally:
            tracemalloc.stop()

    def receive() -> bytes:
        return b"".join([sent[at : at + 65536] for at in range(0, len(sent), 65536)])

    CONTENT_IDS.clear()
    received = peak(receive)
    unknown = peak(lambda: extract(sent, walker))
    known = peak(lambda: extract(sent, walker))
    factors = r"takes (\S+) times its bytes while it is received, (\S+) times while it is answered, and (\S+)"
    said = re.search(factors, " ".join(PAGE.split()))
    assert said is not None
    assert [float(one) for one in said.groups()] == pytest.approx([received, 1 + known, 1 + unknown], abs=0.1)
