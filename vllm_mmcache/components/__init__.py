# SPDX-License-Identifier: Apache-2.0
"""What can be switched on and off on its own, a package each."""
