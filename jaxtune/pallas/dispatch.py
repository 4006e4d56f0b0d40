"""Picks an implementation of an op, and says why it refused the others.

Each op keeps an ordered table {name: implementation}, the fastest first and `reference` last. An explicit
`implementation=` never falls back; None takes the first that supports the call. A hand-written kernel is compared with
the reference at its first use on a GPU (`first_use`): one that is wrong there is refused from then on.
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

# The implementations of an op, the first choice first: name -> why it refuses the call, or None where it supports it.
Table = Mapping[str, Callable[[], str | None]]

# op -> (chosen implementation, {refused implementation: why}) of the latest choice; read by tests and `jaxtune info`.
record: dict[str, tuple[str, dict[str, str]]] = {}


@functools.cache
def _device_capability(platform: str) -> tuple[int, int] | None:
    if platform != "gpu":
        return None
    text = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", None)
    if not text:
        return None
    major, minor = str(text).split(".")
    return int(major), int(minor)


_target: tuple[int, int] | None = None
_unsaid = False  # see unsaid


def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the NVIDIA GPU to lower for, or None: the machine's, unless `compile_for` names another."""
    return _target if _target is not None else _device_capability(jax.default_backend())


# (op, implementation, kind of call) -> why this GPU must not run it, or None: what `first_use` finds.
first_uses: dict[tuple[str, str, str], Future[str | None]] = {}
_first_use_lock = threading.Lock()
_checkers = ThreadPoolExecutor(8, "first use")
_held: list[Callable[[], None]] = []  # checks that `begin_checks` has still to begin
# The checks that were asked for within `built`, which waits for them at its end, or `unchecked`; None outside.
_beside: contextvars.ContextVar[list[Future[str | None]] | None] = contextvars.ContextVar("beside", default=None)
# Relative error of a 16-bit result against float32: ten times what rounding makes, a tenth of what a wrong kernel does.
_FIRST_USE_BOUND = 0.02


