# SPDX-License-Identifier: Apache-2.0
"""Errors about files in the shape that a client's protocol expects. API server process."""

from starlette.responses import JSONResponse

from vllm_mmcache.base import settings, tenant
from vllm_mmcache.base.asgi import error_body
from vllm_mmcache.base.errors import TenantError

MOST_SHOWN = 80
"""Characters of a client's text that an error repeats."""


class Refusal(Exception):
    """An error for one client. parameter: the field that is wrong."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter

    def response(self, path: str) -> JSONResponse:
        """The answer, in the form of vLLM's own errors at `path`."""
        return JSONResponse(error_body(path, self.status, str(self), self.parameter), status_code=self.status)


def unknown(file_id: str) -> Refusal:
    """The same for a file that was never there, one that is gone, and one of another tenant."""
    return Refusal(
        404,
        f"There is no file {file_id[:MOST_SHOWN]!r}: it was never uploaded by this tenant, was deleted, or has "
        "expired. Upload the image with POST /v1/files.",
        "file_id",
    )


def salt_of(given: object) -> str | None:
    """The salt of the tenant that a request's headers name, or `given`, its cache_salt, where that names one here.

    Raises: Refusal (400) for a name that is none, one that contradicts the headers, and none where one is required.
    """
    source = tenant.REQUEST_SOURCE.get()
    try:
        source.check_body(given)
        if given is not None and not isinstance(given, str):
            raise TenantError("Parameter 'cache_salt' is no text.", "cache_salt")
        if given == "":
            raise TenantError("Parameter 'cache_salt' is empty: name a tenant, or leave it out.", "cache_salt")
        salt = tenant.current(None if source.is_gateway else given)
        if salt is None and settings.current().requires_tenant:
            raise TenantError(f"{source.in_words()} has to name a tenant here.", source.parameter())
        tenant.key_of(salt)
        return salt
    except TenantError as error:
        raise Refusal(400, str(error), error.parameter) from error
    except UnicodeEncodeError as error:
        raise Refusal(400, "Parameter 'cache_salt' is no text that UTF-8 has.", "cache_salt") from error


def tenant_key(given: object) -> bytes | None:
    """tenant.key_of the salt that `salt_of` gives. Raises: as salt_of."""
    return tenant.key_of(salt_of(given))
