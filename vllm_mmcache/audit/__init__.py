# SPDX-License-Identifier: Apache-2.0
"""The audit of live traffic: a share of the requests that used a component's result is computed anew, and compared.

Engine process alone, its main thread. Off unless the setting audit is above 0: then hooks.py is installed. auditor.py
decides what is asked and when, vllm_requests.py asks it of the engine, samples.py holds what waits, and
exactness/distance.py judges. Only hooks.py and vllm_*.py import vLLM. It must never fail, change or hold up a user's
request.
"""
