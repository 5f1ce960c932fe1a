# SPDX-License-Identifier: Apache-2.0
"""Images that attend both ways are never split by a step, and run as such.

`scheduler` cuts steps around spans (`spans`), `admission` refuses what no step can hold and gives the others their
turn, `attention` is the backend that reads images' full KV from the paged cache; `rules` says of which models images
attend both ways. Engine, API and worker process.
"""
