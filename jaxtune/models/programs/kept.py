"""Compiled programs that a later start finds by what they compute: a program is traced at each start, and one whose
digest has an entry in the cache of programs is neither lowered nor compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
import types
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.placement import partition
from jaxtune.models.programs import ahead, room, surroundings
from jaxtune.models.programs.compiling import compiled
from jaxtune.models.programs.digests import Digests, Undescribed
from jaxtune.pallas import compat, dispatch, gpu_kernel
from jaxtune.system import processes, timing, waiting
from jaxtune.system.heap import uncollected
from jaxtune.system.private_jax import config
from jaxtune.system.program_cache import ProgramCache, apart, in_use, is_used_by_jax

logger = logging.getLogger(__name__)

_FORMAT = 2
_DUMPS = ("MOSAIC_GPU_DUMP", "JAX_DUMP_IR_TO")
_MOST_THREADS = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """A program to compile.

    function: of `arguments`, shapes with shardings. donated: indices of arguments.
    mesh: None: it is for the one device of `out_shardings`.
    options: XLA's. shardy: whether it is partitioned by Shardy; not if all of it is inside of partition.divided.
    """

    function: Callable
    arguments: tuple
    out_shardings: object  # a sharding, or a tree of them, perhaps a prefix of the results'
    mesh: jax.sharding.Mesh | None
    options: Mapping[str, bool | int | str]
    donated: tuple[int, ...] = ()
    shardy: bool = False

    @property
    def name(self) -> str:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return function.__name__

    @property
    def devices(self) -> tuple:
        if self.mesh is not None:
            return tuple(self.mesh.devices.flat)
        return tuple(jax.tree.leaves(self.out_shardings)[0].device_set)

    def context(self) -> contextlib.AbstractContextManager:
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh) if self.shardy else partition.compiling(self.mesh)

    def traced(self) -> jax.stages.Traced:
        with self.context():
            program = jax.jit(self.function, out_shardings=self.out_shardings, donate_argnums=self.donated)
            return program.trace(*self.arguments)

    def lowered(self, traced: jax.stages.Traced) -> jax.stages.Lowered:
        with self.context():
            compat.begin(traced)
            return traced.lower()

    def key(self, traced: jax.stages.Traced, digests: Digests) -> str | None:
        """Of the program, and all that decides what it is compiled to; None if it cannot be told from others, or does
        more than to compute its results.
        """
        if traced.effects:
            return None
        results = jax.tree.unflatten(traced.out_tree, [0] * traced.out_tree.num_leaves)
        where = [leaf.sharding for leaf in jax.tree.leaves(self.arguments)]
        where_to = jax.tree.leaves(jax.tree.broadcast(self.out_shardings, results))
        donated = [argument.donated for argument in jax.tree.leaves(traced.args_info)]
        options = sorted(self.options.items()), self.shardy
        try:
            with self.context():
                parts = (_FORMAT, traced.jaxpr, where, where_to, donated, options, config.trace_context())
                return f"program-{digests.of((*parts, surroundings.of(self.devices))).hex()}"
        except Undescribed as error:
            logger.info("%s is lowered at every start, as its key cannot tell of %s", self.name, error)
        except Exception:
            logger.warning("%s is lowered, as no key can be made", self.name, exc_info=True)
        return None


type Later = list[Callable[[], None]]
type Program = jax.stages.Compiled | room.Secured
type InRoom = Callable[[jax.stages.Compiled, tuple], Program]


class _Built(NamedTuple):
    program: Program
    is_loaded: bool
    write: Callable[[], None] | None = None  # keeps it


def programs_of(
    requests: Sequence[Request], meanwhile: Callable[[], object] = lambda: None, later: Later | None = None
) -> list[Program]:
    """The compiled programs. They are traced one by one, the slowest should come first; kept ones are loaded in
    threads, others are lowered and then compiled in threads, and kept. Again without a kernel that fails its check.

    meanwhile: called once or more while nothing but threads compiles or loads. It must wait for no thread that traces.
    later: gets what writes the programs that were compiled, seconds of a deep one; None: they are written at once.
    """
    built = _built(requests, cache_of_programs(), meanwhile, room.secured)
    if later is None:
        _keep(built)
    else:
        later += [each.write for each in built if each.write is not None]
    return [each.program for each in built]


def _built(
    requests: Sequence[Request],
    cache: ProgramCache | None,
    meanwhile: Callable[[], object] = lambda: None,
    in_room: InRoom = lambda program, devices: program,
) -> list[_Built]:
    """in_room: called in the thread that loaded or compiled a program."""
    return dispatch.built(functools.partial(_loaded_or_compiled, requests, cache, meanwhile, in_room))


def _keep(built: Sequence[_Built]) -> None:
    for each in built:
        if each.write is not None:
            each.write()


def cache_of_programs() -> ProgramCache | None:
    """None if JAX alone keeps programs, or nobody, or their lowering is to be seen, or in several processes."""
    dumps = any(name.startswith(_DUMPS) for name in os.environ) or "--xla_dump" in os.environ.get("XLA_FLAGS", "")
    if dumps or jax.config.values["jax_dump_ir_to"] or processes.count() > 1 or not is_used_by_jax():
        return None
    return in_use()


def _loaded_or_compiled(
    requests: Sequence[Request], cache: ProgramCache | None, meanwhile: Callable[[], object], in_room: InRoom
) -> list[_Built]:
    digests, keys = Digests(), []
    pool = ThreadPoolExecutor(1 + min(2 * len(requests), _MOST_THREADS), "compile")

    def begin_compiling(request: Request, traced: jax.stages.Traced, key: str | None) -> Future[_Built]:
        return pool.submit(_compiled, request, request.lowered(traced), key, cache, in_room)

    try:
        begun = []
        with uncollected():
            for request in requests:
                traced, key = request.traced(), None
                if cache is not None:
                    with timing.phase("cached", "keys"):
                        key = request.key(traced, digests)
                if key is not None and cache is not None and cache.has(key):
                    future = pool.submit(_loaded, request, traced, key, cache, in_room)
                else:
                    future = begin_compiling(request, traced, key)
                begun.append((request, traced, key, future))
                keys.append((key, request.devices))
        dispatch.begin_checks()  # which tracing asked for
        meanwhile()
        with timing.phase("wait", "programs", total=len(begun), unit="programs") as work:
            for *_, future in begun:
                future.add_done_callback(lambda _: work.advance())
            loaded = [waiting.needed(future) for *_, future in begun]
            again = [
                begin_compiling(*each) if built is None else None
                for built, (*each, _) in zip(loaded, begun, strict=True)
            ]
            built = [
                each if future is None else waiting.needed(future) for each, future in zip(loaded, again, strict=True)
            ]
    finally:
        pool.shutdown(wait=waiting.failed() is None, cancel_futures=True)
    if cache is not None:
        ahead.note([(key, devices) for key, devices in keys if key is not None], cache)
    return built


def _loaded(
    request: Request, traced: jax.stages.Traced, key: str, cache: ProgramCache, in_room: InRoom
) -> _Built | None:
    """The program of an entry; None without one that can be used, which is logged."""
    with timing.phase("cached", request.name):
        try:
            flat = ahead.take(key, request.devices) or ahead.load(key, cache, request.devices)
        except Exception as error:  # of JAX, of XLA or of a compressor: whatever it is, the program can be made
            logger.warning("a kept program is not used: %s: %s; compiling it anew", type(error).__name__, error)
            return None
        if flat is None:
            return None
        program = jax.stages.Compiled(flat._executable, [], traced.args_info, traced.out_tree)
        return _Built(in_room(program, request.devices), True)


def _compiled(
    request: Request, lowered: jax.stages.Lowered, key: str | None, cache: ProgramCache | None, in_room: InRoom
) -> _Built:
    """Without a key, JAX keeps the program, by what it was lowered to."""
    device = _local(request.devices)
    kernels = gpu_kernel.kernels_of(lowered) if device.platform == "gpu" else []
    with request.context(), ThreadPoolExecutor(8, "kernels") as pool:
        gpu_kernel.compile_beside(kernels, device, pool)
        began = time.perf_counter()
        with contextlib.nullcontext() if key is None else apart():
            program = compiled(lowered, request.options)
    seconds, placed = time.perf_counter() - began, in_room(program, request.devices)
    if key is None or cache is None or seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
        return _Built(placed, False)
    return _Built(placed, False, functools.partial(ahead.keep, key, program, request.devices, cache))


class Function:
    """jax.jit of a function, of whose programs for one device those are loaded that an earlier process has compiled.
    Any thread may call it; equal programs are compiled once.

    statics: the first arguments, which are static: hashable, and equal only if they give the same program.
    donated: indices among the other arguments.
    options: XLA's.
    mesh: of a function that is inside `partition.divided`; its programs are not kept.
    """

    def __init__(
        self,
        function: Callable,
        statics: int,
        donated: Sequence[int] = (),
        options: Mapping[str, bool | int | str] = types.MappingProxyType({}),
        mesh: jax.sharding.Mesh | None = None,
    ):
        self._function, self._statics, self._donated, self._options = function, statics, tuple(donated), options
        donated_indices = [statics + index for index in donated]
        self._jitted = jax.jit(
            function,
            static_argnums=tuple(range(statics)),
            donate_argnums=donated_indices,
            compiler_options=dict(options),
        )
        self.lower, self._mesh = self._jitted.lower, mesh
        self._programs: dict[Hashable, Future[Callable]] = {}
        self._secured: set[Hashable] = set()
        self._lock = threading.Lock()

    def __call__(self, *arguments):
        return self.program(*arguments)(*arguments[self._statics :])

    def program(self, *arguments) -> Callable:
        """What takes the arguments that are not static, and others of their shapes. Found again in a millisecond, so
        what runs often keeps it.
        """
        if self._mesh is not None:
            return functools.partial(self._on_mesh, self._mesh, *arguments[: self._statics])
        if (call := self.call(*arguments)) is not None:
            if (future := self._programs.get(call.key)) is not None:
                with timing.phase("wait", "programs"):
                    return future.result()
            if (cache := cache_of_programs()) is not None:
                return _prepared([call], cache)[0][0]
        return functools.partial(self._jitted, *arguments[: self._statics])

    def _on_mesh(self, mesh: jax.sharding.Mesh, *arguments):
        devices = tuple(mesh.devices.flat)
        if room.is_limited(devices) and (key := self._shapes(arguments)) not in self._secured:
            with partition.compiling(mesh):
                program = self._jitted.lower(*arguments).compile()  # which the call finds
            room.secure(program, devices)
            self._secured.add(key)
        with partition.compiling(mesh):
            return self._jitted(*arguments)

    def _shapes(self, arguments: tuple) -> Hashable:
        leaves, structure = jax.tree.flatten(arguments[self._statics :])
        return arguments[: self._statics], structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)

    def call(self, *arguments) -> Call | None:
        """A call with these arguments, or with arrays of their shapes: jax.ShapeDtypeStructs, of which one names the
        device. None if they are not all on one device.
        """
        statics, others = arguments[: self._statics], arguments[self._statics :]
        leaves, structure = jax.tree.flatten(others)
        devices = {device for leaf in leaves for device in _devices_of(leaf)}
        if len(devices) != 1:
            return None
        (device,) = devices
        shapes = tuple((leaf.shape, leaf.dtype, *_of_array(leaf, device)) for leaf in leaves)
        return Call(self, others, (statics, structure, shapes, device, config.trace_context()))

    def future(self, call: Call) -> tuple[Future[Callable], bool]:
        """(the program to come, whether the caller must make it, and then set it or call `forget`)."""
        with self._lock:
            if (future := self._programs.get(call.key)) is not None:
                return future, False
            self._programs[call.key] = future = Future()
            return future, True

    def forget(self, call: Call) -> None:
        del self._programs[call.key]

    def has(self, call: Call) -> bool:
        """Whether this process has the program."""
        future = self._programs.get(call.key)
        return future is not None and future.done()

    def request(self, call: Call) -> Request:
        statics, _, _, device, _ = call.key

        def shape(leaf: _Leaf) -> jax.ShapeDtypeStruct:
            weak, memory = _of_array(leaf, device)
            where = jax.sharding.SingleDeviceSharding(device, memory_kind=memory)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=weak)

        where = jax.sharding.SingleDeviceSharding(device)
        bound = functools.partial(self._function, *statics)
        return Request(bound, jax.tree.map(shape, call.arguments), where, None, self._options, self._donated)


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of a Function."""

    function: Function
    arguments: tuple  # those that are not static, or their shapes
    key: tuple  # in `function`


