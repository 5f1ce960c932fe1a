# SPDX-License-Identifier: Apache-2.0
"""No request waits for ever for a step that can hold its image. API processes and the engine's."""
