# SPDX-License-Identifier: Apache-2.0
"""Questions about many pictures with LLM(), on one engine: the same as ray_data_questions.py, without Ray.

Run it so:

    python examples/offline_questions.py Qwen/Qwen3-VL-8B-Instruct pictures answers \
        --question "What is this?" --question "Which colors do you see?"
"""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pictures import answered, arguments, engine_arguments, pictures_in
from tqdm import tqdm
from vllm import LLM, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_mmcache.batch import EncodedImage

PICTURES_AT_A_TIME = 64


def main() -> None:
    """Ask what is not answered yet, and write a Parquet file for each batch of pictures."""
    given = arguments("Ask questions about pictures with LLM().").parse_args()
    done = answered(given.answers)
    asked = [(one, text) for one in pictures_in(given.pictures) for text in given.question if (one, text) not in done]
    if not asked:
        print(f"all questions are answered in {given.answers}")
        return
    given.answers.mkdir(parents=True, exist_ok=True)
    llm = LLM(given.model, **engine_arguments(json.loads(given.engine), given.store))
    sampling = SamplingParams(temperature=0, max_tokens=given.max_tokens)
    number = next_number(given.answers)
    size = PICTURES_AT_A_TIME * len(given.question)
    for start in tqdm(range(0, len(asked), size), unit="batch"):
        rows = answers(llm, sampling, asked[start : start + size], given.tenant)
        path = given.answers / f"{number + start // size:06}.parquet"
        incoming = path.with_name(f".{path.name}.incoming")  # nobody reads half a file after a crash
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), incoming)
        incoming.replace(path)


def next_number(folder: Path) -> int:
    """The number of the next file of answers: the highest that is there, and one."""
    return max((int(path.stem) for path in folder.glob("*.parquet") if path.stem.isdecimal()), default=-1) + 1


def answers(llm: LLM, sampling: SamplingParams, asked: list[tuple[str, str]], tenant: str | None) -> list[Any]:
    """A row for each question. Where one can't be asked, all are asked one at a time, and it gets an error."""
    chats = [chat(picture, question, tenant) for picture, question in asked]
    try:
        texts = [(output.outputs[0].text, "") for output in llm.chat(chats, sampling, use_tqdm=False)]
    except EngineDeadError:  # nothing more can be asked; what is written stays
        raise
    except Exception as error:
        if len(asked) == 1:
            texts = [("", f"{type(error).__name__}: {error}")]
        else:
            return [row for one in asked for row in answers(llm, sampling, [one], tenant)]
    return [
        {"picture": picture, "question": question, "answer": text, "error": error}
        for (picture, question), (text, error) in zip(asked, texts, strict=True)
    ]


def chat(picture: str, question: str, tenant: str | None) -> list[Any]:
    """A conversation about one picture."""
    image = {"type": "image_pil", "image_pil": EncodedImage(picture, tenant=tenant)}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


if __name__ == "__main__":
    main()
