# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` and `make gpu-ship`: what is exact on a GPU, and how that is found out where there is no network."""
