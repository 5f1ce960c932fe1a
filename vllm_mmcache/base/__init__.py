# SPDX-License-Identifier: Apache-2.0
"""What every other package may use: settings, errors, the components' states, small data structures and threads."""
