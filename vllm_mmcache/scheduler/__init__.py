# SPDX-License-Identifier: Apache-2.0
"""What the scheduler may put into a step, and which KV states it keeps. Engine process."""
