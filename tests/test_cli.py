"""The `ostinato` command, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import ostinato
from ostinato.lab.traces import read_recording
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
    for name in ("serve", "generate", "pull", "models", "schema"):
        assert name in shown.stdout
    for name in ("serve", "generate", "pull", "models", "schema show", "schema check"):
        assert "Example" in run(*name.split(), "--help").stdout


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
        (["serve", MODEL, "--schema", "no-such.pml"], 2, "no-such.pml"),
        (["serve", MODEL, "--policy", "random"], 2, "lru"),
        (["serve", MODEL, "--record", "no-such-folder/trace"], 1, "no-such-folder/trace"),
        (["schema", "check", "no-such.pml"], 2, "no-such.pml"),
        (["schema", "show", "no-such.pml", "--model", MODEL], 2, "no-such.pml"),
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


SCHEMA = """<schema name="travel">
  You plan trips.
  <module name="city">
    The city is <parameter name="name" length="8"/>.
    <union scaffold="rome">
      <module name="rome" src="rome.txt"/>
      <module name="paris" cache="false">Paris has bridges.</module>
    </union>
  </module>
</schema>
"""


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    (tmp_path / "rome.txt").write_text("Rome has [many] fountains.")
    path = tmp_path / "travel.pml"
    path.write_text(SCHEMA)
    return path


def test_schema_check(schema: Path) -> None:
    done = run("schema", "check", str(schema))
    assert done.returncode == 0
    assert "3 modules" in done.stdout
    schema.write_text(SCHEMA.replace("rome.txt", "../../etc/passwd"))
    done = run("schema", "check", str(schema))
    assert done.returncode == 2
    assert "travel.pml, line 6, column 7" in done.stderr
    schema.write_text(SCHEMA.replace("</union>", ""))
    done = run("schema", "check", str(schema))
    assert done.returncode == 2
    assert "travel.pml, line 9, column 3" in done.stderr


def test_schema_show(schema: Path) -> None:
    shown = run("schema", "show", str(schema), "--model", MODEL)
    assert shown.returncode == 0, shown.stderr
    for part in ("schema travel", "module city", "parameter name", "Rome has [many]", "not cached", "KiB"):
        assert part in shown.stdout
    report = json.loads(run("schema", "show", str(schema), "--model", MODEL, "--json").stdout)
    assert (report["name"], report["modules"]) == ("travel", 3)
    assert report["positions"] == report["tree"]["end"]
    wide = json.loads(
        run("schema", "show", str(schema), "--model", MODEL, "--json", "--dtype", "float32").stdout
    )
    assert wide["kv_bytes_per_token"] == 2 * report["kv_bytes_per_token"] > 0


def test_serve_with_a_schema(schema: Path) -> None:
    options = ("--port", "0", "--kv-tokens", "2048", "--schema", str(schema), "--encode")
    with subprocess.Popen(command("serve", MODEL, *options), stderr=subprocess.PIPE, text=True) as process:
        try:
            url = url_of(process)
            tree = httpx.get(f"{url}/schemas/travel", timeout=DEADLINE).json()["tree"]
            assert 0 < tree["cached_tokens"] < tree["tokens"]  # but for the module that is not to be kept
        finally:
            process.kill()


def test_serve_with_a_policy_and_a_recording(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    options = ("--port", "0", "--kv-tokens", "2048", "--policy", "tlru", "--record", str(file))
    with subprocess.Popen(command("serve", MODEL, *options), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            url = url_of(process)
            client: Any = openai.OpenAI(base_url=url, api_key="-", max_retries=5, timeout=DEADLINE)
            for _ in range(2):
                client.completions.create(
                    model=MODEL, prompt="Nobody knows " * 20, max_tokens=2, extra_body={"user": "Ann"}
                )
            metrics = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
            process.send_signal(signal.SIGINT)
            output = process.stderr.read()
            assert process.wait(DEADLINE) == 0, output
        finally:
            process.kill()
    assert 'policy="tlru"' in metrics
    first, second = read_recording(file).requests
    assert first.keys == second.keys
    assert [first.session, second.session] == ["1", "1"]
    assert not any("Ann" in text or "Nobody" in text for text in (file.read_text(), output, metrics))


def url_of(process: subprocess.Popen[str]) -> str:
    """Where a server says that it serves."""
    assert process.stderr
    output = ""
    while not (serving := re.search(r"at (http://\S+) ", output)):
        line = process.stderr.readline()
        assert line, output
        output += line
    return serving[1]


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", MODEL, "--port", str(port))
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "in use" in done.stderr


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_serve_until_told_to_stop(stop: signal.Signals, tmp_path: Path) -> None:
    environment = os.environ | {"OSTINATO_ACCESS": str(tmp_path / "access.db")}
    make = command("keys", "create", "--org", "acme", "--user", "ann")
    key = subprocess.run(make, capture_output=True, text=True, env=environment, check=True).stdout.strip()
    arguments = command("serve", MODEL, "--port", "0", "--kv-tokens", "2048")
    output = ""
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr
        try:
            url = url_of(process)
            client: Any = openai.OpenAI(base_url=url, api_key=key, max_retries=5, timeout=DEADLINE)
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
    assert key not in output
