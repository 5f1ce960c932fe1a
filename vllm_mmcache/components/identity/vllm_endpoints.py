# SPDX-License-Identifier: Apache-2.0
"""Finds the tenant of every request to vLLM's HTTP application before it is processed. API server process, event loop.

middleware.py finds tenants that headers and API keys name. This module installs it, and finds tenants that bodies name.
It is imported only where an application is built, since it imports FastAPI.
"""

from typing import Any

from fastapi import Request
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_mmcache.base import status, tenant
from vllm_mmcache.base.asgi import path_of
from vllm_mmcache.base.errors import TenantError
from vllm_mmcache.components.identity.hooks import check_text
from vllm_mmcache.components.identity.middleware import FindTenant, refusal
from vllm_mmcache.content import image_namer, tokens_alone
from vllm_mmcache.content.tenant_source import configured_source


def use_on(app: Any) -> None:
    """Install both ways on vLLM's FastAPI application. Called once, while the application is built."""
    app.user_middleware.append(Middleware(FindTenant, source=configured_source()))  # the first is the outermost
    app.dependency_overrides[validate_json_request] = find_tenant_in_body
    app.add_exception_handler(TenantError, _refuse)


async def find_tenant_in_body(raw_request: Request) -> None:
    """Override of the dependency validate_json_request(raw_request), which each endpoint with a JSON body has.

    FastAPI has parsed the body then, and nothing has read it. The tenant that its cache_salt names is set, also for
    requests whose model has no such field. Raises: VLLMValidationError (HTTP 400) for an invalid cache_salt;
    TenantError for one that contradicts the request's header or key; what vLLM's own function raises.
    """
    await validate_json_request(raw_request)
    # Both are at hand; FastAPI answers for a body that is empty, and has not parsed it.
    body = await raw_request.json() if await raw_request.body() else None
    salt, features = (body.get("cache_salt"), body.get("features")) if isinstance(body, dict) else (None, None)
    image_namer.PROCESSED_BY_CLIENT.set(features is not None)
    tokens_alone.ASKED.set(tokens_alone.is_asked(raw_request.scope["path"], body))
    if salt is None or not status.is_on("identity"):
        return
    tenants = tenant.REQUEST_SOURCE.get()
    tenants.check_body(salt)
    if not tenants.is_gateway:
        validate_cache_salt(salt)
        check_text("cache_salt", salt)
        tenant.SALT.set(salt)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TenantError)
    return JSONResponse(refusal(path_of(request.scope), error), status_code=400)
