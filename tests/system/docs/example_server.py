# SPDX-License-Identifier: Apache-2.0
"""A server of few lines that answers clients' examples as vLLM with the plugin does, and the place to run them in.

It answers in a thread of this process, at the paths that vLLM and the plugin serve. What it says is made up: an example
must find the fields that it reads.
"""

import contextlib
import io
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from tests.system.docs.command_checks import is_served
from tests.system.docs.test_docs import REPO

TOKENS = {"prompt_tokens": 160, "completion_tokens": 4, "total_tokens": 164}
USAGE = {**TOKENS, "prompt_tokens_details": {"cached_tokens": 128}}
RESPONSES_USAGE = {
    "input_tokens": 160,
    "input_tokens_details": {"cached_tokens": 128},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 164,
}
METRICS = "\n".join(
    [
        "# HELP mmcache:images_decoded_total images",
        "# TYPE mmcache:images_decoded_total counter",
        'mmcache:images_decoded_total{engine="0"} 1.0',
        'vllm:prefix_cache_hits_total{engine="0"} 128.0',
        "",
    ]
)
PRIVATE = re.compile(r"/mmcache/(records|totals|rooms)")
FILE = re.compile(r"^(?!\w+:)[\w./~-]+\.(png|jpe?g|webp|gif|bmp|mp4)$")
ADDRESS = re.compile(
    r"https?://(?:(?:localhost|127\.0\.0\.1)(?::\d+)?|[\w.{}-]+:(?:\d+|\{\w+\})|[\w.{}-]+(?=/(?:v1|mmcache|metrics)\b))"
    r"(?=[/\"'\s]|$)"
)


def chat(asked: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "A red square."}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": asked["model"], "choices": [choice],
            "usage": USAGE}  # fmt: skip


def chat_events(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": asked["model"]}
    for text in ("A red", " square."):
        yield {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": USAGE}


def completion(asked: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "text": "A red square.", "finish_reason": "stop", "logprobs": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": asked["model"], "choices": [choice],
            "usage": USAGE}  # fmt: skip


def response(asked: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "output_text", "text": "A red square.", "annotations": []}
    message = {"id": "msg-1", "type": "message", "role": "assistant", "status": "completed", "content": [content]}
    return {"id": "resp-1", "object": "response", "created_at": 1, "status": "completed", "model": asked["model"],
            "output": [message], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
            "usage": RESPONSES_USAGE}  # fmt: skip


def response_events(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "sequence_number": 0, "response": {**response(asked), "status": "in_progress"}}
    yield {"type": "response.output_text.delta", "sequence_number": 1, "item_id": "msg-1", "output_index": 0,
           "content_index": 0, "delta": "A red square.", "logprobs": []}  # fmt: skip
    yield {"type": "response.completed", "sequence_number": 2, "response": response(asked)}


def embeddings(asked: dict[str, Any]) -> dict[str, Any]:
    data = [{"index": 0, "object": "embedding", "embedding": [0.0, 1.0]}]
    return {"id": "embd-1", "object": "list", "created": 1, "model": asked["model"], "data": data, "usage": TOKENS}


def told(path: str) -> Any:
    """The answer to GET."""
    records = json.loads((REPO / "tests" / "support" / "example_records.json").read_text())
    return {
        "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm"}]},
        "/version": {"version": "0.32.0"},
        "/mmcache/records": {"records": records, "cursor": "1"},
        "/mmcache/totals": {"totals": {}, "meanings": {}, "rooms": {}},
        "/mmcache/rooms": {"rooms": {}},
    }.get(path, records[0] if path.startswith("/mmcache/records/") else {})


# What is asked with POST: the field that has to be there beside `model`, the answer, and the events of a stream.
ANSWERS: dict[str, tuple[str, Any, Any]] = {
    "/v1/chat/completions": ("messages", chat, chat_events),
    "/v1/completions": ("prompt", completion, None),
    "/v1/responses": ("input", response, response_events),
    "/v1/embeddings": ("", embeddings, None),
}