def first_use(op: str, name: str, call: str, compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    """Why this GPU must not run an implementation, or None: compares one small case with the reference, once for each
    (op, name, call). A pass is remembered in the user's cache, for compiling the case takes seconds of every start.

    Does nothing where no GPU is (interpreted kernels have their tests) or while compiling for another one. May be
    called while JAX traces: the comparison runs in a thread of its own, which knows of no trace, mesh or context.
    Within `built` and `unchecked` it is not waited for here, and begins with `begin_checks`.

    Args:
      call: what makes the kernel another one: dtype, head dim, ...
      compare: makes the case and returns (results of the implementation, those of the reference in float32).
    """
    if _target is not None or _device_capability(jax.default_backend()) is None:
        return None
    with _first_use_lock:
        if (op, name, call) not in first_uses:
            first_uses[op, name, call] = check = Future()
            _held.append(functools.partial(_check, check, op, name, call, compare))
        check = first_uses[op, name, call]
    beside = _beside.get()
    if beside is None or check.done():
        begin_checks()
        return check.result()
    beside.append(check)
    return None


def begin_checks() -> None:
    """Begins the checks that were asked for so far.

    Who builds a program says when: once it is lowered, and XLA, which needs no Python, has begun. Threads that trace
    checks beside a program take Python's time from it: lowering a step of Qwen3-30B-A3B took 7 s for 4, all of which
    XLA waited for. Its checks take less time than XLA.
    """
    with _first_use_lock:
        for check in _held:
            _checkers.submit(check)
        _held.clear()


def exactly[**P, R](results: Callable[P, R]) -> Callable[P, R]:
    """jit of a reference's results for a check. Without the search for the fastest matrix products, which takes seconds
    a product, longer than everything else of a check, and the GPU from the programs that are compiled beside it."""
    return jax.jit(results, compiler_options={"xla_gpu_autotune_level": 0})


@contextlib.contextmanager
def unchecked():
    """For shapes alone, of what `built` lowers later: nothing waits for the checks of first uses that are asked for
    here. A kernel is taken as right; should it fail, `built` finds that out."""
    token = _beside.set([])
    try:
        yield
    finally:
        _beside.reset(token)


def built[Built](build: Callable[[], Built]) -> Built:
    """What `build` gives, programs that it traces and lowers, and may compile; the checks of first uses run beside it.

    Their kernels are taken as right until it ends, so that a start waits for no check that is shorter than compiling.
    A model of experts has a dozen, of up to 20 s. Where one fails, everything is built once more, without its kernel.
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
    jax.clear_caches()  # of traces with a kernel that is refused now
    return build()


def _failed(checks: list[Future[str | None]]) -> bool:
    """Whether one did; waits for all."""
    begin_checks()
    return any([check.result() is not None for check in checks])  # noqa: C419 - of a generator, not for all


def _check(check: Future[str | None], op: str, name: str, call: str, compare: Callable) -> None:
    try:
        check.set_result(_checked(op, name, call, compare))
    except BaseException as error:  # whoever waits for the check is told
        check.set_exception(error)


def _checked(op: str, name: str, call: str, compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    passed = _pass(op, name, call)
    if passed.is_file():
        return None
    reason = _difference(compare)
    if reason is None:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs the next start its time
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    else:
        logger.error("%s: implementation %s is disabled for %s: it %s", op, name, call, reason)
    return reason


def _pass(op: str, name: str, call: str) -> Path:
    """The file that says that a check passed with this kind of GPU, these kernels and all that compiles and runs them.
    JAXTUNE_CACHE moves its folder."""
    device = jax.local_devices()[0]
    made_with = (device.device_kind, device.client.platform_version, *versions.of_kernels(), _sources())
    root = os.environ.get("JAXTUNE_CACHE") or Path.home() / ".cache" / "jaxtune"
    return Path(root) / "first_uses" / hashlib.sha256("\n".join((op, name, call, *made_with)).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A digest of the package's kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _difference(compare: Callable[[], tuple[Sequence, Sequence]]) -> str | None:
    try:
        errors = []
        with jax.enable_x64(False):  # under which small cases would be made in float64
            cases = compare()
        for result, reference in zip(*cases, strict=True):
            result, reference = np.asarray(result, np.float64), np.asarray(reference, np.float64)
            if result.shape != reference.shape:
                raise ValueError(f"result of shape {result.shape}, the reference's is {reference.shape}")
            errors.append(float(np.linalg.norm(result - reference) / np.linalg.norm(reference)))
    except Exception as error:  # whatever keeps a kernel from running is a reason to run another one
        return f"failed in the check at its first use on this GPU: {type(error).__name__}: {str(error)[:300]}"
    for number, error in enumerate(errors):
        if not error <= _FIRST_USE_BOUND:
            return (
                f"differs from the reference in the check at its first use on this GPU: relative error {error:.3g} in "
                f"result {number}, at most {_FIRST_USE_BOUND} is right"
            )
    return None


def device_kind() -> str | None:
    """The name of the GPU to lower for, such as "NVIDIA H200"; None where there is none or only its capability is
    known."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.device_kind
    if _target is not None or jax.default_backend() != "gpu":
        return None
    return jax.local_devices(backend="gpu")[0].device_kind


def multiprocessors() -> int:
    """How many multiprocessors the GPU to lower for has."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.num_cores
    if _target is not None:
        return 132  # no more is known of it: as many as an H100 or H200
    return jax.local_devices(backend="gpu")[0].core_count


@contextlib.contextmanager
def compile_for(capability: tuple[int, int]):
    """Choose implementations as if the machine had a GPU of this compute capability: to compile where there is none."""
    global _target
    before, _target = _target, capability
    try:
        yield
    finally:
        _target = before


@contextlib.contextmanager
def unsaid():
    """What is computed here has no use for faster implementations, such as a check in float32: nothing is said of those
    that refuse it."""
    global _unsaid
    before, _unsaid = _unsaid, True
    try:
        yield
    finally:
        _unsaid = before


@functools.cache
def _say_once(op: str, name: str, refused: tuple[tuple[str, str], ...]) -> None:
    """A GPU's owner wants to know what keeps the faster implementation away."""
    reasons = "; ".join(f"{other}: {reason}" for other, reason in refused)
    logger.warning("%s runs on %s (%s)", op, name, reasons)


def on_request(
    name: str, implementation: str | None, why: str, refusal: Callable[[], str | None]
) -> Callable[[], str | None]:
    """The refusal, for a Table, of an implementation that serves only where `implementation`, what was asked for, is
    its name; why: such as "not measured on a GPU yet"."""
    if implementation == name:
        return refusal
    return lambda: f"{why}: runs where it is asked for by name"


def choose(op: str, table: Table, implementation: str | None) -> str:
    """Name of the implementation to run.

    Args:
      table: the implementations, see Table.
      implementation: an explicit name, or None for the first that supports the call.
    Raises:
      ValueError: the explicit name is unknown or refuses the call.
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
