# SPDX-License-Identifier: Apache-2.0
"""What is said about one request: its segments, what of each was reused, and one reason for what was not.

Imports neither vLLM nor torch: the page, `mmcache explain` and tests read records with it, on any machine. A record
never holds text, token ids or bytes of a prompt; digests are keyed and have 8 hex digits. JSON is `model_dump(mode=
"json")`; one record a line in a record file. Unknown fields of a newer format are ignored, another `format` is refused.
"""

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT = 1
DIGEST_CHARS = 8
REQUEST_ID_CHARS = 128  # of a client's id; the rest of a longer one is left out


class Reason(StrEnum):
    """Why tokens were computed though a cache exists. One per miss; see `MEANINGS`."""

    NEW_CONTENT = "new_content"
    TEXT_DIFFERS = "text_differs"
    IMAGE_DIFFERS = "image_differs"
    TEMPLATE_REWROTE = "template_rewrote"
    BLOCK_TAIL = "block_tail"
    LAST_TOKEN = "last_token"
    EVICTED = "evicted"
    STATE_NOT_KEPT = "state_not_kept"
    NOT_YET_COMPUTED = "not_yet_computed"
    OTHER_SALT = "other_salt"
    OTHER_LORA = "other_lora"
    CACHING_OFF = "caching_off"
    UNEXPLAINED = "unexplained"


MEANINGS: dict[Reason, str] = {
    Reason.NEW_CONTENT: "no remembered request has this content behind the same beginning",
    Reason.TEXT_DIFFERS: "an earlier part of the prompt differs from the nearest earlier request",
    Reason.IMAGE_DIFFERS: "an image differs from that of the nearest earlier request: bytes, size, settings or place",
    Reason.TEMPLATE_REWROTE: "the chat template or the tokenizer wrote an earlier turn in another way than before",
    Reason.BLOCK_TAIL: "only whole blocks are kept, and this one was not full",
    Reason.LAST_TOKEN: "all is known, but the end of a prompt is always computed, to have something to answer from",
    Reason.EVICTED: "it was cached, and had to go before this request came, or the cache was reset",
    Reason.STATE_NOT_KEPT: "some layers (sliding window, Mamba) have no state at this position, so no layer can use it",
    Reason.NOT_YET_COMPUTED: "an earlier request has the same content, but had not computed it yet",
    Reason.OTHER_SALT: "the same content is known under another cache_salt",
    Reason.OTHER_LORA: "the same content is known under another LoRA adapter",
    Reason.CACHING_OFF: "prefix caching was off, for the server or for this request",
    Reason.UNEXPLAINED: "none of the reasons that are known",
}

FEATURE_MEANINGS: dict[str, str] = {
    "not_needed": "the tokens of the image were all reused, so nothing asked for its features",
    "tower": "the vision tower computed the features",
    "encoder_cache": "vLLM's encoder cache still had the features of an earlier request",
    "ram": "the feature store had the features in RAM",
    "disk": "the feature store had the features on disk",
    "remote": "the feature store had the features in Redis or Valkey",
    "tower_faster_than_disk": "the vision tower computed the features, since reading them from disk takes longer",
    "tower_faster_than_remote": "the vision tower computed the features, since fetching them takes longer",
    "unknown": "nobody has recorded where the features came from",
}
"""Of the values of `Image.features`."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Group(_Part):
    """One KV cache group of the model: layers that keep their KV or state in the same way."""

    index: int
    kind: str
    """full_attention, sliding_window, mamba, or vLLM's own name in lower case."""
    block_tokens: int
    hit_tokens: int
    """How far this group alone would have reused the prompt."""
    vetoed: bool = False
    """Its state was missing where other groups had theirs."""


class Nearest(_Part):
    """The remembered request that shares the longest beginning with this one."""

    id: str
    age_s: float
    """Seconds between its start and this one's."""
    common_tokens: int
    """How many tokens the two share from the start, images included."""
    same_salt: bool = True
    same_lora: bool = True


