# SPDX-License-Identifier: Apache-2.0
"""What an item record and a model's features depend on beside the image: each thing that changes makes another key."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.version
from mmcache_tools.zoo import ZooOptions
from mmcache_tools.zoo.build import token_ids, write_all_but_weights
from mmcache_tools.zoo.catalogue import BY_NAME
from mmcache_tools.zoo.tokenizer import tokenizer_json
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from tests.unit.components.lazy_processing.test_vllm_item_record import file_of, opened
from vllm_mmcache.base import settings, status
from vllm_mmcache.base.versions import installed
from vllm_mmcache.components.features.vllm_facts import facts_of
from vllm_mmcache.components.lazy_media.hooks import KnownImage
from vllm_mmcache.components.lazy_media.media_info import MediaInfo
from vllm_mmcache.components.lazy_processing import prepare, vllm_processor_facts
from vllm_mmcache.components.lazy_processing.prepare import item_facts
from vllm_mmcache.content.digests import inputs_digest
from vllm_mmcache.storage import record_store

MAX_PIXELS = 64 * 64


def configuration(directory: Path, **more: Any) -> ModelConfig:
    return ModelConfig(model=str(directory), dtype="float32", max_model_len=1024, **more)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory without weights, which no processor reads."""
    directory = tmp_path_factory.mktemp("model") / "model"
    directory.mkdir()
    family = BY_NAME["qwen3-vl"]
    text, ids, _ = tokenizer_json(family)
    assert ids == token_ids(text)
    write_all_but_weights(family, directory, ZooOptions(), text, ids)
    return directory


class Made:
    """A model's directory, its configuration, and vLLM's processor, as a server has them at start."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = configuration(directory)
        self.compiles = False
        self.processor: Any = MULTIMODAL_REGISTRY.create_processor(self.config)

    def read_again(self, **more: Any) -> None:
        """As a server does that starts now."""
        self.config = configuration(self.directory, **more)

    def edit(self, name: str, **fields: Any) -> None:
        path = self.directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        self.read_again()

    def items(self) -> dict[str, str]:
        """Of item records."""
        return item_facts(self.config, self.processor)

    def features(self) -> dict[str, str]:
        """Of features, in the worker."""
        parallel = SimpleNamespace(tensor_parallel_size=1)
        compilation = SimpleNamespace(compile_mm_encoder=self.compiles)
        config = SimpleNamespace(model_config=self.config, parallel_config=parallel, compilation_config=compilation)
        return facts_of(config, torch.device("cpu"))


@pytest.fixture
def made(written: Path, tmp_path: Path) -> Made:
    directory = tmp_path / "model"
    directory.mkdir()
    for path in written.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return Made(directory)


Change = Callable[[Made, pytest.MonkeyPatch], object]


def attribute(name: str, value: Any) -> Change:
    return lambda made, monkeypatch: setattr(made.config, name, value)


def of_multimodal(name: str, value: Any) -> Change:
    def change(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        made.config.multimodal_config = copy.copy(made.config.multimodal_config)
        assert getattr(made.config.multimodal_config, name) != value
        monkeypatch.setattr(made.config.multimodal_config, name, value)

    return change


def another(distribution: str) -> Change:
    """Another version of it is installed."""

    def change(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        before = installed
        changed = {distribution: "another"}
        monkeypatch.setattr(vllm_processor_facts, "installed", lambda name: changed.get(name) or before(name))

    return change


def add_token(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["content"] += "x"
    path.write_text(json.dumps(content))


def bring_code(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    (made.directory / "processing.py").write_text("SIZE = 1")
    made.read_again(trust_remote_code=True)


def change_size(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.edit("preprocessor_config.json", size={"shortest_edge": 1024, "longest_edge": MAX_PIXELS})


def change_videos(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.processor.info.get_hf_processor().video_processor.fps = 7


def another_class(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.processor.__class__ = type("Another", (type(made.processor),), {})


def to_another_directory(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of its own, elsewhere."""
    elsewhere = made.directory.parent / "tokenizer"
    elsewhere.mkdir()
    (elsewhere / "tokenizer.json").write_text("{}")
    made.config.tokenizer = str(elsewhere)


def identity_off(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "is_on", lambda component: component != "identity")