class Prepared(NamedTuple):
    loaded: int  # programs that an earlier process had compiled
    compiled: int


def prepare(calls: Sequence[Call]) -> Prepared:
    """Loads or compiles, in threads, the programs that this process lacks; the slowest should come first."""
    return _prepared(calls, cache_of_programs())[1]


def begin(calls: Sequence[Call]) -> None:
    """`prepare` in a thread, if programs are kept. Who calls one then waits, and raises what goes wrong. Calls in a
    context of JAX, which a thread has not, are left to who makes them.
    """

    def run() -> None:
        if (cache := cache_of_programs()) is not None:
            _prepared([call for call in calls if call.key[-1] == config.trace_context()], cache)

    pool = ThreadPoolExecutor(1, "prepare")
    pool.submit(run)
    pool.shutdown(wait=False)


def _prepared(calls: Sequence[Call], cache: ProgramCache | None) -> tuple[list[Callable], Prepared]:
    futures = [(call, *call.function.future(call)) for call in calls]
    missing = [(call, future) for call, future, is_missing in futures if is_missing]
    try:
        built = _built([call.function.request(call) for call, _ in missing], cache) if missing else []
    except BaseException as error:
        for call, future in missing:
            call.function.forget(call)
            future.set_exception(error)
        raise
    for (_, future), done in zip(missing, built, strict=True):
        future.set_result(done.program)
    _keep(built)
    loaded = sum(done.is_loaded for done in built)
    return [future.result() for _, future, _ in futures], Prepared(loaded, len(built) - loaded)


type _Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def _devices_of(leaf: _Leaf) -> Set:
    if isinstance(leaf, jax.Array):
        return leaf.devices()
    sharding = getattr(leaf, "sharding", None)
    return set() if sharding is None else sharding.device_set


def _of_array(leaf: _Leaf, device) -> tuple[bool, str | None]:
    """(whether its type is weak, in which memory of a device it is)."""
    where = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(device)
    return getattr(leaf, "weak_type", False), where.memory_kind


def _local(devices: Sequence):
    return next(device for device in devices if device.process_index == jax.process_index())
