"""As much of a wandb server as `wandb sync` (0.31) asks for, on this machine; it keeps what it is sent."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Delivered:
    """What arrived of one run."""

    url: str = ""
    run: dict[str, object] = field(default_factory=dict)  # name, displayName, project, tags, ...
    config: dict[str, object] = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)  # by file and number
    uploads: dict[str, bytes] = field(default_factory=dict)
    complete: bool = False
    requests: list[str] = field(default_factory=list)

    def history(self, key: str) -> dict[int, float]:
        """The values of ``key`` by step."""
        rows = map(json.loads, self.lines.get("wandb-history.jsonl", {}).values())
        return {row["_step"]: row[key] for row in rows if key in row}

    def graphql(self, query: str, variables: dict | None = None, **_) -> dict:
        operation = re.search(r"(?:mutation|query)\s+(\w+)|$", query)[1] or query
        self.requests.append(operation)
        if operation == "UpsertBucket":
            self.config |= {key: entry["value"] for key, entry in json.loads(variables["config"] or "{}").items()}
            self.run |= {key: value for key, value in variables.items() if value is not None and key != "config"}
            project = {"id": "p", "name": self.run["project"], "entity": {"id": "e", "name": "someone"}}
            bucket = {"id": "b", "name": self.run["name"], "displayName": self.run["displayName"], "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        return {"errors": [{"message": f"this server does not know {operation}"}]}

    def file_stream(self, files: dict[str, dict], complete: bool) -> None:
        for name, part in files.items():
            self.lines.setdefault(name, {}).update(enumerate(part["content"], part["offset"]))
        self.complete |= complete


@contextmanager
def wandb_server() -> Iterator[Delivered]:
    delivered = Delivered()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            reply = {}
            if self.path == "/graphql":
                reply = delivered.graphql(**json.loads(data))
            elif self.path.endswith("/file_stream"):
                body = json.loads(data)
                delivered.file_stream(body.get("files") or {}, body.get("complete", False))
            elif self.path.startswith("/upload/"):
                delivered.uploads[self.path.removeprefix("/upload/")] = data
            answer = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_PUT = do_POST

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        delivered.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield delivered
        finally:
            server.shutdown()
