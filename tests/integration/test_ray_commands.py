"""The commands as people run them: up, chat, status, down, demo, and one process at a time."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from deploy.signals import ONE_SIGNAL_S

TWOSTROKE = [sys.executable, "-m", "deploy.cli"]
SMALL = ["--kv-memory", "8MiB", "--threads", "1", "--port", "0"]


@pytest.fixture
def environment(tmp_path):
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TWOSTROKE_")}
    return kept | {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def run(environment):
    def run(*arguments, timeout=120, stdin=""):
        return subprocess.run(
            [*TWOSTROKE, *arguments], env=environment, input=stdin, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def start(environment):
    """Start a command, kill what is left of it afterwards."""
    running = []

    def start(*arguments):
        process = subprocess.Popen(
            [*TWOSTROKE, *arguments], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield start
    for process in running:
        for child in family(process.pid):
            child.kill()
        process.communicate()


def family(pid):
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def lives(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_up_detached_chat_status_down(run, tiny_model, environment):
    up = run("up", tiny_model, "--backend", "processes", "--detach", "--decode", "2", *SMALL)
    assert up.returncode == 0, up.stderr
    (record,) = [
        json.loads(path.read_text())
        for path in (tmp_state(environment) / "clusters").glob("*.json")
    ]
    started = family(record["pid"])
    try:
        assert len(started) == 4, "up, one prefill and two decode workers"

        chat = run("chat", "hello", "--max-tokens", "4", "--temperature", "0")
        assert (chat.returncode, chat.stderr) == (0, "")
        again = run("chat", "-v", "hello", "--max-tokens", "4", "--temperature", "0")
        assert again.stdout == chat.stdout
        assert "no timeline" in again.stderr, "debug was not asked for"

        assert "Ctrl-C" not in up.stderr, "there is no terminal that could send it"
        status = run("status", "--json")
        workers = json.loads(status.stdout)["workers"]
        assert sorted(worker["name"] for worker in workers) == ["decode-0", "decode-1", "prefill-0"]
        table = run("status").stdout
        assert "prefill-0" in table
        assert "blocks" in table
    finally:
        down = run("down")
    assert down.stdout == f"stopped {record['model']} at {record['url']}\n"
    assert [process for process in started if lives(process)] == []
    assert run("down").stdout == "nothing is running\n"


def tmp_state(environment):
    return Path(environment["XDG_STATE_HOME"]) / "twostroke"


def test_conversation_remembers_and_forgets(run, start, tiny_model):
    up = start("up", tiny_model, "--backend", "local", "--debug", *SMALL)
    wait_for(up.stderr, "ready:")
    talk = run(
        "chat", "-v", "--max-tokens", "4", stdin="one\ntwo\n/new\n/help\n/frob it\none\nquit\nno"
    )
    assert talk.returncode == 0
    assert "/exit" in talk.stderr
    assert "unknown command /frob; /help lists them" in talk.stderr
    counts = [
        int(line.split("ms")[1].split()[0])
        for line in talk.stderr.splitlines()
        if line.strip().startswith("tokenize")
    ]
    first, second, third = counts
    assert second > first, "the second question comes after the first turn"
    assert third == first, "/new starts over"
    assert "transfer" in talk.stderr
    up.send_signal(signal.SIGINT)
    assert up.wait(20) == 0


def wait_for(stream, text):
    """Read lines until one holds `text`."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came: {lines}")


def wait_until_healthy(url):
    deadline = time.monotonic() + 20
    while httpx.get(f"{url}/health", trust_env=False).status_code != 200:
        assert time.monotonic() < deadline, "the router found no workers"
        time.sleep(0.05)


