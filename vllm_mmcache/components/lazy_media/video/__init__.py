# SPDX-License-Identifier: Apache-2.0
"""Videos whose bytes are known stay undecoded until somebody needs their frames; as images do.

`video_info` is what is known of a video, `vllm_video` a video with it, `hooks` puts both under vLLM's loader.
"""

DECODERS = ("opencv-python-headless", "opencv-python", "torchcodec", "av")
"""Distributions that decode videos for vLLM; of those that are installed, their versions say what frames look like."""
