"""Chooses the implementation that runs a call of an operation: a hand-written kernel, or the reference in plain JAX.

A table {name: why it refuses the call, or None} lists the preferred one first. A kernel's refusal also compares it with
the reference at its first use on a GPU (`first_use`), and a wrong one is refused from then on. Within `built` and
`unchecked` these checks are only queued.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxtune.pallas import targets, versions
from jaxtune.system import sources, timing, waiting

logger = logging.getLogger(__name__)

# The implementations of an operation, the preferred one first: name -> a function that returns why it refuses the call,
# or None if it supports it.
Table = Mapping[str, Callable[[], str | None]]

type Call = tuple[str, str, str]  # an operation, its implementation, and the kind of call

# op -> (chosen implementation, {one that was tried before it: why it refused}) of the latest choice; tests read it.
record: dict[str, tuple[str, dict[str, str]]] = {}


_unsaid = 0  # how many contexts `unsaid` there are now, in all threads
_unsaid_lock = threading.Lock()


# (op, implementation, kind of call) -> why this GPU must not run it, or None: what `first_use` finds.
first_uses: dict[Call, Future[str | None]] = {}
_first_use_lock = threading.Lock()
_queues: contextvars.ContextVar[bool] = contextvars.ContextVar("queues", default=False)  # of `_tracing`
_traces: contextvars.ContextVar[bool] = contextvars.ContextVar("traces", default=False)  # whether within `_tracing`
_checkers = ThreadPoolExecutor(8, "first use", _traces.set, (True,))
_pending: list[Callable[[], None]] = []  # checks that wait for `begin_checks`
_caches = threading.Condition()  # of the next three
_tracers = 0  # threads within `_tracing`
_forgetting = False  # whether one waits for them to clear JAX's caches
_forgotten: set[Future[str | None]] = set()  # failed checks, with whose kernels the caches have no trace
_let_pass: set[Future[str | None]] = set()  # checks before whose end `first_use` returned: JAX's caches may have traces
in_one_order = jax.make_user_context(False)  # of one_order.exact; part of the keys of JAX's caches of traces
# Relative error of a 16-bit result against float32: ten times what rounding makes, a tenth of what a wrong kernel does.
_FIRST_USE_BOUND = 0.02


def first_use(op: str, name: str, call: str, compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    """Compares an implementation with the reference on a small case, once for each (op, name, call). Returns why this
    GPU must not run it, or None.

    A pass is stored in the user's cache, a failure in this process. Nothing is compared without a GPU or while
    compiling for another. May be called while JAX traces: the check runs in a thread of its own and is waited for.
    Within `built` and `unchecked` it is queued, and None returned. Raises what the check raised, such as OSError.

      call: the kind of call, such as dtype and head dim; equal texts share one check, but for one within
        one_order.exact, which runs within it.
      compare: () -> (the implementation's results, the reference's in float32, by `exactly` if it has sums in one
        order).
      op, name: the operation and the implementation, as in error messages.
    """
    if targets.absent() is not None or targets.installed() is None:
        return None
    exact = bool(in_one_order.value)
    call += ", one order" if exact else ""
    with _first_use_lock:
        if (op, name, call) not in first_uses:
            first_uses[op, name, call] = check = Future()
            _pending.append(functools.partial(_check, check, op, name, call, compare, exact))
        check = first_uses[op, name, call]
        if _queues.get() and not check.done():
            _let_pass.add(check)
            return None
    begin_checks()
    with timing.phase("wait", "kernel checks"):
        return check.result()


def begin_checks() -> None:
    """Starts queued kernel checks in background threads. Call it once all programs are lowered: checks trace in Python
    and would slow lowering through the GIL (7 s instead of 4 for Qwen3-30B-A3B), but XLA needs no Python and takes
    longer than they do.
    """
    with _first_use_lock:
        for check in _pending:
            _checkers.submit(check)
        _pending.clear()


def exactly[**P, R](results: Callable[P, R]) -> Callable[P, R]:
    """Jits a check's reference outside of one_order.exact and without autotuning of products, which takes longer than
    the check and disturbs others' on the GPU.
    """

    @functools.wraps(results)
    def as_usual(*arguments: P.args, **options: P.kwargs) -> R:
        with in_one_order(False):
            return results(*arguments, **options)

    return jax.jit(as_usual, compiler_options={"xla_gpu_autotune_level": 0})


@contextlib.contextmanager
def unchecked():
    """A context for abstract evaluation (jax.eval_shape): `first_use` queues checks, which a later `built` waits for,
    and assumes that kernels are right.
    """
    with _tracing(queues=True):
        yield


def built[Built](build: Callable[[], Built]) -> Built:
    """Calls `build`, which traces, lowers and may compile, beside the checks of `first_use`, of which a model of
    experts has a dozen, of up to 20 s. They start with `begin_checks`, or at the end, where those of all threads are
    waited for: JAX's caches may have given a trace with a kernel that another thread asked for. If one fails, these are
    cleared and `build` runs again, with that kernel refused, or with the error that the check raised if it asks for it.
    Within another `built`, checks are waited for at once. `build` must not wait for a thread that traces: that one may
    wait until the caches are cleared, which waits for `build`.
    """
    queues = is_outer = not _traces.get()
    while True:
        with _tracing(queues) as forgotten:
            try:
                programs = build()
            except Exception:  # a kernel that fails its check may not even lower or compile
                if not is_outer or waiting.failed() is not None or _failed() <= forgotten:
                    raise
            else:
                if not is_outer or _failed() <= forgotten:
                    return programs
        _forget_failed()
        queues = False


@contextlib.contextmanager
def _tracing(queues: bool) -> Iterator[Set[Future[str | None]]]:
    """Around what leaves traces in JAX's caches. Yields the failed checks with whose kernels these had none at its
    beginning, and get none. queues: whether `first_use` queues checks.
    """
    global _tracers
    is_outer = not _traces.get()
    with _caches:
        if is_outer:
            _caches.wait_for(lambda: not _forgetting)
            _tracers += 1
        forgotten = frozenset(_forgotten)
    tokens = _queues.set(queues), _traces.set(True)
    try:
        yield forgotten
    finally:
        _queues.reset(tokens[0])
        _traces.reset(tokens[1])
        with _caches:
            _tracers -= is_outer
            _caches.notify_all()


def _forget_failed() -> None:
    """Clears JAX's caches of traces with kernels that failed. Waits until no thread traces: what it had taken from the
    caches would get into them again.
    """
    global _forgetting
    with _caches:
        _caches.wait_for(lambda: not _forgetting)
        _forgetting = True
        try:
            _caches.wait_for(lambda: not _tracers)
            with _first_use_lock:
                checks = _let_pass & set(first_uses.values())
            failed = {check for check in checks if check.done() and _is_against(check)}
            if not failed <= _forgotten:
                jax.clear_caches()
                _forgotten.update(failed)
        finally:
            _forgetting = False
            _caches.notify_all()


def _failed() -> set[Future[str | None]]:
    """The failed checks of this process with whose kernels JAX's caches may have had traces, once all are done."""
    with _first_use_lock:  # before they begin: of what comes later none may have begun
        checks = _let_pass & set(first_uses.values())
    begin_checks()
    with timing.phase("wait", "kernel checks"):
        return {check for check in checks if _is_against(check)}


