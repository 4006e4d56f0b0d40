"""Who may join a run of several processes, and what a hang-up does to all of them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtune
from jaxtune.system import joining, loopback
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.log.metrics import read_metrics
from jaxtune.train.signals import EXIT_SAVED
from tests import patience
from tests.faults.command import ONE_DEVICE, make_folder

LISTENING = "0A"  # of the system's table of sockets


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def listens_at(process: int) -> list[tuple[str, int]]:
    """(address, port) of the sockets on which a process waits for connections."""
    own = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            own |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in own:
                address, port = local.split(":")
                words = bytes.fromhex(address)  # words of four bytes, each in the machine's order
                swapped = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.append((str(ipaddress.ip_address(swapped)), int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.mark.full
def test_launch_listens_to_its_own_host_alone_and_saves_at_a_hang_up(tmp_path):
    output = tmp_path / "run"
    environment = os.environ | {
        "PYTHONPATH": str(Path(jaxtune.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": ONE_DEVICE,
    }
    command = [sys.executable, "-m", "jaxtune", "launch", "--processes=2", str(make_folder(tmp_path))]
    command += [f"output={output}", "steps=200000", "optim.learning_rate=1e-5"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launch:
        os.set_blocking(launch.stdout.fileno(), False)
        try:

            def has_stepped() -> bool:
                launch.stdout.read()
                with contextlib.suppress(FileNotFoundError):
                    return sum("loss" in line for line in read_metrics(output / "metrics.jsonl")) >= 3
                return False

            patience.wait_until(has_stepped, lambda: launch.poll() is None)
            sockets = [socket for child in children(launch.pid) for socket in listens_at(child)]
            assert sockets and all(is_loopback(address) for address, _ in sockets), sockets
            launch.send_signal(signal.SIGHUP)
            launch.send_signal(signal.SIGHUP)
            launch.stdout.close()  # and the terminal is gone
            assert launch.wait(patience.SECONDS) == EXIT_SAVED
        finally:
            launch.terminate()
    assert saved_steps(output / "checkpoints") == [max(line["step"] for line in read_metrics(output / "metrics.jsonl"))]


@pytest.mark.parametrize(
    ("coordinator", "own_host_alone"),
    [
        ("127.0.0.1:80", True),
        ("127.5.0.1:80", True),
        ("localhost:80", True),
        ("[::1]:80", True),
        ("node1:80", False),
        ("10.0.0.1:80", False),
        ("[fe80::1]:80", False),
        ("localhost.example:80", False),
    ],
)
def test_where_the_first_process_listens(coordinator, own_host_alone):
    assert loopback.is_loopback(loopback.host_name(f"//{coordinator}")) == own_host_alone


@pytest.mark.parametrize(
    ("hosts", "given", "coordinator"),
    [("2", None, "127.0.0.1"), ("1(x2)", None, "node3"), ("2", "10.0.0.1:77", "10.0.0.1")],
)
def test_tasks_of_one_host_meet_on_its_loopback_address(hosts, given, coordinator, monkeypatch):
    """One host is known by how many tasks run on it; an address that somebody gives is taken as it is."""
    for name, value in dict(
        SLURM_JOB_ID="7",
        SLURM_STEP_NODELIST="node3",
        SLURM_NTASKS="2",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_TASKS_PER_NODE=hosts,
        SLURM_NODEID="0",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
    ).items():
        monkeypatch.setenv(name, value)
    assert joining._place(given, None, None).coordinator.rpartition(":")[0] == coordinator