class Image(_Part):
    """What happened to one image, layer by layer. `unknown` where a layer of ours is off or saw nothing."""

    index: int
    digest: str
    """Of vLLM's mm_hash: 8 hex digits, keyed; see digests.shown."""
    width: int | None = None
    height: int | None = None
    body: Literal["lifted", "left", "unknown"] = "unknown"
    """Taken out of the HTTP body before it was parsed, or left in it (URL, short, no HTTP at all)."""
    decode: Literal["skipped", "decoded", "late", "unknown"] = "unknown"
    """skipped: known bytes, pixels never needed. late: known, but somebody needed the pixels after all."""
    processor: Literal["hit", "run", "deferred", "unknown"] = "unknown"
    """Whether vLLM's processor cache had the processed image. deferred: it went to the engine without its pixels."""
    features: Literal[
        "ram",
        "disk",
        "remote",
        "tower",
        "tower_faster_than_disk",
        "tower_faster_than_remote",
        "encoder_cache",
        "not_needed",
        "unknown",
    ] = "unknown"
    """Where its features came from. not_needed: its KV was reused whole. encoder_cache: vLLM's own, of this moment.
    tower_faster_than_*: a tier was not asked, since it takes longer than the vision tower.
    """


Kind = Literal["system", "message", "image", "generation", "text"]


class Segment(_Part):
    """A piece of the prompt: the text of one turn up to the next image, or one image. Together they are the prompt."""

    index: int
    kind: Kind
    """generation: the opening of the answer that the template adds. text: a prompt without a template."""
    role: str | None = None
    turn: int | None = None
    """Which turn of the template, from 0; an image has the turn that it stands in."""
    start: int
    tokens: int
    reused_tokens: int
    miss: int | None = None
    """Index into Record.misses: what most of the rest is put down to. None where all was reused."""
    image: Image | None = None


class Miss(_Part):
    """A run of tokens that was not reused, and the one reason for it."""

    reason: Reason
    start: int
    tokens: int
    text: str
    """One sentence in English, with the positions and names that matter."""
    segment: int | None = None
    """The segment in which the cause lies: the first difference, or the position without state."""
    token: int | None = None
    """The position of the cause in that segment, in tokens from its start."""
    details: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """What the reason needs: see docs/explain.md."""


class Record(_Part):
    """One request. The sum of the segments' reused_tokens is reused_tokens, and that is the API's cached_tokens."""

    format: Literal[1] = 1
    id: str
    """The record's own, made by the server: no client can choose it. One of n answers has its number behind it."""
    request_id: str = ""
    """The request's id as the client sees it (`chatcmpl-...`); it may have chosen it. Offline, vLLM's counter."""
    time_s: float
    """Unix time at which the request arrived."""
    server: str = ""
    """Which API server took it: its host's name and process id."""
    engine: int = 0
    model: str = ""
    lora: str | None = None
    salt: str | None = None
    """Of the cache_salt, so that two can be told apart: 8 hex digits, keyed; None without one."""
    prompt_tokens: int
    reused_tokens: int
    external_tokens: int = 0
    """Of reused_tokens, those that a KV connector brought."""
    block_tokens: int
    """A hit ends at a multiple of this."""
    groups: tuple[Group, ...] = ()
    nearest: Nearest | None = None
    segments: tuple[Segment, ...] = ()
    misses: tuple[Miss, ...] = ()
    """In the order of the prompt; together they cover exactly the tokens that were not reused."""


class Totals(_Part):
    """Sums since the server started, over all its requests, also those whose records are gone."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    missed_tokens: dict[str, int] = Field(default_factory=dict)
    """By reason."""
    images: dict[str, int] = Field(default_factory=dict)
    """By where the features came from."""


def to_json(record: Record) -> dict[str, Any]:
    """The record's JSON form."""
    return record.model_dump(mode="json")


def from_json(data: Any) -> Record:
    """A record of its JSON form. Raises: pydantic.ValidationError, a ValueError that says what is wrong."""
    return Record.model_validate(data)
