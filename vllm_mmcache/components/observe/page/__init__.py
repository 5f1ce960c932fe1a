# SPDX-License-Identifier: Apache-2.0
"""What the server's endpoints below /mmcache show of its requests, and to whom. API server process."""
