"""What `transformers-packed train` says of a model on the Hub before torch is imported, with local servers for the Hub."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest

from transformers_packed.cli import early


NAME = "qwen/typo"
# No import of torch ends before its error.
WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None
from transformers_packed.cli import main
sys.exit(main())
"""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def online(monkeypatch, tmp_path):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def server(status: int, seconds: float = 0):
    """The address of a server that answers every request with `status` after some seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            time.sleep(seconds)
            self.send_response(status)
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *args):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def refused(name: str = NAME, url: str | None = None) -> str:
    """The error of the check with a Hub at `url`, or nothing."""
    url = url or f"http://127.0.0.1:{closed_port()}"
    with mock.patch("huggingface_hub.constants.ENDPOINT", url):
        try:
            early.check_source("--model", name)
        except OSError as error:
            return str(error)
    return ""


def said(reason: str, fix: str, name: str = NAME) -> str:
    expected = "--model: expected a local directory or a model on the Hub, got"
    return f"{expected} {name!r}: no such local directory, and {reason}. {fix}"


def cache(folder: Path, name: str = NAME) -> None:
    """Put the configuration of a model into the cache in `folder`."""
    model, commit = folder / f"models--{name.replace('/', '--')}", "0" * 40
    for path, text in ((model / "refs" / "main", commit), (model / "snapshots" / commit / "config.json", "{}")):
        path.parent.mkdir(parents=True)
        path.write_text(text)


def test_no_connection():
    assert refused() == said(*early.UNREACHABLE)
    # By the standard, no server has this name.
    assert refused(url="https://hub.invalid") == said(*early.UNREACHABLE)


@pytest.mark.parametrize(("status", "seconds"), [(200, 0), (401, 0), (404, 0), (200, 5)])
def test_a_server_that_answers(status, seconds):
    """A download then tells what the answer means. The check does not wait for it."""
    with server(status, seconds) as url:
        assert refused(url=url) == refused(url=f"{url}/mirror") == ""


@pytest.mark.parametrize(("seconds", "reason"), [(0, said(*early.UNREACHABLE)), (0.3, "")])
def test_only_a_connection_that_fails_at_once(monkeypatch, seconds, reason):
    """An address without a route fails at once, but another one may only be slow."""
    monkeypatch.setattr(early, "_AT_ONCE", 0.2)

    def connect(address, timeout):
        assert timeout == 0.2
        time.sleep(seconds)
        raise OSError("Network is unreachable")

    monkeypatch.setattr(early.socket, "create_connection", connect)
    assert refused() == reason


def test_the_port_of_a_server(monkeypatch):
    found = []
    monkeypatch.setattr(
        early.socket, "create_connection", lambda address, timeout: found.append(address) or mock.Mock()
    )
    for url in ("https://huggingface.co", "http://mirror/hub", "https://mirror:8443"):
        assert refused(url=url) == ""
    assert found == [("huggingface.co", 443), ("mirror", 80), ("mirror", 8443)]


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_proxy(monkeypatch, variable):
    """Only the proxy may know the name of the server."""
    monkeypatch.setenv(variable, "http://proxy:3128")
    assert refused(url="http://hub.invalid") == ""


def test_a_model_in_the_cache(monkeypatch, tmp_path):
    cache(tmp_path)
    assert refused() == ""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused() == ""
    assert refused("qwen/other") == said(*early.OFFLINE, "qwen/other")


@pytest.mark.parametrize("name", ["a name", "a--b", "one/two/three", "/nothing", "./nothing", "~", "C:\\nothing"])
def test_names_that_the_hub_cannot_have(name):
    assert refused(name) == said(*early.INVALID, name)


def test_local_files(tmp_path):
    assert refused(str(tmp_path)) == ""


def train(tmp_path, url: str, *options: str) -> tuple[str, float]:
    """The error of the command with a Hub at `url` and no torch, and its seconds."""
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    variables = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    command = ["train", "--data", "texts.jsonl", "--output", "new", *options]
    start = time.monotonic()
    with mock.patch.dict("os.environ", variables):
        result = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *command], cwd=tmp_path, capture_output=True, text=True
        )
    assert result.returncode == 1, result.stderr
    return result.stderr, time.monotonic() - start


def test_the_command(tmp_path):
    nowhere = f"http://127.0.0.1:{closed_port()}"
    error, seconds = train(tmp_path, nowhere, "--model", NAME)
    assert error == f"transformers-packed train: {said(*early.UNREACHABLE)}\n"
    # An import of torch takes longer, and repeated requests a minute. This machine may be busy.
    assert seconds < 10
    error, _ = train(tmp_path, nowhere, "--model", str(tmp_path), "--teacher", NAME)
    assert error.startswith("transformers-packed train: --teacher: expected a local directory or a model on the Hub, ")
    with server(404) as url:
        assert "torch" in train(tmp_path, url, "--model", NAME)[0]
    cache(tmp_path / "hub")
    assert "torch" in train(tmp_path, nowhere, "--model", NAME)[0]
