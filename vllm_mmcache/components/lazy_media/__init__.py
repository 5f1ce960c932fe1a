# SPDX-License-Identifier: Apache-2.0
"""Images whose bytes are known stay undecoded until somebody needs their pixels.

`picture` is such an image, `records` is what is known about the bytes, `loader` puts both under vLLM's image loader.
"""