def test_demo_on_ray_answers_shows_its_timeline_and_stops(run):
    """On the bundled model: this is what `make demo` runs."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    demo = run("demo", "--port", "0")
    assert demo.returncode == 0, demo.stderr
    assert "Paris" in demo.stdout
    for word in ("tokenize", "prefill", "transfer", "decode", "blocks", "twostroke up"):
        assert word in demo.stderr, word
    assert "loading weights" in demo.stderr, "progress is visible"
    assert "Everything is stopped." in demo.stderr
    assert "curl" not in demo.stderr, "nothing is left that it could reach"
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("backend", "number", "stage"),
    [
        ("ray", signal.SIGINT, "ready:"),
        ("ray", signal.SIGTERM, "ready:"),
        ("ray", signal.SIGTERM, "starting Ray"),
        ("processes", signal.SIGTERM, "ready:"),
    ],
)
def test_up_ends_cleanly_on_a_signal(start, tiny_model, backend, number, stage):
    up = start("up", tiny_model, "--backend", backend, *SMALL)
    wait_for(up.stderr, stage)
    started = family(up.pid)
    up.send_signal(number)
    out, err = up.communicate(timeout=30)
    assert (up.returncode, out) == (0, "")
    assert "received" not in err, "Ray's own handler dumps addresses"
    assert [process for process in started if lives(process)] == []


def test_a_signal_to_the_group_is_a_clean_stop(environment, tiny_model, tmp_path):
    """What `timeout` does: the process, then its group, Ray's daemons among them. What Ray writes
    lies in a folder that is closed to others, and gone afterwards."""
    with subprocess.Popen(
        [*TWOSTROKE, "up", tiny_model, *SMALL], env=environment | {"TMPDIR": "/tmp"},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as up:  # fmt: skip
        wait_for(up.stderr, "ready:")
        (folder,) = ray_folders(up.pid)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        up.terminate()
        os.killpg(up.pid, signal.SIGTERM)
        _, err = up.communicate(timeout=25)
    assert up.returncode == 0, err
    assert "received" not in err
    assert not folder.exists()


def ray_folders(pid):
    """Of the Ray session below process `pid`."""
    words = [word for process in family(pid) for word in process.cmdline()]
    return {Path(match[0]) for word in words if (match := re.search(r"/tmp/twostroke-\w+", word))}


def test_second_signal_is_quick(start, tiny_model):
    up = start("up", tiny_model, *SMALL)
    wait_for(up.stderr, "ready:")
    started = family(up.pid)
    (folder,) = ray_folders(up.pid)
    up.send_signal(signal.SIGINT)
    wait_for(up.stderr, "once more")
    time.sleep(ONE_SIGNAL_S)
    up.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert up.wait(10) in (0, 130)
    assert time.monotonic() - began < 3
    psutil.wait_procs(started, timeout=2)
    assert [process for process in started if lives(process)] == []
    shutil.rmtree(folder, ignore_errors=True)  # as documented, a forced stop leaves it


def test_processes_backend_ends_with_its_parent(start, tiny_model):
    up = start("up", tiny_model, "--backend", "processes", *SMALL)
    wait_for(up.stderr, "ready:")
    started = family(up.pid)
    assert len(started) == 3
    up.kill()
    psutil.wait_procs(started, timeout=5)
    assert [process for process in started if lives(process)] == []


def test_a_cluster_by_hand(run, start, tiny_model):
    """What Kubernetes does: one process each, addresses on the command line."""
    pod = ["--host", "0.0.0.0", "--advertise-host", "127.0.0.1", "--verify-checksum", *SMALL]
    workers = {role: start(role, tiny_model, *pod, "--name", f"my-{role}") for role in ROLES}
    ready = {role: json.loads(wait_for(worker.stdout, "ready")) for role, worker in workers.items()}
    assert {facts["name"] for facts in ready.values()} == {"my-prefill", "my-decode"}
    hosts = {facts["address"].rpartition(":")[0] for facts in ready.values()}
    assert hosts == {"127.0.0.1"}, "what they advertise, not where they listen"
    router = start(
        "router", tiny_model, "--port", "0",
        *(word for role in ROLES for word in (f"--{role}", ready[role]["address"])),
    )  # fmt: skip
    url = json.loads(wait_for(router.stdout, "ready"))["url"]
    wait_until_healthy(url)
    chat = run("chat", "hello", "--url", url, "--max-tokens", "4")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()
    for process in (router, *workers.values()):
        process.terminate()
        assert process.wait(20) == 0


def test_processes_by_hand_say_what_happens(start, tiny_model):
    prefill = start("prefill", tiny_model, *SMALL)
    loading = wait_for(prefill.stderr, "loading")
    facts = json.loads(wait_for(prefill.stdout, "ready"))
    name = facts["name"]
    assert name != "prefill-0", "another one started by hand must not be called the same"
    assert loading.startswith(f"{name}: ")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"127.0.0.1:{listener.getsockname()[1]}"
    router = start(
        "router", tiny_model, "--port", "0", "--prefill", facts["address"], "--decode", nobody
    )
    line = wait_for(router.stderr, "prefill worker")
    assert line.rstrip().endswith("is reachable")
    line = wait_for(router.stderr, nobody)
    assert line.rstrip().endswith("cannot be reached; still trying")
    decode = start("decode", tiny_model, *SMALL[:-1], nobody.rpartition(":")[2])
    assert json.loads(wait_for(decode.stdout, "ready"))["name"] == f"decode-{nobody}"
    assert wait_for(router.stderr, nobody).rstrip().endswith("is reachable")
    prefill.kill()
    wait_for(router.stderr, f"{facts['address']} cannot be reached")


def test_a_device_that_is_not_there_is_said_at_once(run, tiny_model):
    if torch.cuda.is_available():
        pytest.skip("here it is there")
    up = run("up", tiny_model, "--backend", "processes", "--device", "cuda", *SMALL)
    assert up.returncode == 2, up.stderr
    assert "device cuda cannot be used here" in up.stderr
    assert up.stderr.count("died") == 1, "one attempt is enough"
    assert "loading" not in up.stderr


ROLES = ("prefill", "decode")
