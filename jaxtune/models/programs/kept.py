"""Compiled programs that a later start runs without tracing and lowering them, which take longer than loading them.

An entry of the cache of programs, under a digest of all that decides a program, names JAX's own entry with the
executable, and has what the executable does not tell:

    executable   JAX's key
    devices      their ids, in the order of the mesh
    name, kept   the program's name, and the arguments that it reads, by index
    results      shape, dtype and weak type of each result
    outline      how results are nested: an argument's index for a tree like it
    checks       of kernels at their first use, which must have passed here
    said         what was said about kernels that are not used

It is JSON, and neither pickled nor code. A program with anything else is traced at each start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import operator
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
from jaxtune.models.programs import ahead, described, room, surroundings
from jaxtune.models.programs.compiling import compiled
from jaxtune.pallas import compat, dispatch, gpu_kernel
from jaxtune.system import processes, sources, timing, waiting
from jaxtune.system.heap import uncollected
from jaxtune.system.private_jax import config, core, pxla
from jaxtune.system.program_cache import ProgramCache, in_use, keys_asked, unwritten, write

logger = logging.getLogger(__name__)

_FORMAT = 1
_DUMPS = ("MOSAIC_GPU_DUMP", "JAX_DUMP_IR_TO")
_LEAF = "*"
_MOST_THREADS = 16
COMPUTING = ("jaxtune", "jax", "flax", "optax")  # packages with functions that a program may be made of


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

    def lowered(self) -> jax.stages.Lowered:
        with self.context():
            program = jax.jit(self.function, out_shardings=self.out_shardings, donate_argnums=self.donated)
            traced = program.trace(*self.arguments)
            compat.begin(traced)
            return traced.lower()

    def key(self, digests: described.Digests) -> str | None:
        """Of all that decides the program; None if it cannot be described."""
        leaves, structure = jax.tree.flatten(self.arguments)
        where, nesting = jax.tree.flatten(self.out_shardings)
        try:
            with self.context():
                devices = [device.id for device in self.devices]
                parts = (self.function, leaves, structure, where, nesting, self.donated, self.shardy, devices)
                settings = sorted(self.options.items()), config.trace_context(), surroundings.of(self.devices)
                return f"step-{digests.of((_FORMAT, parts, settings)).hex()}"
        except described.Undescribed as error:
            logger.info("%s is traced at every start, as a key cannot tell of %s", self.function, error)
        except Exception:
            logger.warning("%s is traced, as no key can be made", self.function, exc_info=True)
        return None


@dataclasses.dataclass
class _Fresh:
    """What compiling a program told about it."""

    program: Program
    executable: str | None  # JAX's key
    said: list[dispatch.Said]
    write: Callable[[], None] | None = None  # caches the executable; None: JAX has


type Later = list[Callable[[], None]]
type Program = jax.stages.Compiled | room.Secured


def programs_of(
    requests: Sequence[Request], meanwhile: Callable[[], object] = lambda: None, later: Later | None = None
) -> list[Program]:
    """The compiled programs: kept ones are loaded in threads; others are lowered one by one, the slowest should come
    first, and compiled in threads meanwhile, then kept. Again without a kernel that fails its check.

    meanwhile: called once or more while nothing but threads compiles or loads. It must wait for no thread that traces.
    later: gets what writes the programs that were compiled, seconds of a deep one; None: they are written at once.
    """
    with timing.phase("cached", "keys"):
        cache = cache_of_programs()
    return list(map(_program_of, _built(requests, cache, meanwhile, later, room.secured)))


def _built(
    requests: Sequence[Request],
    cache: ProgramCache | None,
    meanwhile: Callable[[], object] = lambda: None,
    later: Later | None = None,
    in_room: Callable[[jax.stages.Compiled, tuple], Program] = lambda program, devices: program,
) -> list[Program | _Fresh]:
    """Those without an entry are _Fresh, and kept. in_room: called in the thread that loaded or compiled a program."""
    with timing.phase("cached", "keys"):
        digests = described.Digests()
        keys = [None if cache is None else request.key(digests) for request in requests]
    waits = cache is not None and later is not None
    done = dispatch.built(functools.partial(_loaded_or_compiled, requests, keys, cache, meanwhile, waits, in_room))
    if cache is not None:
        built = zip(requests, keys, done, strict=True)
        fresh = [(request, key, new) for request, key, new in built if isinstance(new, _Fresh)]
        keep = functools.partial(_keep_all, fresh, cache)
        if fresh:
            later.append(keep) if later is not None else keep()
        pairs = zip(keys, requests, strict=True)
        ahead.note([(key, request.devices) for key, request in pairs if key is not None], cache)
    return done


def _keep_all(fresh: Sequence[tuple[Request, str | None, _Fresh]], cache: ProgramCache) -> None:
    for _, _, new in fresh:
        if new.write is not None:
            new.write()
    named = [(request, key, new) for request, key, new in fresh if key is not None]
    if named and sources.are_unchanged():
        for request, key, new in named:
            _keep(request, key, new, cache)


def _program_of(done: Program | _Fresh) -> Program:
    return done.program if isinstance(done, _Fresh) else done


def cache_of_programs() -> ProgramCache | None:
    """None if programs are to be traced: none are kept, or their lowering is to be seen, or in several processes, or
    the user replaced a part of jaxtune or of what it computes with, or its files changed since the start.
    """
    dumps = any(name.startswith(_DUMPS) for name in os.environ) or "--xla_dump" in os.environ.get("XLA_FLAGS", "")
    if dumps or jax.config.values["jax_dump_ir_to"] or processes.count() > 1 or (cache := in_use()) is None:
        return None
    for package in COMPUTING:
        if (where := described.replaced(package)) is not None:
            logger.info("programs are traced, as a function in %s is not of %s", where, package)
            return None
    if not sources.are_loaded():
        logger.info("programs are traced, as files of jaxtune changed since this process began, or cannot be read")
        return None
    return cache


def _loaded_or_compiled(
    requests: Sequence[Request],
    keys: Sequence[str | None],
    cache: ProgramCache | None,
    meanwhile: Callable[[], object],
    waits: bool,
    in_room: Callable[[jax.stages.Compiled, tuple], Program],
) -> list[Program | _Fresh]:
    """waits: programs that are compiled are not written yet."""
    refused = dispatch.any_failed()  # its programs are not those of other starts

    def loaded(request: Request, key: str | None) -> Program | None:
        if key is None or cache is None or refused:
            return None
        with timing.phase("cached", request.name):
            program = _loaded(request, key, cache)
            return None if program is None else in_room(program, request.devices)

    pool = ThreadPoolExecutor(1 + min(2 * len(requests), _MOST_THREADS), "compile")
    try:
        # Else what a module that was imported late computes is not what keys tell.
        unchanged = pool.submit(lambda: cache is not None and sources.are_unchanged())
        loading = [pool.submit(loaded, *pair) for pair in zip(requests, keys, strict=True)]
        done = []
        if cache is not None and all(key is not None and cache.get(key) is not None for key in keys):
            meanwhile()  # nothing is lowered
        with uncollected():
            for request, future in zip(requests, loading, strict=True):
                with timing.phase("wait", "programs"):
                    is_loaded = waiting.needed(future) is not None and waiting.needed(unchanged)
                if is_loaded:
                    done.append(future)
                    continue
                with dispatch.overheard() as said:
                    lowered = request.lowered()
                done.append(pool.submit(_compiled, request, lowered, said, cache if waits else None, in_room))
        dispatch.begin_checks()  # which lowering asked for
        meanwhile()
        with timing.phase("wait", "programs", total=len(done), unit="programs") as work:
            for future in done:
                future.add_done_callback(lambda _: work.advance())
            return [waiting.needed(future) for future in done]
    finally:
        pool.shutdown(wait=waiting.failed() is None, cancel_futures=True)


def _compiled(
    request: Request,
    lowered: jax.stages.Lowered,
    said: list[dispatch.Said],
    unwritten_in: ProgramCache | None,
    in_room: Callable[[jax.stages.Compiled, tuple], Program],
) -> _Fresh:
    """unwritten_in: the cache in which it is not written yet."""
    device = _local(request.devices)
    kernels = gpu_kernel.kernels_of(lowered) if device.platform == "gpu" else []
    writing = contextlib.nullcontext() if unwritten_in is None else unwritten()
    with request.context(), ThreadPoolExecutor(8, "kernels") as pool, keys_asked() as keys:
        gpu_kernel.compile_beside(kernels, device, pool)
        began = time.perf_counter()
        with writing:
            program = compiled(lowered, request.options)
    seconds, key = time.perf_counter() - began, keys[-1] if keys else None
    placed = in_room(program, request.devices)
    if unwritten_in is None or key is None or unwritten_in.has(key):
        return _Fresh(placed, key, said)
    return _Fresh(placed, key, said, functools.partial(write, key, request.name, program, seconds))


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
            with timing.phase("cached", "keys"):
                cache = cache_of_programs()
            if cache is not None:
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
    with timing.phase("cached", "keys"):
        cache = cache_of_programs()
    return _prepared(calls, cache)[1]


def begin(calls: Sequence[Call]) -> None:
    """`prepare` in a thread, if programs are kept. Who calls one then waits, and raises what goes wrong."""

    def run() -> None:
        with timing.phase("cached", "keys"):
            cache = cache_of_programs()
        if cache is not None:
            _prepared(calls, cache)

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
        future.set_result(_program_of(done))
    compiled = sum(isinstance(done, _Fresh) for done in built)
    return [future.result() for _, future, _ in futures], Prepared(len(built) - compiled, compiled)


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


def result_shapes(function: Callable, *arguments):
    """jax.eval_shape on shapes, whose result is kept: tracing a deep model takes tenths of a second."""
    cache = None if dispatch.any_failed() else cache_of_programs()
    if cache is None:
        return jax.eval_shape(function, *arguments)
    with ThreadPoolExecutor(1) as pool:
        unchanged = pool.submit(sources.are_unchanged)
        key = _shapes_key(function, arguments)
    if key is None or not unchanged.result():
        return jax.eval_shape(function, *arguments)
    structures = [jax.tree.structure(argument) for argument in arguments]
    if (content := cache.get(key)) is not None:
        try:
            return _shapes_of(json.loads(content), structures)
        except Exception as error:  # whatever is wrong with an entry, the function can be traced
            logger.warning("kept shapes are not used: %s: %s; tracing anew", type(error).__name__, error)
    shapes = jax.eval_shape(function, *arguments)
    leaves, structure = jax.tree.flatten(shapes)
    if not sources.are_unchanged():
        return shapes
    with contextlib.suppress(described.Undescribed, OSError):
        outline = _outline(jax.tree.unflatten(structure, range(len(leaves))), structures)
        results = [(leaf.shape, str(leaf.dtype), leaf.weak_type) for leaf in leaves]
        cache.put(key, json.dumps({"results": results, "outline": outline}).encode())
    return shapes


def _shapes_of(entry: Mapping, structures: Sequence):
    """ValueError if it is not as `result_shapes` writes it; others for what is no entry at all."""
    structure = jax.tree.structure(_nested(entry["outline"], structures))
    if structure.num_leaves != len(entry["results"]):
        raise ValueError(f"{len(entry['results'])} results for {structure.num_leaves} places")
    leaves = [
        jax.ShapeDtypeStruct(tuple(map(operator.index, shape)), jnp.dtype(dtype), weak_type=bool(weak))
        for shape, dtype, weak in entry["results"]
    ]
    return jax.tree.unflatten(structure, leaves)


def _shapes_key(function: Callable, arguments: tuple) -> str | None:
    leaves, structure = jax.tree.flatten(arguments)
    settings = config.trace_context(), surroundings.of(jax.local_devices()[:1])
    try:
        return f"shapes-{described.Digests().of((_FORMAT, function, leaves, structure, settings)).hex()}"
    except described.Undescribed as error:
        logger.info("%s is traced at every start, as a key cannot tell of %s", function, error)
        return None


# ---- keeping and loading


def _keep(request: Request, key: str, fresh: _Fresh, cache: ProgramCache) -> None:
    """Writes an entry, unless the program has what no entry holds."""
    unloaded = getattr(fresh.program._executable, "_unloaded_executable")  # noqa: B009 - of a subclass
    with_more = (unloaded.unordered_effects, unloaded.ordered_effects, unloaded.keepalive, unloaded.host_callbacks)
    checks = dispatch.passed()
    if fresh.executable is None or checks is None or any(with_more) or unloaded.mut or fresh.program._params.const_args:
        return
    if any(jnp.dtype(str(aval.dtype)) != aval.dtype for aval in unloaded.output_avals):
        return
    nested = jax.tree.unflatten(fresh.program.out_tree, range(fresh.program.out_tree.num_leaves))
    try:
        outline = _outline(nested, [jax.tree.structure(argument) for argument in request.arguments])
    except described.Undescribed:
        return
    entry = {
        "executable": fresh.executable,
        "devices": [device.id for device in request.devices],
        "name": unloaded.name,
        "kept": sorted(unloaded.kept_var_idx),
        "results": [[aval.shape, str(aval.dtype), aval.weak_type] for aval in unloaded.output_avals],
        "outline": outline,
        "checks": checks,
        "said": fresh.said,
    }
    with contextlib.suppress(OSError):  # the next start traces it again
        cache.put(key, json.dumps(entry).encode())


def _loaded(request: Request, key: str, cache: ProgramCache) -> jax.stages.Compiled | None:
    """The program of an entry; None without one. One that cannot be used is logged."""
    if (content := cache.get(key)) is None:
        return None
    try:
        executable = ahead.take(key, request.devices)
        if executable is None:
            executable = ahead.load(json.loads(content), cache, request.devices)
        if executable is None:
            return None
        with request.context():
            program = _program(request, executable)
        dispatch.say_again(executable.entry["said"])
    except Exception as error:  # of JSON, of JAX, of XLA or of a compressor: whatever it is, the program can be made
        logger.warning("a kept program is not used: %s: %s; compiling it anew", type(error).__name__, error)
        return None
    return program


def _program(request: Request, loaded: ahead.Executable) -> jax.stages.Compiled:
    """What jax.stages.Lowered.compile makes of an executable."""
    entry, executable, devices = loaded
    leaves, structure = jax.tree.flatten((request.arguments, {}))
    avals: list = [core.shaped_abstractify(leaf) for leaf in leaves]
    kept = set(entry["kept"])
    read = [aval for index, aval in enumerate(avals) if index in kept]
    read_from = [leaf.sharding for index, leaf in enumerate(leaves) if index in kept]
    nested = _nested(entry["outline"], [jax.tree.structure(argument) for argument in request.arguments])
    results = [core.ShapedArray(tuple(shape), jnp.dtype(dtype), weak) for shape, dtype, weak in entry["results"]]
    written_to = jax.tree.leaves(jax.tree.broadcast(request.out_shardings, nested))
    results = [core.update_aval_with_sharding(aval, where) for aval, where in zip(results, written_to, strict=True)]
    of_reads, of_results = pxla._get_layouts_from_executable(
        executable, [None] * len(read), [None] * len(results), 0, read, results
    )
    name = entry["name"]
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=devices,
        backend=devices[0].client,
        input_avals=read,
        input_shardings=read_from,
        output_avals=results,
        output_shardings=written_to,
        committed=True,
        name=name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=kept,
        mut=None,
        xla_in_layouts=of_reads,
        dispatch_in_layouts=pxla.get_dispatch_layouts(of_reads, read_from, read),
        xla_out_layouts=of_results,
        all_args_info=pxla.AllArgsInfo(avals, core.DebugInfo("jit", name, ("",) * len(avals), None)),
        pgle_profiler=None,
    )
    donated = jax.tree.leaves(
        tuple(
            jax.tree.map(lambda _, donates=index in request.donated: donates, argument)
            for index, argument in enumerate(request.arguments)
        )
    )
    infos = [jax.stages.ArgInfo(aval, donates) for aval, donates in zip(avals, donated, strict=True)]
    return jax.stages.Compiled(
        unloaded.load(), [], jax.tree.unflatten(structure, infos), jax.tree.structure(nested), no_kwargs=False
    )


def _outline(nested: object, arguments: Sequence):
    """A tree of indices as JSON: None, the index of an argument's structure, _LEAF, or {"dict", "list" or "tuple": its
    items}.
    """
    if nested is None or isinstance(nested, int):
        return None if nested is None else _LEAF
    structure = jax.tree.structure(nested)
    if structure.num_leaves and structure in arguments:
        return arguments.index(structure)
    if type(nested) is dict and all(isinstance(name, str) for name in nested):
        return {"dict": {name: _outline(item, arguments) for name, item in nested.items()}}
    if isinstance(nested, list | tuple) and type(nested) in (list, tuple):
        return {type(nested).__name__: [_outline(item, arguments) for item in nested]}
    raise described.Undescribed(f"a result in a {type(nested).__name__}")


def _nested(outline, arguments: Sequence):
    """A tree of zeros, of `_outline`."""
    if outline is None or outline == _LEAF:
        return None if outline is None else 0
    if isinstance(outline, int):
        return jax.tree.unflatten(arguments[outline], [0] * arguments[outline].num_leaves)
    ((kind, items),) = outline.items()
    if kind == "dict":
        return {name: _nested(item, arguments) for name, item in items.items()}
    return {"list": list, "tuple": tuple}[kind](_nested(item, arguments) for item in items)


def _local(devices: Sequence):
    return next(device for device in devices if device.process_index == jax.process_index())
