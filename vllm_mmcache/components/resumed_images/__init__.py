# SPDX-License-Identifier: Apache-2.0
"""A preempted request that comes back brings its images' inputs along. Engine and worker process."""
