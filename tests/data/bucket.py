"""An S3 bucket on the loopback: what pyarrow's client asks of one to list it and to read objects."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

NAME = "pictures-bucket"
KEY_ID = "some-key-id"


class Bucket:
    """Serves ``objects``, a name and its bytes each, to who signs with ``KEY_ID``, until it is closed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.readers: set[int] = set()
        """Ports of the connections that read objects."""
        handler = type("Handler", (_Handler,), {"bucket": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": "some-secret",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = unquote(url.path).removeprefix(f"/{NAME}").lstrip("/")
        if f"Credential={KEY_ID}/" not in self.headers.get("Authorization", ""):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif "list-type" in query:
            self._answer(200, self._listing(query))
        elif name in self.bucket.objects:
            self._object(self.bucket.objects[name])
        elif not name:
            self._answer(200, b"")
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET

    def _object(self, data: bytes) -> None:
        if self.command == "GET":
            self.bucket.readers.add(self.client_address[1])
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, data)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data)), len(data) - 1) + 1
        told = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        self._answer(206, data[start:end], told)

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names, folders = [], set()
        for name in sorted(self.bucket.objects):
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                names.append(name)
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<Size>{len(self.bucket.objects[name])}</Size></Contents>"
            for name in names
        )
        entries += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{NAME}</Name><Prefix>{escape(prefix)}'
            f"</Prefix><KeyCount>{len(names) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
            f"{entries}</ListBucketResult>"
        ).encode()

    def _answer(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""
