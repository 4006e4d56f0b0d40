"""The command `jaxtune launch`, which runs `jaxtune train` in N processes on this machine: with --gpus N one on each of
N GPUs, with --processes N, for a machine without GPUs, on its CPUs. It passes signals on to them, ends the others when
one fails, and returns the exit code of the first failure. `_Processes` does this work, and `_gpus` chooses the GPUs.

`run` takes the words of the command line after `launch`; its docstring is the text that --help prints.
"""

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
    some = parser.add_mutually_exclusive_group(required=True)
    some.add_argument("--gpus", type=int, metavar="N", help="start N processes, each with one GPU of this machine")
    some.add_argument("--processes", type=int, metavar="N", help="start N processes that share the machine's CPUs")
    parser.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="a recipe and overrides, as for jaxtune train")
    options, more = parser.parse_known_args(arguments)
    name = "--gpus" if options.gpus is not None else "--processes"
    count = options.gpus if options.gpus is not None else options.processes
    if count < 1:
        raise ValueError(f"{name} = {count}: must be 1 or more")
    gpus = _gpus(count) if options.gpus is not None else None
    return _Processes([*options.arguments, *more], count, gpus).run()


def _gpus(count: int) -> list[str]:
    """Chooses one GPU for each of `count` processes and returns the values of CUDA_VISIBLE_DEVICES for them, such as
    ["0", "1"]: the first ones in this process's own CUDA_VISIBLE_DEVICES, or if it is not set, the numbers from 0;
    whether the machine has these GPUs is not checked.

    Raises:
      ValueError: the variable names fewer GPUs than `count`.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count)]
    names = [name for name in visible.split(",") if name]
    if len(names) < count:
        raise ValueError(f"--gpus = {count}: CUDA_VISIBLE_DEVICES = {visible!r} names {len(names)}")
    return names[:count]


class _Processes:
    """The processes of one run on this machine. The method `run` starts them, waits for them, passes signals on to
    them, and ends the others after one has failed, that is, ended with another exit code than 0; it returns the exit
    code of the first failure, or 0. Each process is `jaxtune train` with the address of the first one, which listens on
    a free port of the loopback address.

    Args:
      arguments: the command line of `jaxtune train`, a recipe and overrides.
      count: number of processes.
      gpus: the value of CUDA_VISIBLE_DEVICES of each process; None: it is left as it is, for processes on CPUs.
    """

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
        """Starts the processes and waits until all have ended. SIGTERM, SIGINT and SIGHUP that come to this process are
        passed on to them (SIGHUP only if it is not ignored). After one has failed, the others are killed if they do not
        end within 20 seconds, or at once if a signal ended it. Returns the exit code of the one that failed first, as a
        shell reports it (128 + the signal's number), or 0."""
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
        """The signal handler: appends the signal's number to a list, from which `_wait` passes all on to the processes,
        in the order in which they came. number: the signal's; frame: what Python gives every handler, not used."""
        self._signals.append(number)

    def _wait(self, running: dict[int, subprocess.Popen]) -> int:
        """Waits until no process is running, and passes signals on to them. After a failure the others have 20 seconds
        to report and end (none if a signal ended the failed one), and are then killed. A line on stderr names the
        process that failed, if others still run.

        Args:
          running: {index: process}; a process is removed when it has ended.

        Returns:
          the exit code of the first process that failed, as a shell reports it, or 0.
        """
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
    """Converts the Popen.returncode of the first process that failed to the exit code that a shell reports, with which
    `jaxtune launch` ends: 128 plus the signal's number for a process that a signal ended (a negative `code`), else
    `code` itself."""
    return 128 - code if code < 0 else code


def _how(code: int) -> str:
    """Words on how a process failed and that the others end too, such as "ended with exit code 1; the others follow";
    if a signal ended it, also that the same command continues the run. They follow "process N" in a message that
    `_wait` prints if other processes still run. code: the failed process's Popen.returncode, not 0; minus the signal's
    number if a signal ended it."""
    if code > 0:
        return f"ended with exit code {code}; the others follow"
    return f"was ended by {signal.Signals(-code).name}; the others are ended too. The same command continues the run"
