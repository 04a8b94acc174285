"""The server of --watch: the page and its data, to this machine alone."""

import http.client
import json
import signal
import subprocess
import sys
import threading

import pytest
from report_runs import rows_of, write_rows, write_run

from base.cli import UserError
from tools.report import watch


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """asked(path): (status, body) of a server of the run `a`, and asked.folder, where it is."""
    monkeypatch.setattr(watch, "REST", 0.0)
    folder = write_run(tmp_path / "a", rows_of(3, 20)[:3])
    with watch.server([str(tmp_path)], 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()

        def ask(path: str, host: str | None = None) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(*running.server_address)
            connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{running.server_port}"})
            answer = connection.getresponse()
            return answer.status, answer.read()

        ask.folder, ask.address = folder, running.server_address
        yield ask
        running.shutdown()


def test_the_data_is_sent_when_there_is_more_of_it(asked):
    assert asked.address[0] == "127.0.0.1"
    status, page = asked("/")
    assert (status, b"Plotly" in page, b'"watch":true' in page) == (200, True, True)
    first = json.loads(asked("/data?after=0")[1])
    assert first["runs"][0]["lastStep"] == 10
    assert asked(f"/data?after={first['version']}") == (204, b"")
    write_rows(asked.folder, rows_of(3, 20))
    second = json.loads(asked(f"/data?after={first['version']}")[1])
    assert second["runs"][0]["lastStep"] == 20
    assert second["version"] > first["version"]


def test_a_file_that_cannot_be_read_at_this_moment_changes_nothing(asked):
    first = json.loads(asked("/data")[1])
    (asked.folder / "metrics.jsonl").write_text("{oh\n")
    assert asked(f"/data?after={first['version']}") == (204, b"")
    write_rows(asked.folder, rows_of(3, 20))
    assert json.loads(asked(f"/data?after={first['version']}")[1])["runs"][0]["lastStep"] == 20


def test_other_paths_and_other_names_of_this_machine_get_nothing(asked):
    assert asked("/../metrics.jsonl")[0] == 404
    assert asked("/", host="evil.example:80")[0] == 403
    assert asked("/data?after=x", host="localhost:1")[0] == 200


def test_a_port_that_is_taken(asked):
    with pytest.raises(UserError, match=f"--port {asked.address[1]} cannot be used: Address already in use"):
        watch.server([str(asked.folder)], asked.address[1])


def test_watching_ends_with_an_interrupt(tmp_path):
    command = [sys.executable, "-m", "tools.report", str(write_run(tmp_path / "a")), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
