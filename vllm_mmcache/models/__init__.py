# SPDX-License-Identifier: Apache-2.0
"""Model classes that say what caching must know of their images, registered with vLLM in place of their parents.

protocol.py is what a class can say; facts.py what those of Qwen-VL, Gemma and PaliGemma say; vllm_classes.py the
classes; vllm_registry.py puts them into vLLM's registry, and finds what the class of a model says.
"""
