"""The page while runs are going: served to this machine alone, refreshed as rows come."""

import threading
import time
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from base.cli import UserError
from tools.report.columns import Columns
from tools.report.page import as_json, page, page_data
from tools.report.runs import load_runs

HOST = "127.0.0.1"
REST = 5.0  # times what a refresh took pass before the next, so that training has the cores


class Live:
    """The runs in these folders, read on as they grow."""

    def __init__(self, paths: Sequence[str]):
        self.paths, self.lock, self.busy_until = paths, threading.Lock(), 0.0
        self.known: dict[Path, Columns] = {}
        self.seen, self.version = None, 0  # in milliseconds, so that a page outlives a restart of its server
        self.look()

    def look(self) -> None:
        self.runs = load_runs(self.paths, skip=lambda text: None, known=self.known)
        seen = [(run.path, run.columns.count, run.facts, run.state_in_words) for run in self.runs]
        if seen != self.seen:
            self.seen, self.version = seen, time.time_ns() // 10**6

    def data(self, after: int) -> str | None:
        """What page.js draws, where it is newer than version `after`, else None."""
        with self.lock:
            begin = time.monotonic()
            if begin >= self.busy_until:
                try:
                    self.look()
                except UserError:
                    return None  # as while a resumed run cuts its file: the next look will see it whole
            if self.version <= after:
                return None
            text = as_json(page_data(self.runs) | {"watch": True, "version": self.version})
            self.busy_until = time.monotonic() + REST * (time.monotonic() - begin)
            return text

    def page(self) -> str:
        with self.lock:
            return page(self.runs, {"watch": True, "version": self.version})


def handler(live: Live) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = urlsplit(self.path)
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                return self.send_error(403)  # another site's name that leads here
            if place.path == "/":
                return self.answer(live.page(), "text/html")
            if place.path != "/data":
                return self.send_error(404)
            after = parse_qs(place.query).get("after", ["0"])[0]
            text = live.data(int(after) if after.isdecimal() else 0)
            return self.answer(text, "application/json")

        def answer(self, text: str | None, kind: str) -> None:
            body = (text or "").encode()
            self.send_response(200 if text is not None else 204)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    return Handler


def server(paths: Sequence[str], port: int) -> ThreadingHTTPServer:
    """A server of the page on this machine's own address. Raises UserError where the port is taken."""
    live = Live(paths)
    try:
        return ThreadingHTTPServer((HOST, port), handler(live))
    except OSError as e:
        raise UserError(f"--port {port} cannot be used: {e.strerror}; 0 takes a free one") from None


def serve(paths: Sequence[str], port: int, show: bool) -> None:
    """Until Ctrl-C."""
    with server(paths, port) as running:
        url = f"http://{HOST}:{running.server_port}/"
        print(f"{url}: open it in a browser; it follows the runs until Ctrl-C", flush=True)
        if show:
            webbrowser.open(url)
        running.serve_forever()
