"""Chooses which implementation of an operation, such as attention, runs a call: a hand-written kernel, or the one in
plain JAX, which is called the reference. It also says why faster implementations refuse a call.

`choose` reads an ordered table {name: a function that returns why the implementation refuses the call, or None}, the
preferred one first (mostly the fastest, with "reference" last). A name that the caller requests (`implementation=`)
never falls back; None takes the first that supports the call. The function that says why a hand-written kernel refuses
a call also compares the kernel with the reference at its first use on a GPU (`first_use`), and a kernel whose result is
wrong there is refused from then on. `exactly` compiles the reference for such a check. Within `built` (a start of
training) and `unchecked` (the planner) the checks are only queued, `begin_checks` starts them, and `built` waits for
them. `compute_capability`, `device_kind` and `multiprocessors` say which GPU programs are compiled for; `compile_for`
sets another one than this machine's. `on_request` restricts an implementation to callers that request it, and `unsaid`
silences warnings.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxtune.pallas import versions

logger = logging.getLogger(__name__)

# The implementations of an operation, the preferred one first: name -> a function that returns why it refuses the call,
# or None if it supports it.
Table = Mapping[str, Callable[[], str | None]]

# op -> (chosen implementation, {one that was tried before it: why it refused}) of the latest choice; tests read it.
record: dict[str, tuple[str, dict[str, str]]] = {}


@functools.cache
def _device_capability(platform: str) -> tuple[int, int] | None:
    """The compute capability of this machine's first GPU, (major, minor), such as (9, 0) for Hopper. It is asked for
    once for each value of `platform`, JAX's default backend, by `compute_capability` and `first_use`. None if
    `platform` is not "gpu", or if the GPU has no compute capability, because it is not NVIDIA's."""
    if platform != "gpu":
        return None
    text = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", None)
    if not text:
        return None
    major, minor = str(text).split(".")
    return int(major), int(minor)


_target: tuple[int, int] | None = None
_unsaid = 0  # how many contexts `unsaid` there are now, in all threads
_unsaid_lock = threading.Lock()


def compute_capability() -> tuple[int, int] | None:
    """The compute capability, (major, minor), of the NVIDIA GPU that programs are compiled for: this machine's, or
    within `compile_for` the one given there. None without an NVIDIA GPU. Implementations decide by it whether they can
    run a call."""
    return _target if _target is not None else _device_capability(jax.default_backend())


# (op, implementation, kind of call) -> why this GPU must not run it, or None: what `first_use` finds.
first_uses: dict[tuple[str, str, str], Future[str | None]] = {}
_first_use_lock = threading.Lock()
_checkers = ThreadPoolExecutor(8, "first use")
_pending: list[Callable[[], None]] = []  # checks that wait for `begin_checks`
# The checks that were asked for within `built`, which waits for them at its end, or `unchecked`; None outside.
_beside: contextvars.ContextVar[list[Future[str | None]] | None] = contextvars.ContextVar("beside", default=None)
# Relative error of a 16-bit result against float32: ten times what rounding makes, a tenth of what a wrong kernel does.
_FIRST_USE_BOUND = 0.02


