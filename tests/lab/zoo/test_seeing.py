# SPDX-License-Identifier: Apache-2.0
"""The model that sees, without an engine: its pictures, its prompts as the processor makes them, its weights."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mmcache_tools.zoo import TRAINED, ZooOptions, build, build_cached, seeing
from mmcache_tools.zoo.seeing import train
from mmcache_tools.zoo.seeing.examples import NO_LABEL, Encoder, collate
from mmcache_tools.zoo.seeing.pictures import THINGS, Thing, draw, stream
from mmcache_tools.zoo.seeing.prompts import (
    KINDS,
    MAX_PICTURES,
    MAX_TURNS,
    converse,
    held_out,
    random_plan,
    right_answer,
)

from vllm_mmcache.base.errors import ZooError

HERE = Path(seeing.__file__).parent
MEASURED = json.loads((HERE / "measured.json").read_text())
MAX_WEIGHTS_BYTES = 8_000_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert TRAINED == ("seeing",)
    return build_cached("seeing", tmp_path_factory.mktemp("zoo"))


def digest(*numbers: int) -> str:
    """Of everything that these held-out conversations say and show."""
    found = hashlib.sha256()
    for number in numbers:
        conversation = held_out(number)
        for turn in conversation.turns:
            found.update(f"{conversation.system}\0{turn.question}\0{turn.answer}\0".encode())
            for picture in turn.pictures:
                found.update(picture.tobytes())
    return found.hexdigest()


@pytest.mark.process
def test_same_number_same_conversation() -> None:
    code = "from tests.lab.zoo.test_seeing import digest; print(digest(0, 1, 2, 3))"
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    assert there == digest(0, 1, 2, 3)
    assert digest(0, 1, 2, 4) != there


def test_a_thing_is_drawn_in_its_colour_and_never_twice_alike() -> None:
    for thing in THINGS:
        random = stream("test", str(thing))
        one, other = (np.asarray(draw(random, thing)).astype(int) for _ in range(2))
        assert one.shape == (96, 96, 3)
        assert np.abs(one - other).max() > 50
    mean = {}
    for colour in ("red", "green", "blue"):
        pixels = np.asarray(draw(stream("test"), Thing(colour, "square"), 200)).astype(int)
        mean[colour] = int((pixels - pixels.mean(axis=2, keepdims=True)).std(axis=2).argmax())
        y, x = divmod(mean[colour], 200)
        assert pixels[y, x].argmax() == ("red", "green", "blue").index(colour)


def test_held_out_pictures_are_not_trained_on() -> None:
    """Streams differ by name; here for the first steps of both stages, and for those watched while training."""

    def pictures(conversations: Any) -> set[bytes]:
        return {picture.tobytes() for conversation in conversations for picture in conversation.pictures}

    trained = set().union(*(pictures(train.conversations(step)) for step in (0, 1, train.SINGLE_STEPS)))
    watched = pictures(held_out(-1 - number) for number in range(20))
    counted = pictures(held_out(number) for number in range(100))
    assert len(counted) > 100
    assert not counted & trained
    assert not counted & watched


def test_right_answers() -> None:
    red, blue = Thing("red", "circle"), Thing("blue", "star")
    assert right_answer("both", [red, blue]) == "red circle, blue star: different"
    assert right_answer("with_last", [blue, red, red]) == "red circle, red circle: same"
    assert right_answer("with_first", [blue, red, red]) == "blue star, red circle: different"
    assert right_answer("both", [red, Thing("red", "star")]) == "red circle, red star: different"
    assert [right_answer(kind, [red, blue]) for kind in ("name", "last", "first", "colour", "shape")] == [
        "blue star", "blue star", "red circle", "blue", "star",
    ]  # fmt: skip


@pytest.mark.slow
def test_half_of_all_pairs_are_the_same_thing() -> None:
    verdicts = [converse(stream("pairs", i), ["both"]).answer.split(": ")[1] for i in range(400)]
    assert 160 < verdicts.count("same") < 240
    assert set(verdicts) == {"same", "different"}


@pytest.mark.slow
def test_plans_fit() -> None:
    for i in range(200):
        random = stream("plans", i)
        num_turns = 1 + i % MAX_TURNS
        plan = random_plan(random, num_turns)
        assert len(plan) == num_turns
        assert sum(KINDS[kind][0] for kind in plan) <= MAX_PICTURES
        converse(random, plan)  # asserts that every question has the pictures it asks about


@pytest.mark.slow
def test_examples_are_what_processor_and_model_make(directory: Path) -> None:
    """Ids, pixels and positions of training equal those of the chat template, the processor and Transformers."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    model = AutoModelForImageTextToText.from_pretrained(directory)
    encoder = Encoder((directory / "tokenizer.json").read_text())
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for number in range(8):
        conversation = held_out(number)
        batch = collate(encoder, [conversation])
        text = processor.apply_chat_template(conversation.messages(), add_generation_prompt=True, tokenize=False)
        inputs = processor(text=text, images=conversation.pictures or None, return_tensors="pt")
        answer = processor.tokenizer(conversation.answer)["input_ids"]
        assert batch.ids[0].tolist() == [*inputs["input_ids"][0].tolist(), *answer, end]
        assert batch.patches is not None
        assert torch.equal(batch.grids, inputs["image_grid_thw"])
        assert (batch.patches - inputs["pixel_values"]).abs().max() < 1e-6
        token_types = (batch.ids == encoder.image_token_id).int()
        positions, _ = model.model.get_rope_index(batch.ids, token_types, batch.grids)
        assert torch.equal(batch.positions, positions)
        said = batch.labels[0][batch.labels[0] != NO_LABEL].tolist()
        answers = [processor.tokenizer(turn.answer)["input_ids"] for turn in conversation.turns]
        assert said == [token for ids in answers for token in (*ids, end)]


