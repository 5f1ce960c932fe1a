# SPDX-License-Identifier: Apache-2.0
"""The records of this process, newest last, within two budgets; listeners hear of each new one. Any thread.

Knows no vLLM. A record is handed in as a recipe and built when somebody reads it first, so that a request pays for
little more than a reference.
"""
