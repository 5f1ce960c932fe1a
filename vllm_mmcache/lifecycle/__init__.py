# SPDX-License-Identifier: Apache-2.0
"""Decides at start which components are on in a process, installs their hooks, and reports what is on."""
