"""The command line: help that teaches, mistakes in one line with exit code 2."""

import socket
from dataclasses import replace

import psutil
import pytest

from deploy.api_client import ApiClient
from deploy.cli import HANDLERS, main
from deploy.config_file import SETTINGS, flag_name
from deploy.state_file import Records, own_record

COMMANDS = list(HANDLERS)


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def run(capsys):
    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_help_shows_the_way(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS[:5]:
        assert f"twostroke {command}" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"usage: twostroke {command}" in out


def test_every_setting_is_an_option_where_it_means_something(run):
    _, up, _ = run("up", "--help")
    assert [key for key in SETTINGS if flag_name(key) not in up] == ["parallel", "advertise_host"]
    _, worker, _ = run("decode", "--help")
    assert "--advertise-host HOST" in worker
    assert "--verify-checksum " in worker


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frob"], "invalid choice: 'frob'"),
        (["up", "--prot", "1"], "up: unrecognized argument: --prot (did you mean --port?)"),
        (["up", "--por", "1"], "unrecognized argument: --por"),
        (["up", "a", "b"], "twostroke up: unrecognized argument: b"),
        (["up", "a", "--model", "b"], "the model is named twice"),
        (["up", "--port", "x"], "--port: 'x' is not a whole number"),
        (["up", "--decode", "0"], "--decode: must be at least 1"),
        (["up", "--config", "/nowhere.yaml"], "/nowhere.yaml: no such file"),
        (["up", "nomodel"], "no model 'nomodel'"),
        (["up", "--detach", "nomodel"], "no model 'nomodel'"),
        (["up", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        (["up", "--host", "192.0.2.1"], "choose another with --host"),
        (["up", "--host", "2001:db8::1"], "cannot listen on [2001:db8::1]:8000"),
        (["up", "--device", "gpu"], "--device: 'gpu' is not cpu, cuda or cuda:N"),
        (["up", "--advertise-host", "10.0.0.1"], "unrecognized argument: --advertise-host"),
        (["prefill", "--host", "0.0.0.0"], "0.0.0.0 is no address that others can dial"),
        (["decode", "--host", "::"], "with --advertise-host"),
        (["demo", "--stay", "--once"], "not allowed with argument"),
        (["router"], "no decode worker: name one with --decode HOST:PORT"),
        (["router", "--colocated", "h:1", "--decode", "h:2"], "colocated and decode do not mix"),
        (["up", "--colocated", "--decode", "2"], "colocated and decode do not mix"),
        (["router", "--decode", "x"], "--decode: 'x' is not host:port"),
        (["decode", "nomodel"], "no model 'nomodel'"),
        (["prefill", "--max-num-seqs", "-1"], "--max-num-seqs: must be at least 1"),
        (["up", "--prefill", "-1"], "--prefill: must be at least 1"),
        (["up", "--threads", "-1"], "--threads: must not be negative"),
        (["up", "--backend", "moon"], "--backend: 'moon' is not one of ray, processes, local"),
        (["up", "--backend", "local", "--no-ray"], "not allowed with argument"),
        (["chat", " "], "the question is empty"),
        (["chat", "hi", "--url", "127.0.0.1:9"], "no router answers at http://127.0.0.1:9"),
        (["status", "--url", "http://127.0.0.1:9"], "or name another router with --url"),
        (["chat", "hi", "--url", "http://127.0.0.1:9"], "no router answers at http://127.0.0.1:9"),
        (["status", "--url", "http://127.0.0.1:9"], "start a cluster with `twostroke up`"),
        (["down", "--port", "1"], "no cluster started by `twostroke up` listens on port 1"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert err.count("\n") == 1


def test_a_taken_port_is_found_before_anything_starts(run, unused_listener):
    code, _, err = run("up", "--port", str(unused_listener))
    assert code == 2
    assert "Address already in use" in err
    assert "--port" in err


@pytest.fixture
def unused_listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_variables_are_read_too(run, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_BLOCKSIZE", "8")
    code, _, err = run("up")
    assert code == 2
    assert "TWOSTROKE_BLOCKSIZE: there is no such setting (did you mean block_size?)" in err


def test_the_backend_may_stand_in_the_environment(run, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_BACKEND", "moon")
    code, _, err = run("up")
    assert (code, "TWOSTROKE_BACKEND: 'moon' is not one of" in err) == (2, True)


@pytest.fixture
def two_clusters(tmp_path):
    """Records that name living processes: this one and its parent."""
    records = Records(tmp_path / "twostroke" / "clusters")
    for process, port in ((psutil.Process(), 9), (psutil.Process().parent(), 10)):
        mine = own_record(url=f"http://127.0.0.1:{port}", model="m")
        records.write(replace(mine, pid=process.pid, started=process.create_time()))


def test_down_does_not_guess_among_several(run, two_clusters):
    code, out, err = run("down")
    assert (code, out, err.count("\n")) == (2, "", 1)
    for words in ("2 clusters", "http://127.0.0.1:9", "http://127.0.0.1:10", "--port", "--all"):
        assert words in err


@pytest.mark.parametrize("arguments", [["chat", "hi"], ["status"]])
def test_clients_say_which_of_several_they_take(run, two_clusters, arguments):
    _, _, err = run(*arguments)
    assert "2 clusters run here" in err
    assert "taking http://127.0.0.1:9 (--url: another)" in err


def test_debug_shows_the_traceback(monkeypatch):
    with pytest.raises(Exception, match="no model 'nomodel'"):
        main(["up", "--debug", "nomodel"])


def test_down_with_nothing_running(run):
    assert run("down") == (0, "nothing is running\n", "")


@pytest.mark.parametrize("arguments", [["chat", "hi"], ["status"]])
def test_clients_are_closed_whatever_happens(run, monkeypatch, arguments):
    closed = []
    close = ApiClient.close

    def note(client):
        closed.append(client.url)
        close(client)

    monkeypatch.setattr(ApiClient, "close", note)
    code, _, _ = run(*arguments, "--url", "http://127.0.0.1:9")
    assert code == 2
    assert closed == ["http://127.0.0.1:9"]
