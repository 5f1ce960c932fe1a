# SPDX-License-Identifier: Apache-2.0
"""A tool parser for vLLM's --tool-parser-plugin that refuses whatever the model has generated: a 400 after the work."""

from typing import Any

from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager


@ToolParserManager.register_module("refuses")
class Refuses(ToolParser):
    """vLLM answers a ValueError with 400, wherever it comes from."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        raise ValueError("what the model said is no call of a tool")