def named(event: dict[str, Any]) -> str:
    """The line that names an event's type, where it has one."""
    return f"event: {event['type']}\n" if "type" in event else ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        """Not on stderr."""

    def send(self, content: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status: int, why: str) -> None:
        self.send(json.dumps({"error": {"message": why, "type": "x", "code": status}}).encode(), status=status)

    def reach(self) -> str | None:
        """The path, where it is one that a server has; else the answer is sent."""
        path = urlsplit(self.path).path
        self.asked.append(path)
        if not is_served(path):
            return self.refuse(404, f"{path}: no such route")
        if PRIVATE.match(path) and not self.headers.get("Authorization", "").startswith("Bearer "):
            return self.refuse(401, "the admin key is missing or wrong")
        return path

    def do_GET(self) -> None:
        if (path := self.reach()) is not None:
            if path in ("/metrics", "/mmcache"):
                self.send(METRICS.encode(), "text/plain")
            else:
                self.send(json.dumps(told(path)).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if (path := self.reach()) is None:
            return
        if path not in ANSWERS:
            self.send(b"{}")
            return
        field, answer, events = ANSWERS[path]
        try:
            asked = json.loads(body)
            missing = [name for name in ("model", field) if name and not asked.get(name)]
        except ValueError as error:
            return self.refuse(400, str(error))
        if missing:
            self.refuse(400, f"a request without {missing}")
        elif asked.get("stream") and events is not None:
            lines = [named(one) + f"data: {json.dumps(one)}\n\n" for one in events(asked)]
            self.send(("".join(lines) + "data: [DONE]\n\n").encode(), "text/event-stream")
        else:
            self.send(json.dumps(answer(asked)).encode())


@contextlib.contextmanager
def running() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server of this process, and the paths that were asked."""
    asked: list[str] = []
    handler = type("Asked", (Handler,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def at_home(source: str, url: str, folder: Path) -> str:
    """The example with this server's address, and with files in `folder`, where pictures get made."""

    def moved(literal: re.Match[str]) -> str:
        name = literal[2]
        if not FILE.match(name):
            return literal[0]
        path = folder / name.lstrip("/~")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".mp4":
            path.write_bytes(b"a film")
        elif not path.exists():
            Image.new("RGB", (8, 8), "red").save(path)
        return f"{literal[1]}{path if name[0] in '/~' else name}{literal[1]}"

    return re.sub(r"([\"'])([^\"'\n]+)\1", moved, ADDRESS.sub(lambda _: url, source))


def run(source: str, namespace: dict[str, Any], url: str, folder: Path) -> str:
    """Run an example as a program in `folder`, against the server at `url`; returns what it printed.

    Raises: what the example raises. What it sets in the environment is undone, and no other host is reached.
    """
    resolve = socket.getaddrinfo

    def only_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert host in ("127.0.0.1", "localhost", b"127.0.0.1", b"localhost"), f"the example asks {host}"
        return resolve(host, *args, **kwargs)

    printed = io.StringIO()
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(socket, "getaddrinfo", only_here)
        for name, value in {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "-", "NO_PROXY": "*"}.items():
            patch.setenv(name, value)
        for name in ("MMCACHE_ADMIN_KEY", "VLLM_API_KEY"):
            patch.setenv(name, "a-key-of-this-example")
        for name in re.findall(r"\benviron\[[\"'](\w+)[\"']\]", source):
            patch.setenv(name, os.environ.get(name, "set-by-the-user"))
        patch.setattr("sys.argv", ["example.py"])
        namespace["__name__"] = "__main__"
        try:
            exec(compile(at_home(source, url, folder), "example.py", "exec"), namespace)
        finally:
            patch.undo()
            os.environ.clear()
            os.environ.update(before)
    return printed.getvalue()