def first_use(op: str, name: str, call: str, compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    """Compares an implementation with the reference on a small case, once for each (op, name, call), before it is used
    on this GPU. An implementation calls it to find out whether it must refuse.

    A pass is stored in the user's cache, because compiling the case takes seconds; a failure is stored only in this
    process. Nothing is compared without a GPU (interpreted kernels have tests) or while compiling for another GPU; the
    result is then None. The function may be called while JAX traces: the comparison runs in a thread of its own,
    outside of any trace, mesh or context. The call starts all queued checks and waits for its own. Within `built` and
    `unchecked` it does not wait: it returns what the check found if that is done already; else it queues the check,
    which `begin_checks` starts, and returns None.

    Args:
      op: the operation's name.
      name: the implementation's name.
      call: a text that names the kind of call, such as its dtype and head dim; calls with the same text share one
        check, also if their kernels are compiled separately, for other sizes.
      compare: a function without arguments that makes the case and returns (the list of the implementation's results,
        that of the reference's results in float32).
    Returns:
      the reason why this GPU must not run the implementation (a result differs, or an error), or None.
    """
    if _target is not None or _device_capability(jax.default_backend()) is None:
        return None
    with _first_use_lock:
        if (op, name, call) not in first_uses:
            first_uses[op, name, call] = check = Future()
            _pending.append(functools.partial(_check, check, op, name, call, compare))
        check = first_uses[op, name, call]
    beside = _beside.get()
    if beside is None or check.done():
        begin_checks()
        return check.result()
    beside.append(check)
    return None


def begin_checks() -> None:
    """Starts, in background threads, the kernel checks that `first_use` has queued. Each check compares a hand-written
    kernel with the reference implementation on a small case, before the kernel is used on this GPU for the first time.

    A start of training calls it each time a program has been lowered: XLA, which needs no Python, then compiles at the
    same time. Waiting for a check starts the queued ones too. A check does not start as soon as it is queued, while JAX
    lowers, because checks trace in Python threads and would slow lowering down through the GIL: lowering a step of
    Qwen3-30B-A3B took 7 s in place of 4 with checks beside it, and XLA waited all that time. The checks themselves take
    less time than XLA.
    """
    with _first_use_lock:
        for check in _pending:
            _checkers.submit(check)
        _pending.clear()


def exactly[**P, R](results: Callable[P, R]) -> Callable[P, R]:
    """Jits `results`, a function that computes the reference's results for a check of `first_use`, without autotuning
    of matrix products; it is compiled when the returned function is first called. Autotuning takes seconds for each
    product, longer than the rest of a check, and it uses the GPU for which other programs are compiled at the same
    time."""
    return jax.jit(results, compiler_options={"xla_gpu_autotune_level": 0})


@contextlib.contextmanager
def unchecked():
    """A context for the abstract evaluation (jax.eval_shape) of a computation that is lowered later within `built`. In
    it `first_use` queues its checks, does not wait for them, and assumes that kernels are right, except those whose
    check is done already; `built` waits for the checks. The planner traces single layers in it, before the run's
    programs are compiled."""
    token = _beside.set([])
    try:
        yield
    finally:
        _beside.reset(token)


def built[Built](build: Callable[[], Built]) -> Built:
    """Calls `build`, which traces, lowers and may compile programs, without waiting for the checks of `first_use`, and
    returns its result. The programs of a training run are compiled by it. The checks start when `build` calls
    `begin_checks`, or else at its end, and run at the same time as the rest of `build`.

    Kernels are assumed to be right until it ends, so that the start of a run does not wait for checks that take less
    time than compiling. A model of experts has a dozen checks, of up to 20 s. At its end it waits for all checks that
    `build` asked for. If one fails, JAX's caches are cleared and `build` is called once more, and that kernel is then
    refused; a check that only this second call asks for is waited for at once. If `build` raises although no check
    failed, the exception is raised.
    """
    asked: list[Future[str | None]] = []
    token = _beside.set(asked)
    try:
        programs = build()
    except Exception:  # a kernel that fails its check may not even lower or compile
        if not _failed(asked):
            raise
    else:
        if not _failed(asked):
            return programs
    finally:
        _beside.reset(token)
    jax.clear_caches()  # removes traces with a kernel that is refused now
    return build()


def _failed(checks: list[Future[str | None]]) -> bool:
    """Starts the checks that are still queued, waits for all of `checks`, futures of the reasons that `first_use`
    finds, and returns whether one of them has a reason against a kernel. `built` calls it at its end."""
    begin_checks()
    return any([check.result() is not None for check in checks])  # noqa: C419 - a list, so that all are waited for


def _check(check: Future[str | None], op: str, name: str, call: str, compare: Callable) -> None:
    """Runs one check of `first_use` in a background thread, and stores its result in a future: None, the reason against
    the kernel, or an exception, which is raised again where the future is read.

    Args:
      check: the future.
      op, name, call: the operation, the implementation, and the kind of call, which identify the check.
      compare: makes a small case, and returns (results of the implementation, results of the reference).
    """
    try:
        check.set_result(_checked(op, name, call, compare))
    except BaseException as error:  # raised again where the check is waited for
        check.set_exception(error)


def _checked(op: str, name: str, call: str, compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    """Compares a kernel with the reference, unless a file in the user's cache says that it has passed before. Returns
    None if it passed before or if they agree, and in the latter case writes that file, if the cache can be written;
    otherwise the reason against the kernel, which is also logged. `_check` calls it.

    Args:
      op, name, call: the operation, the implementation, and the kind of call, which identify the check.
      compare: makes a small case, and returns (results of the implementation, results of the reference).
    """
    passed = _pass(op, name, call)
    if os.path.isfile(passed):  # False if its folder may not be searched
        return None
    reason = _difference(compare)
    if reason is None:
        with contextlib.suppress(OSError):  # if the cache cannot be written, the next start repeats the check
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    else:
        logger.error("%s: implementation %s is disabled for %s: it %s", op, name, call, reason)
    return reason


def _pass(op: str, name: str, call: str) -> Path:
    """The path of the empty file that exists if a check of `first_use` has passed, so that a later run need not repeat
    it. Its name is a hash of op, name and call (the operation, the implementation, and the kind of call), the kind of
    GPU, the kernels' source and the versions of the software that compiles and runs them, so that a change of any of
    these repeats the check. It is in ~/.cache/jaxtune/first_uses, or in $JAXTUNE_CACHE/first_uses if that environment
    variable is set."""
    device = jax.local_devices()[0]
    made_with = (device.device_kind, device.client.platform_version, *versions.of_kernels(), _sources())
    root = os.environ.get("JAXTUNE_CACHE") or Path.home() / ".cache" / "jaxtune"
    return Path(root) / "first_uses" / hashlib.sha256("\n".join((op, name, call, *made_with)).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A SHA-256 digest of all Python files of jaxtune/pallas, for the name of `_pass`, because a check that passed says
    nothing about a changed kernel. It is computed once in a process."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _difference(compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    """Compares the results of a kernel with those of the reference. Returns None if each result's relative error in the
    norm is at most 2 %, else a text that says which result differs, or which error was raised. It raises nothing
    itself; `_checked` calls it. compare: a function without arguments that makes a small case and returns (the list of
    the kernel's results, that of the reference's)."""
    try:
        errors = []
        with jax.enable_x64(False):  # with it, small cases would be float64
            cases = compare()
        for result, reference in zip(*cases, strict=True):
            result, reference = np.asarray(result, np.float64), np.asarray(reference, np.float64)
            if result.shape != reference.shape:
                raise ValueError(f"result of shape {result.shape}, the reference's is {reference.shape}")
            errors.append(float(np.linalg.norm(result - reference) / np.linalg.norm(reference)))
    except Exception as error:  # any error of a kernel is a reason to use another implementation
        return f"failed in the check at its first use on this GPU: {type(error).__name__}: {str(error)[:300]}"
    for number, error in enumerate(errors):
        if not error <= _FIRST_USE_BOUND:
            return (
                f"differs from the reference in the check at its first use on this GPU: relative error {error:.3g} in "
                f"result {number}, at most {_FIRST_USE_BOUND} is right"
            )
    return None


def device_kind() -> str | None:
    """The name of the GPU that programs are compiled for, such as "NVIDIA H200": the device that the current mesh
    describes, or this machine's. Measured block sizes (tuning.py) and fitted times are looked up by it. None without a
    GPU, or if only a compute capability is known, as within `compile_for`."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.device_kind
    if _target is not None or jax.default_backend() != "gpu":
        return None
    return jax.local_devices(backend="gpu")[0].device_kind


def multiprocessors() -> int:
    """The number of multiprocessors of the GPU that programs are compiled for: the device that the current mesh
    describes, or this machine's. If only a compute capability is known, as within `compile_for`, it is 132, as an H100
    or H200 has. Persistent kernels run one or more programs on each. Raises RuntimeError without a GPU if neither is
    known."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.num_cores
    if _target is not None:
        return 132  # only the capability is known: assume the number of an H100 or H200
    return jax.local_devices(backend="gpu")[0].core_count


@contextlib.contextmanager
def compile_for(capability: tuple[int, int]):
    """A context in which implementations are chosen, in all threads, as if the machine had a GPU of this compute
    capability, (major, minor). Tests trace and compile programs in it on a machine without a GPU; kernels are not
    checked in it."""
    global _target
    before, _target = _target, capability
    try:
        yield
    finally:
        _target = before


@contextlib.contextmanager
def unsaid():
    """A context in which `choose` logs no warning, in any thread, that faster implementations refuse a call. It is for
    computations that run once, in float32, and do not need speed, such as merging adapters into weights."""
    global _unsaid
    with _unsaid_lock:
        _unsaid += 1
    try:
        yield
    finally:
        with _unsaid_lock:
            _unsaid -= 1


@functools.cache
def _say_once(op: str, name: str, refused: tuple[tuple[str, str], ...]) -> None:
    """Logs a warning that an operation does not run on its fastest implementation, once for the same arguments; for
    `choose`.

    Args:
      op: the operation's name.
      name: the implementation that runs.
      refused: a pair (implementation, the reason why it refuses the call) for each faster one.
    """
    reasons = "; ".join(f"{other}: {reason}" for other, reason in refused)
    logger.warning("%s runs on %s (%s)", op, name, reasons)


def on_request(
    name: str, implementation: str | None, why: str, refusal: Callable[[], str | None]
) -> Callable[[], str | None]:
    """Makes the refusal function, for a table that `choose` reads, of an implementation that is used only if the caller
    requests it by name. A refusal function returns the reason why the implementation does not run a call, or None.

    Args:
      name: the implementation's name.
      implementation: the name that the caller requests; None: the caller requests none.
      why: the reason why it is not used unless requested, such as "not measured on a GPU yet".
      refusal: the refusal function for a call that requests it.
    Returns:
      `refusal` if `implementation` is `name`, else a function that returns a reason that begins with `why`.
    """
    if implementation == name:
        return refusal
    return lambda: f"{why}: runs where it is asked for by name"


def choose(op: str, table: Table, implementation: str | None) -> str:
    """Chooses the implementation that runs a call, and returns its name. The choice is stored in `record`, which tests
    read. If none is requested and faster ones refuse the call on an NVIDIA GPU, a warning says why, once, but not
    within `unsaid`.

    Args:
      op: the operation's name.
      table: its implementations, the preferred one first: {name: a function that returns why it refuses this call, or
        None}.
      implementation: the name that the caller requests, which is then the only one that is asked; None: the first in
        the table that supports the call is chosen.
    Raises:
      ValueError: the requested name is unknown or refuses the call, or no implementation supports it.
    """
    if implementation is not None:
        if implementation not in table:
            raise ValueError(f"{op}: no implementation {implementation!r}; there are {', '.join(table)}")
        reason = table[implementation]()
        if reason is not None:
            raise ValueError(f"{op}: implementation {implementation!r} cannot serve this call: {reason}")
        record[op] = (implementation, {})
        return implementation
    refused: dict[str, str] = {}
    for name, refuse in table.items():
        reason = refuse()
        if reason is None:
            record[op] = (name, refused)
            if refused and not _unsaid and compute_capability() is not None:
                _say_once(op, name, tuple(refused.items()))
            return name
        refused[name] = reason
    raise ValueError(f"{op}: no implementation supports this call: {refused}")