CHANGES: dict[str, tuple[Change, set[str], bool]] = {
    # what changes -> (how, the fields of an item record's key that do, whether features have another key, too)
    "the format": (lambda made, patch: patch.setattr(prepare, "FORMAT", 99), {"format"}, False),
    "identity": (identity_off, {"identity"}, False),
    "tokenizer.json": (add_token, {"files", "tokenizer"}, False),
    "tokenizer_config.json": (
        lambda made, patch: made.edit("tokenizer_config.json", eos_token="x"), {"files", "tokenizer"}, False,
    ),
    "the tokenizer's directory": (to_another_directory, {"tokenizer"}, False),
    "the tokenizer's mode": (attribute("tokenizer_mode", "slow"), {"tokenizer mode"}, False),
    "tokenizers": (another("tokenizers"), {"tokenizer mode"}, False),
    "preprocessor_config.json": (change_size, {"settings", "files", "tokenizer"}, True),
    "a file of the processor": (
        lambda made, patch: (made.directory / "processor_config.json").write_text("{}"), {"files", "tokenizer"}, False,
    ),
    "config.json": (
        lambda made, patch: made.edit("config.json", vision_start_token_id=7), {"config", "files", "tokenizer"}, True,
    ),
    "code of its own": (bring_code, {"own code", "files", "tokenizer"}, True),
    "--mm-processor-kwargs": (of_multimodal("mm_processor_kwargs", {"max_pixels": MAX_PIXELS}), {"given"}, True),
    "--media-io-kwargs": (of_multimodal("media_io_kwargs", {"image": {"image_mode": "L"}}), {"loading"}, True),
    "--mm-device-do-normalize": (of_multimodal("mm_device_do_normalize", False), {"normalized on the device"}, True),
    "--mm-hasher-algorithm": (of_multimodal("mm_hasher_algorithm", "sha512"), {"names"}, True),
    "--revision": (attribute("revision", "b"), {"code"}, True),
    "--code-revision": (attribute("code_revision", "b"), {"code"}, True),
    "--dtype": (attribute("dtype", torch.float16), {"dtype"}, True),
    "the settings for videos": (change_videos, {"videos"}, False),
    "what decodes videos": (another("opencv-python-headless"), {"videos"}, False),
    "what samples frames of videos": (
        lambda made, patch: patch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic"), {"videos"}, False,
    ),
    "the processor's class": (another_class, {"processor"}, False),
    "pillow": (another("pillow"), {"made by"}, True),
    "numpy": (another("numpy"), {"made by"}, True),
    "torchvision": (another("torchvision"), {"made by"}, True),
    "transformers": (another("transformers"), {"made by"}, True),
    "tower_one_by_one": (
        lambda made, patch: patch.setattr(settings, "_current", settings.Settings(tower_one_by_one=True)), set(), True,
    ),
    "compile_mm_encoder": (lambda made, patch: setattr(made, "compiles", True), set(), True),
    "VLLM_FLOAT32_MATMUL_PRECISION": (
        lambda made, patch: patch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high"), set(), True,
    ),
    "VLLM_BATCH_INVARIANT": (lambda made, patch: patch.setenv("VLLM_BATCH_INVARIANT", "1"), set(), True),
    "torch": (lambda made, patch: patch.setattr(torch, "__version__", "another"), {"torch"}, True),
    "vllm": (lambda made, patch: patch.setattr(vllm.version, "__version__", "another"), {"vllm"}, True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_meaning_is_in_the_key(name: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    change, changed, of_features = CHANGES[name]
    items, features = made.items(), made.features()
    assert (made.items(), made.features()) == (items, features)  # the control
    change(made, monkeypatch)
    now = made.items()
    assert {field for field in {**items, **now} if items.get(field) != now.get(field)} == changed
    assert (inputs_digest(now) != inputs_digest(items)) == bool(changed)
    assert (made.features() != features) == of_features


def test_features_of_videos_depend_on_what_samples_frames(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vllm_processor_facts.video_facts(made.config)
    assert vllm_processor_facts.video_facts(made.config) == before
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic")
    assert vllm_processor_facts.video_facts(made.config) != before
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv")  # vLLM's default
    assert vllm_processor_facts.video_facts(made.config) == before


@pytest.mark.slow
def test_settings_that_vllm_does_not_read_are_in_the_key(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ModelScope it reads none, neither of a directory."""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    made.read_again()
    assert not made.config.hf_image_processor_config
    before = made.features()
    assert made.features() == before
    change_size(made, monkeypatch)
    assert made.features() != before


def test_every_field_has_a_change(made: Made) -> None:
    """A field that nothing here changes could be left out, and no test would fail."""
    covered = set().union(*(changed for _, changed, _ in CHANGES.values()))
    assert covered == {*made.items(), "own code"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja", "generation_config.json", "README.md"])
def test_what_says_nothing_of_an_item_is_not_in_the_key(name: str, made: Made) -> None:
    before = made.items()
    (made.directory / name).write_text("another")
    assert made.items() == before


@pytest.fixture
def kept_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty store in a folder, and all that images go to the engine without pixels for is on."""
    monkeypatch.setattr(settings, "_current", settings.Settings(store=str(tmp_path / "store")))
    monkeypatch.setattr(status, "is_on", lambda component: True)
    monkeypatch.setattr(status, "is_on_everywhere", lambda component: True)
    record_store.close()
    yield
    record_store.close()


RESTARTS: dict[str, tuple[Callable[[Made], object], str]] = {
    # what changes between two servers -> (how, what the second one does with the first one's image)
    "nothing": (lambda made: made.read_again(), "deferred"),
    "preprocessor_config.json": (
        lambda made: made.edit("preprocessor_config.json", size={"shortest_edge": 1024, "longest_edge": MAX_PIXELS}),
        "run",
    ),
    "--mm-processor-kwargs": (lambda made: made.read_again(mm_processor_kwargs={"max_pixels": MAX_PIXELS}), "run"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTARTS)
def test_a_record_is_used_by_a_server_with_the_same_processor_alone(name: str, made: Made, kept_records: None) -> None:
    """Two servers on one store, without their engines: what each renderer does with one image."""
    change, done = RESTARTS[name]
    assert what_is_done(made) == "run"
    assert record_store.current().flush(10.0)
    record_store.close()
    change(made)
    assert what_is_done(made) == done


def what_is_done(made: Made) -> str | None:
    """What a server that starts now does with an image: `run` the processor, or `deferred`."""
    processor = MULTIMODAL_REGISTRY.create_processor(made.config)
    preparer = prepare.ItemPreparer(processor, made.config, None)
    media, origin = opened(file_of(200, 120, "RGB"))
    image = KnownImage(media.media, lambda: media.original_bytes, MediaInfo((200, 120), "RGB", {}), b"id", origin)
    try:
        assert preparer._make_ready(prepare.ItemRequest("image", image, None, {}, {}), preparer.cache) is not None
        return image.processor
    finally:
        preparer.close()


def test_a_model_whose_files_are_not_found_is_another_one_each_time(made: Made) -> None:
    made.config.tokenizer = "somebody/of-the-hub-that-is-not-there"
    first, second = made.items(), made.items()
    assert first["tokenizer"] != second["tokenizer"]
    assert first["files"] == second["files"]