def test_large_pictures_become_small(directory: Path) -> None:
    """A square picture of any size takes nine tokens, so the demo can send large ones."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    for size in (48, 96, 640):
        picture = draw(stream("large"), THINGS[0], size)
        inputs = processor(text="<|image_pad|>", images=[picture], return_tensors="pt")
        assert inputs["image_grid_thw"].tolist() == [[1, 6, 6]]
        assert inputs["input_ids"].shape[1] == 9


def test_committed_weights_are_those_that_were_measured(directory: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    weights = (HERE / "model.safetensors").read_bytes()
    assert len(weights) == MEASURED["weights_bytes"] <= MAX_WEIGHTS_BYTES
    assert train.digests(directory) == MEASURED["files_sha256"]
    assert (directory / "model.safetensors").read_bytes() == weights
    model, info = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert model.config.vision_config.deepstack_visual_indexes
    num_parameters = sum(values.numel() for values in model.parameters())
    assert (
        num_parameters
        == MEASURED["num_parameters"]
        == json.loads((directory / "zoo.json").read_text())["num_parameters"]
    )
    assert MEASURED["steps"] == train.STEPS
    assert MEASURED["seed"] == train.SEED
    assert (MEASURED["held_out"], MEASURED["right"] >= 490) == (500, True)


@pytest.mark.slow
def test_right_answers_are_counted(directory: Path) -> None:
    """The measure itself: all right answers count, one that is asked about another picture does not."""
    from dataclasses import replace

    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    encoder = Encoder((directory / "tokenizer.json").read_text())
    asked = [converse(stream("count", i), ["name"]) for i in range(40)]
    assert train.num_right(model, encoder, asked) >= 38
    shifted = [
        replace(one, turns=(replace(one.turns[0], pictures=other.turns[0].pictures),))
        for one, other in zip(asked, asked[1:] + asked[:1], strict=True)
        if one.answer != other.answer
    ]
    assert len(shifted) > 30
    assert train.num_right(model, encoder, shifted) <= 1


def test_trained_weights_have_no_seed(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="seeing has trained weights: seed 1"):
        build("seeing", tmp_path / "a", seed=1)
    with pytest.raises(ZooError, match="take one of qwen2-vl"):
        build_cached("seeing", tmp_path, options=ZooOptions(max_pixels=64 * 64))
