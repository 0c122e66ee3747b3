"""A stand-in for a served judge on the loopback interface: OpenAI's chat completions, with replies given beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def judging(*replies: int | str) -> Iterator[tuple[str, list[str]]]:
    """Its URL until the block ends, and the questions that it got. A reply is a text or an HTTP status; the last one
    is given to all further questions.
    """
    questions: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            questions.append(asked["messages"][0]["content"])
            reply = replies[min(len(questions), len(replies)) - 1]
            self.send_response(reply if isinstance(reply, int) else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions", questions
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
