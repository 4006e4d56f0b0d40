"""Functions in processes that can be ended at any time, whatever their code does."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from jaxtune.system import children, waiting
from jaxtune.train.user_code import modules
from jaxtune.train.user_code.errors import Elsewhere, UserCodeError

# The run's search path, and nothing else of it: no device, no open file but the socket.
_ENTRY = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from jaxtune.train.user_code.child import serve
serve(int(sys.argv[2]), int(sys.argv[3]))"""
_NO_DEVICE = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
LOGS = ("log_metric", "log_extra")  # functions of the run among the arguments: what they are called with is sent back
_LOAD_SECONDS = 600.0  # in which the file of a function with a limit must have been loaded
_END_SECONDS = 5.0  # for a process that has closed its connection
_processes: dict[str, Process] = {}  # by what the functions share: their file, or module


class Process:
    """Runs functions, one call at a time; starts when needed, also after its end."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._numbers = itertools.count()  # of messages
        self._loaded: set[bytes] = set()  # references

    @property
    def number(self) -> int | None:
        """Process id; None if it does not run."""
        return None if self._popen is None or self._popen.poll() is not None else self._popen.pid

    def ask(
        self, reference: bytes, given: bytes | None, name: str, seconds: float | None = None, looks: bool = True
    ) -> bytes:
        """The pickled result of a call. Any exception, such as a signal's, ends the process. Raises Elsewhere (what the
        function raised, or how the process ended), TimeoutError after `seconds`.

        reference: the function's place (file, module, name) or itself, pickled.
        given: its arguments and names of logs, pickled; None only loads, and b"" comes back.
        looks: whether waiting.look runs meanwhile, which may save; False where an interruption would break off that
        save.
        """
        if self.number is None:
            self._start()
        answer: Future[bytes | None] = Future()
        number = next(self._numbers)
        exchange = (self._connection, pickle.dumps((number, reference, given)), answer)
        threading.Thread(target=_exchange, args=exchange, name=f"process of {name}", daemon=True).start()
        try:
            description = f"{name}, in a process of its own"
            message = waiting.result(answer, description, seconds) if looks else answer.result(seconds)
        except BaseException:
            self.end()
            raise
        if message is None:
            raise Elsewhere(f"the process of {name} ended{self._how()}")
        its_number = None
        with contextlib.suppress(Exception):  # the function may have written it
            its_number, is_right, value = pickle.loads(message)
        if its_number != number:
            self.end()
            raise Elsewhere(f"the process of {name} sent what is no answer to this call, and was ended")
        if not is_right:
            raise Elsewhere(*value)
        self._loaded.add(reference)
        return value

    def load(self, reference: bytes, name: str, seconds: float | None) -> None:
        """Loads a function that the process does not have. Elsewhere: as `ask`, or not within `seconds`, and at least
        _LOAD_SECONDS.
        """
        if self.number is not None and reference in self._loaded:
            return
        most = None if seconds is None else max(seconds, _LOAD_SECONDS)
        try:
            self.ask(reference, None, name, most)
        except TimeoutError:
            raise Elsewhere(f"the file of {name} was not loaded within {most:g} s") from None

    def end(self) -> None:
        popen, connection, self._popen, self._connection = self._popen, self._connection, None, None
        self._loaded.clear()
        if popen is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            connection.close()

    def _start(self) -> None:
        self.end()
        ours, theirs = socket.socketpair()
        path = json.dumps([str(entry) or os.getcwd() for entry in sys.path])
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, path, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | _NO_DEVICE,
                start_new_session=True,
            )
        self._connection = ours

    def _how(self) -> str:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = None if self._popen is None else self._popen.wait(_END_SECONDS)
        self.end()
        if code is None:
            return " its connection, and was killed"
        return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"


def process_of(shared: str) -> Process:
    return _processes.setdefault(shared, Process())


def end_all() -> None:
    for process in _processes.values():
        process.end()


class Isolated:
    """A function in a process without devices that may be killed. key: the config key, for errors. UserCodeError if
    another process cannot find it: a lambda, a nested function, or the script's.
    """

    def __init__(self, function: Callable, key: str):
        functools.update_wrapper(self, function)
        self._name, self._key = getattr(function, "__name__", type(function).__name__), key
        location = modules.place_of(function)
        if location is not None and location[1] != "__main__":
            path, module, name = location
            self._reference, shared = pickle.dumps((str(path), module, name)), str(path)
        else:
            self._reference, shared = self._pickled(function), str(function.__module__)
        self._process = process_of(shared)
        parameters = inspect.signature(function).parameters.values()
        self._named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}

    def __call__(self, **given: object) -> object:
        return self.within(None, given)

    def within(self, seconds: float | None, given: Mapping[str, object]) -> object:
        """Calls the function; the limit excludes loading its file. UserCodeError if it raised, or arguments or result
        cannot be sent; TimeoutError at the limit, which ends the process.
        """
        self._process.load(self._reference, self._name, seconds)
        logs = {name: value for name, value in given.items() if name in LOGS and callable(value)}
        sent = self._sendable({name: value for name, value in given.items() if name not in logs})
        answer = self._process.ask(self._reference, pickle.dumps((sent, [*logs])), self._name, seconds)
        try:
            value, logged = pickle.loads(answer)
        except Exception as error:
            raise UserCodeError(f"what {self._name} returned cannot be read in the run: {error}") from error
        for name, arguments, named in logged:
            logs[name](*arguments, **named)
        return value

    def _pickled(self, function: Callable) -> bytes:
        try:
            if getattr(function, "__module__", None) == "__main__" or type(function).__module__ == "__main__":
                raise pickle.PicklingError("it is the script's own")
            return pickle.dumps(function)
        except Exception as error:
            raise UserCodeError(
                f"{self._key} = process: {self._name} cannot be sent to a process ({error}): move it to a file of its "
                "own, at the top level, and name it file.py:function or import it; or leave the key out"
            ) from None

    def _sendable(self, arguments: Mapping[str, object]) -> bytes:
        """Pickled arguments, without unpicklable ones that the function does not name."""
        with contextlib.suppress(Exception):
            return pickle.dumps(dict(arguments))
        sent = {}
        for name, value in arguments.items():
            try:
                pickle.dumps(value)
                sent[name] = value
            except Exception as error:
                if name in self._named:
                    raise UserCodeError(
                        f"{self._key} = process: {self._name} has the parameter {name}, whose value cannot be sent to "
                        f"a process ({error}); leave the parameter, or the key, out"
                    ) from None
        return pickle.dumps(sent)


def _exchange(connection: socket.socket, message: bytes, answer: Future[bytes | None]) -> None:
    try:
        children.send(connection, message)
        answer.set_result(children.receive(connection))
    except OSError:  # the process has ended
        answer.set_result(None)