def _is_against(check: Future[str | None]) -> bool:
    """Whether the check, once it is done, has a reason against its kernel, or raised an error."""
    return check.exception() is not None or check.result() is not None


def _check(check: Future[str | None], op: str, name: str, call: str, compare: Callable, exact: bool) -> None:
    try:
        with timing.phase("check", op), in_one_order(exact):
            check.set_result(_checked(op, name, call, compare))
    except BaseException as error:  # raised again where the check is waited for
        check.set_exception(error)


def _checked(op: str, name: str, call: str, compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    """The reason against a kernel, which is logged, or None. A pass is written to the user's cache, unless a kernel's
    source has changed since the start: it would tell of another one.
    """
    pass_file = _pass(op, name, call)
    if os.path.isfile(pass_file) and sources.are_unchanged("pallas"):  # no file if its folder may not be searched
        return None
    reason = _difference(compare)
    if reason is None:
        if not sources.are_unchanged("pallas"):
            return None
        with contextlib.suppress(OSError):  # if the cache cannot be written, the next start repeats the check
            pass_file.parent.mkdir(parents=True, exist_ok=True)
            pass_file.touch()
    else:
        logger.error("%s: implementation %s is disabled for %s: it %s", op, name, call, reason)
    return reason


def _pass(op: str, name: str, call: str) -> Path:
    """The empty file that a pass leaves, named by a hash of the call, the GPU, kernels' source and versions."""
    device = jax.local_devices()[0]
    made_with = (device.device_kind, device.client.platform_version, *versions.of_kernels(), sources.digest("pallas"))
    root = os.environ.get("JAXTUNE_CACHE") or Path.home() / ".cache" / "jaxtune"
    return Path(root) / "first_uses" / hashlib.sha256("\n".join((op, name, call, *made_with)).encode()).hexdigest()


def _difference(compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    """None if each result's relative error in the norm is at most 2 %; else which one differs, or the error raised."""
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


@contextlib.contextmanager
def unsaid():
    """A context in which `choose` warns in no thread that faster implementations refuse, for computations that run
    once.
    """
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
    """refused: (faster implementation, why it refuses)."""
    reasons = "; ".join(f"{faster}: {reason}" for faster, reason in refused)
    logger.warning("%s runs on %s (%s)", op, "plain JAX" if name == "reference" else name, reasons)


def on_request(
    name: str, implementation: str | None, why: str, refusal: Callable[[], str | None]
) -> Callable[[], str | None]:
    """The refusal, for a table, of an implementation that runs only if requested by name. why: such as "not measured on
    a GPU yet".

      name, implementation: the implementation's name, and the one that was requested, or None.
      refusal: why it cannot run a call even on request, or None.
    """
    if implementation == name:
        return refusal
    return lambda: f"{why}: runs where it is asked for by name"


def choose(op: str, table: Table, implementation: str | None) -> str:
    """The name of the implementation that runs a call, also in `record`. A requested one never falls back. Otherwise
    the first that supports it runs, and on an NVIDIA GPU a warning says once why preferred ones refuse.

    Raises ValueError for an unknown name, or if the requested one, or all, refuse.

      op: the operation's name, for errors, warnings and `record`.
      table: {name: why it refuses this call, or None}, the preferred first.
      implementation: the name that the user requested, or None.
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
            if refused and not _unsaid and targets.here() is not None:
                _say_once(op, name, tuple(refused.items()))
            return name
        refused[name] = reason
    raise ValueError(f"{op}: no implementation supports this call: {refused}")
