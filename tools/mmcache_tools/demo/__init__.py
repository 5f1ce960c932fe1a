# SPDX-License-Identifier: Apache-2.0
"""The demo: one conversation about pictures, on stock vLLM and with the plugin, checked against cold runs.

`server` starts and stops a server process (tests and benchmarks use it too), `conversation` is the client,
`run` compares and shows. Runs in the process of the command line; needs the `dev` extra (openai,
photographs).
"""
