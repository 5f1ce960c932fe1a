# SPDX-License-Identifier: Apache-2.0
"""Every error that mmcache raises on purpose.

    MMCacheError
    +-- SettingsError        a setting is unknown or has a value that is not allowed
    +-- EnvironmentProblem   this Python environment can't do what was asked (missing package, port in use)
    +-- CausalImages         the attention backend would run a model's images causally, silently wrong
    +-- UnschedulableImage   an image of the model is longer than a step may be
    |   +-- UnschedulableRequest an image of one request is; to that client an error 400
    +-- TenantError          a request names its tenant wrongly; to that client an error 400
    +-- LintError            a chat template or conversations that can't be read
    +-- RecordsError         no records of requests: an unknown id, a wrong key, no server, a malformed file
    +-- FilesUnusable        files of clients can't be read or written now; to that client an error 503
    +-- ProofsUnwritable     the user's file of proofs can't be written
    +-- EngineBusy           an engine has requests, and what was asked for needs one without
    +-- ZooError             an unknown model family, or a directory that can't be written
    +-- StoreError           the feature store can't do what was asked
    |   +-- StoreCorrupt         bytes that are no whole package, or are another package than their name says
    |   |   +-- StoreKeyMismatch     bytes that are encrypted with another key
    |   |   +-- StoreForeign         a package of another format, so of another version of mmcache
    |   |   +-- StoreUnreadable      bytes that the place does not give, where it may give others
    |   +-- StoreUnusable        a directory that is no store, or not ours, or kept locked
    |   +-- ArenaUnusable        the engine's shared memory can't be made, or is not to be had here
    +-- HookError            a vLLM symbol could not be replaced
        +-- VersionUnsupported   this vLLM is outside the tested range
        +-- SymbolMissing        the symbol is not there
        +-- SymbolChanged        the symbol is there, but is not what we wrap
        +-- HookDisturbed        someone else replaced the symbol after us

A message says what failed, what was seen, what was expected, and what to do.
"""


class MMCacheError(Exception):
    """Base of all errors of mmcache; the command line prints its message and exits with 2."""


class SettingsError(MMCacheError):
    """A setting is unknown or has a value that is not allowed."""


class EnvironmentProblem(MMCacheError):
    """This environment lacks what was asked for."""


class CausalImages(MMCacheError):
    """The attention backend would let image tokens see earlier tokens only, where the model lets them see all."""


class UnschedulableImage(MMCacheError):
    """An image that must be computed in one step is longer than a step may be."""


class UnschedulableRequest(UnschedulableImage, ValueError):
    """An image of this request is longer than a step may be. vLLM answers a ValueError with the status 400."""


class TenantError(MMCacheError):
    """A request's header, API key or cache_salt can't name a tenant, or two of them name different ones.

    parameter: the field or header that is wrong. No name of a tenant is in the message.
    """

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class LintError(MMCacheError):
    """What was given to `mmcache lint` can't be read; a conversation's message names the file and the line."""


class RecordsError(MMCacheError):
    """Records of requests can't be had as asked."""


class FilesUnusable(MMCacheError):
    """Where files of clients are kept can't be used, or the content of one is gone or damaged."""


class ProofsUnwritable(MMCacheError):
    """The file in which `mmcache prove` keeps what has passed can't be written."""


class EngineBusy(MMCacheError):
    """The engine has requests, and what was asked for needs one without."""


class ZooError(MMCacheError):
    """A zoo model can't be built as asked."""


class StoreError(MMCacheError):
    """The feature store can't do what was asked. No request ever sees one: to a request it is a miss."""


class StoreCorrupt(StoreError):
    """These bytes are no whole package of this format, or are another package than their name says."""


class StoreKeyMismatch(StoreCorrupt):
    """These bytes are encrypted with another key than the one that is given, if any is."""


class StoreForeign(StoreCorrupt):
    """These bytes are a package of another format than this version's."""


class StoreUnreadable(StoreCorrupt):
    """These bytes can't be read from a place that may give others."""


class StoreUnusable(StoreError):
    """This directory is not there, or not ours to use as a store, or its lock is not given back."""


class ArenaUnusable(StoreError):
    """The shared memory of the engine's features can't be made, or what lies at its address is not it."""


class HookError(MMCacheError):
    """A vLLM symbol could not be replaced."""


class VersionUnsupported(HookError):
    """The installed vLLM is outside the range that this hook was tested on."""


class SymbolMissing(HookError):
    """The vLLM symbol to replace is not there."""


class SymbolChanged(HookError):
    """The vLLM symbol is there, but its kind or its arguments are not those that the hook was written for."""


class HookDisturbed(HookError):
    """The slot does not hold our replacement any more, so it can't be put back safely."""


def one_line(error: Exception, most_chars: int = 200) -> str:
    """What an error says, in one line that begins with its type; for errors of others, which can be long."""
    said = " ".join(str(error).split())[:most_chars]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
