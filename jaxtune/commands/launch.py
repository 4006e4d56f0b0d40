"""The command `jaxtune launch`: `jaxtune train` in N processes on this machine, with one GPU each or on the CPUs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.system import invocation
from jaxtune.system.terminal import say
from jaxtune.train.signals import StopSignal, handled

_GRACE_SECONDS = 20.0  # after one process has failed, the others have this long to report and end


# arguments: the words after `jaxtune launch`: exactly one of --gpus N (N processes with one GPU each) and --processes N
# (N processes that share the CPUs; where JAX has GPUs, nothing keeps them from these), and then those of `jaxtune
# train`, which each process gets. ValueError: N is below 1, or with --gpus CUDA_VISIBLE_DEVICES names fewer than N
# GPUs; whether the machine has them is not checked.
def run(arguments: Sequence[str]) -> int:
    """Run `jaxtune train` in several processes on this machine, one per GPU.

    A signal is passed on to all of them. When one fails, the others are ended, and the exit code is that of the first
    failure. A single process can also use all GPUs of a machine; this command is for setups that need one process per
    GPU.
    """
    parser = common.parser("launch", run.__doc__)
    counts = parser.add_mutually_exclusive_group(required=True)
    counts.add_argument("--gpus", type=int, metavar="N", help="start N processes, each with one GPU of this machine")
    counts.add_argument("--processes", type=int, metavar="N", help="start N processes that share the machine's CPUs")
    parser.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="a recipe and overrides, as for jaxtune train")
    options, unparsed = parser.parse_known_args(arguments)
    name = "--gpus" if options.gpus is not None else "--processes"
    count = options.gpus if options.gpus is not None else options.processes
    if count < 1:
        raise ValueError(f"{name} = {count}: must be 1 or more")
    gpus = _gpus(count) if options.gpus is not None else None
    return _Processes([*options.arguments, *unparsed], count, gpus).run()


def _gpus(count: int) -> list[str]:
    """The first `count` GPUs of CUDA_VISIBLE_DEVICES, or without it 0, 1, ...; ValueError if it names fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count)]
    names = [name for name in visible.split(",") if name]
    if len(names) < count:
        raise ValueError(f"--gpus = {count}: CUDA_VISIBLE_DEVICES = {visible!r} names {len(names)}")
    return names[:count]


class _Processes:
    """The processes of one run."""

    def __init__(self, arguments: Sequence[str], count: int, gpus: Sequence[str] | None):
        self._signals: list[int] = []
        # The port is bound and never listened on, so that the first process can bind it too and no other program gets
        # it.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._port.getsockname()[1]}"
        self._commands = [
            [
                sys.executable,
                "-m",
                "jaxtune",
                "train",
                *arguments,
                f"--coordinator={address}",
                f"--processes={count}",
                f"--process={index}",
            ]
            for index in range(count)
        ]
        common = os.environ | {invocation.VARIABLE: invocation.prefix_of(sys.orig_argv)}
        self._environments = [
            common if gpus is None else common | {"CUDA_VISIBLE_DEVICES": gpus[index]} for index in range(count)
        ]

    def run(self) -> int:
        """Starts the processes, waits for all, and returns the first failure's exit code, or 0. None outlives it."""
        # Under nohup SIGHUP stays ignored; child processes inherit that.
        old = {number: signal.signal(number, self._note) for number in handled(StopSignal.signals)}
        running: dict[int, subprocess.Popen] = {}
        try:
            for index, command in enumerate(self._commands):
                # Each in its own group, so that Ctrl-C reaches it once, through this process.
                running[index] = subprocess.Popen(command, env=self._environments[index], process_group=0)
            return self._wait(running)
        finally:
            for process in running.values():
                process.kill()  # after an error here, so that no process outlives the command
                process.wait()
            for number, handler in old.items():
                signal.signal(number, handler)
            self._port.close()

    def _note(self, number: int, frame: object) -> None:
        """The signal handler."""
        self._signals.append(number)

    def _wait(self, running: dict[int, subprocess.Popen]) -> int:
        """Waits until all have ended, and passes signals on; after a failure the others have 20 seconds."""
        code, deadline = 0, None
        while running:
            while self._signals:
                number = self._signals.pop(0)
                for process in running.values():
                    process.send_signal(number)
            for index, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[index]
                if process.returncode and not code:
                    code = _exit_code(process.returncode)
                    if running:
                        say(f"jaxtune launch: process {index} {_how(process.returncode)}", file=sys.stderr)
                        deadline = time.monotonic() + (_GRACE_SECONDS if process.returncode > 0 else 0)
            if deadline is not None and time.monotonic() > deadline:
                for process in running.values():
                    process.kill()
            time.sleep(0.05)
        return code


def _exit_code(code: int) -> int:
    """A Popen.returncode as a shell reports it: 128 plus the signal's number."""
    return 128 - code if code < 0 else code


def _how(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}; the others follow"
    return f"was ended by {signal.Signals(-code).name}; the others are ended too. The same command continues the run"
