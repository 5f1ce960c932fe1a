# SPDX-License-Identifier: Apache-2.0
"""Tries components on the user's own engine while it starts. Engine process, its main thread.

A component that nobody has shown to be exact on this kind of engine is put through a handful of requests before the
first user's: two pictures, two questions, warm against cold. What gives the same answers, and was seen at work, stays
on; what differs is switched off, and so is what could not be tried. lifecycle/trial_hooks.py says when.

`vllm_prompts` makes the questions in chat form, `vllm_engine` drives the engine step by step and leaves nothing behind,
`sequence` is the order of the requests and what each of them shows, `verdict` is what was found. Only vllm_*.py
import vLLM.
"""
