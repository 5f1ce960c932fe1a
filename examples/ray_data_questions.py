# SPDX-License-Identifier: Apache-2.0
"""Questions about many pictures with Ray Data, on any number of engines: each picture is decoded and encoded once.

    pip install '.[cuda,ray]'
    python examples/ray_data_questions.py Qwen/Qwen3-VL-8B-Instruct s3://bucket/pictures answers \
        --question "What is this?" --question "Which colors do you see?" --engines 8

Rows hold the picture's path or URL, never its pixels. The questions about one picture stand side by side, so that they
go to one engine, where the second one finds the picture's KV. A picture that can't be used gets an error in its rows.
Started again, it asks what is not answered yet.
"""

import json
from collections.abc import Iterator
from typing import Any

import ray
from pictures import answered, arguments, engine_arguments, pictures_in
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

from vllm_mmcache.batch import question

LIGHT = {"num_cpus": 0.25}
"""Of a task: stages beside the engines do next to nothing for a row."""


def main() -> None:
    """Ask what is not answered yet; Ray writes Parquet files while it goes on."""
    parser = arguments("Ask questions about pictures with Ray Data.")
    parser.add_argument("--engines", type=int, default=1, help="actors, each with an engine of its own")
    parser.add_argument("--cpu", action="store_true", help="engines without a GPU")
    given = parser.parse_args()
    done = answered(given.answers)
    questions: list[str] = given.question
    left = [one for one in pictures_in(given.pictures) if any((one, text) not in done for text in questions)]
    if not left:
        print(f"all questions are answered in {given.answers}")
        return

    def rows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for text in questions:
            if (row["picture"], text) not in done:
                yield {"picture": row["picture"], "question": text}

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_tokens": given.max_tokens}
        return {**question([row["picture"]], row["question"], tenant=given.tenant), "sampling_params": sampling}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "picture": row["picture"],
            "question": row["question"],
            "answer": row.get("generated_text") or "",
            "error": row["__inference_error__"],
        }

    config = vLLMEngineProcessorConfig(
        model_source=given.model,
        engine_kwargs=engine_arguments(json.loads(given.engine), given.store),
        concurrency=given.engines,
        batch_size=16 * len(questions),
        should_continue_on_error=True,
        log_engine_metrics=False,
        placement_group_config={"bundles": [{"CPU": 1}]} if given.cpu else None,
        # The picture is opened where the engine is, vLLM tokenizes, and its detokenizer has made the text.
        prepare_multimodal_stage={"enabled": False},
        chat_template_stage={"enabled": True, **LIGHT},
        tokenize_stage={"enabled": False},
        detokenize_stage={"enabled": False},
    )
    process = build_processor(config, preprocess=ask, preprocess_map_kwargs=LIGHT, postprocess_map_kwargs=LIGHT)
    asked = ray.data.from_items([{"picture": one} for one in left]).flat_map(rows, **LIGHT)
    process(asked).map(answer, **LIGHT).write_parquet(str(given.answers), mode="append", ray_remote_args=LIGHT)


if __name__ == "__main__":
    main()
