# SPDX-License-Identifier: Apache-2.0
"""A tool parser for vLLM's --tool-parser-plugin that refuses what was generated where tools are given: a late 400."""

from typing import Any

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager


@ToolParserManager.register_module("refuses")
class Refuses(ToolParser):
    """vLLM answers a ValueError with 400, wherever it comes from."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        if not request.tools:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        raise ValueError("what the model said is no call of a tool")
