"""deploy.state_file: `down` ends exactly what `up` started, and nobody else."""

import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from core.errors import ConfigError
from deploy.state_file import Records, choose, own_record, process_of, stop

# Ends on SIGTERM and takes its child along, as `up` does.
PARENT = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def end(*_):
    child.terminate(); child.wait(); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""
STUBBORN = PARENT.replace("def end(*_):", "def end(*_):\n    return")


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "clusters")


@pytest.fixture
def start():
    started = []

    def start(program):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        seen = psutil.Process(process.pid)
        record = replace(
            own_record(url="http://127.0.0.1:8000", model="m"),
            pid=process.pid,
            started=seen.create_time(),
        )
        return record, [seen, *seen.children()]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def gone(processes):
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def test_records_come_back(records):
    record = own_record(url="http://127.0.0.1:1", model="m")
    records.write(record)
    assert records.all() == [record]
    records.write(replace(record, ready=True))
    assert [found.ready for found in records.all()] == [True]
    records.remove(record.pid)
    assert records.all() == []


def test_records_of_dead_or_foreign_processes_vanish(records, tmp_path):
    record = own_record(url="http://127.0.0.1:1", model="m")
    records.write(replace(record, started=record.started - 1000))  # the pid belongs to another now
    (tmp_path / "clusters" / "5.json").write_text("not json")
    (tmp_path / "clusters" / "6.json").write_text('{"unknown": 1}')
    assert records.all() == []
    assert list((tmp_path / "clusters").iterdir()) == []


def test_stop_asks_first_and_waits_for_the_family(start):
    record, family = start(PARENT)
    assert len(family) == 2
    assert stop(record)
    assert gone(family)


def test_stop_insists(start):
    record, family = start(STUBBORN)
    assert not stop(record, timeout_s=0.2)
    assert gone(family)


def test_stop_never_touches_a_stranger(start):
    record, family = start(PARENT)
    stranger = replace(record, started=record.started - 1000)
    assert process_of(stranger) is None
    assert stop(stranger)
    assert not gone(family)


def test_choice_by_port():
    first = own_record(url="http://127.0.0.1:8000", model="m")
    second = replace(first, url="http://127.0.0.1:18000")
    assert choose([first, second], None, every=True) == [first, second]
    assert choose([second], None) == [second]
    with pytest.raises(ConfigError, match=r"2 clusters.*:8000.*:18000.*--all"):
        choose([first, second], None)
    assert choose([first, second], 8000) == [first]
    with pytest.raises(ConfigError, match="port 9"):
        choose([first, second], 9)
