# SPDX-License-Identifier: Apache-2.0
"""The feature store's part in the engine process: what is kept where, and what a step loads and saves."""
