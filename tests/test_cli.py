"""The `ostinato` command, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest

import ostinato
from server_fixtures import DEADLINE, MODEL


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ostinato.cli", *arguments]


def run(*arguments: str, stdin: bytes | str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; it must not show a traceback, whatever happens."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        command(*arguments), input=data, capture_output=True, timeout=4 * DEADLINE, check=False
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"ostinato {ostinato.__version__}"
    shown = run("--help")
    assert shown.returncode == 0
    for name in ("serve", "generate", "pull", "models"):
        assert name in shown.stdout
        assert "Example" in run(name, "--help").stdout


def test_help_needs_no_torch() -> None:
    code = "import sys, ostinato.cli; print([m for m in ('torch', 'fastapi', 'uvicorn') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_models() -> None:
    entries = json.loads(run("models", "--json").stdout)
    assert MODEL in [entry["name"] for entry in entries]
    assert all(entry["licence"] and entry["size"] > 0 for entry in entries)
    assert MODEL in run("models").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["generate", "no-such-model", "Hi"], 1, "no-such-model"),
        (["pull", "no-such-model"], 1, "no-such-model"),
        (["generate", MODEL], 2, "PROMPT"),
        (["generate", MODEL, "Hi", "--temperature", "9"], 2, "temperature"),
        (["generate", MODEL, "Hi", "--dtype", "int3"], 2, "int3"),
        (["serve", MODEL, "--port", "99999"], 2, "port"),
        (["serve", MODEL, "--host", "999.1.1.1"], 1, "999.1.1.1"),
        (["dance"], 2, "dance"),
    ],
)
def test_errors_are_clear(arguments: list[str], status: int, says: str) -> None:
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert says.lower() in done.stderr.lower()
    assert done.stdout == ""


def test_prompt_that_is_not_utf8() -> None:
    done = run("generate", MODEL, "-", stdin=b"caf\xe9")
    assert done.returncode == 2
    assert "UTF-8" in done.stderr


def test_generate() -> None:
    options = ("--max-tokens", "8", "--kv-tokens", "2048")
    streamed = run("generate", MODEL, "-", *options, stdin="Say hello.")
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout.strip()
    assert "TTFT" in streamed.stderr
    as_json = run("generate", MODEL, "Say hello.", "--json", *options)
    reply = json.loads(as_json.stdout)
    assert reply["text"] == streamed.stdout.removesuffix("\n")
    assert reply["usage"]["completion_tokens"] <= 8
    raw = json.loads(run("generate", MODEL, "Say hello.", "--json", "--raw", *options).stdout)
    assert raw["usage"]["prompt_tokens"] < reply["usage"]["prompt_tokens"]


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", MODEL, "--port", str(port))
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "in use" in done.stderr


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_serve_until_told_to_stop(stop: signal.Signals) -> None:
    environment = os.environ | {"OSTINATO_API_KEY": "a-secret"}
    arguments = command("serve", MODEL, "--port", "0", "--kv-tokens", "2048")
    output = ""
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr
        try:
            while not (serving := re.search(r"at (http://\S+) ", output)):
                line = process.stderr.readline()
                assert line, output
                output += line
            url = serving[1]
            client: Any = openai.OpenAI(base_url=url, api_key="a-secret", max_retries=5, timeout=DEADLINE)
            reply = client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)
            assert reply.usage.completion_tokens <= 2
            assert httpx.get(f"{url}/models").status_code == 401
            process.send_signal(stop)
            output += process.stderr.read()
            assert process.wait(DEADLINE) == 0, output
        finally:
            process.kill()
    assert "Stopped." in output
    assert "Traceback" not in output
    assert "a-secret" not in output
