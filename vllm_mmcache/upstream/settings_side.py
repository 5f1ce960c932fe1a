# SPDX-License-Identifier: Apache-2.0
"""Puts the `mmcache` part of --additional-config in force, in each process, as soon as the VllmConfig is seen there.

It is also when a process learns of the model runner, so rooms that were not exercised on it are switched off then.

API process: after VllmConfig is made, so that a wrong value stops the start. Engine and worker processes: before the
executor or the worker is built from the configuration that was handed to them.
"""

from typing import Any

from vllm_mmcache import settings
from vllm_mmcache.upstream.start import refuse_without_identity, say_pending, settle


def read_after_config(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of VllmConfig.__post_init__. Raises: SettingsError for an unknown or wrong value; SwapError."""
    outcome = wrapped(*args, **kwargs)
    _read(instance)
    return outcome


def read_before_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of an `__init__(self, vllm_config, ...)`."""
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    _read(vllm_config)
    return wrapped(*args, **kwargs)


def _read(vllm_config: Any) -> None:
    say_pending()
    part = settings.config_of(vllm_config)
    if part:
        settings.use(settings.load_settings(part))
        refuse_without_identity()
    if vllm_config.model_config is not None:  # vLLM makes configurations of no engine, too
        settle(vllm_config)
