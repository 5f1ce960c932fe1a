# SPDX-License-Identifier: Apache-2.0
"""The demo: one conversation about pictures, on stock vLLM and with the plugin, checked against cold runs.

`conversation` is the client, `run` starts the servers (harness/server.py), compares and shows. Runs in the process of
the command line; needs the `dev` extra (openai, photographs).
"""
