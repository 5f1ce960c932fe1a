# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine, how far two of them may be apart, and the pictures and words that they are asked about.

What `mmcache prove`, the trial at start and the tests have in common. Imports no vLLM.
"""
