"""Runs a Gluon kernel's body in numpy, a program at a time; layouts, which only say where numbers lie, mean nothing.
Copies arrive when they are waited for, and not before.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
from assembly import assembled


@dataclasses.dataclass(frozen=True)
class Pointee:
    """The type of a pointer."""

    element_ty: np.dtype


class Tensor:
    """An array or a number; pointers are int64 addresses in the memory of a launch."""

    def __init__(self, numbers, dtype=None):
        self.numbers = np.asarray(numbers)
        self.dtype = dtype or self.numbers.dtype

    shape = property(lambda self: self.numbers.shape)
    type = property(lambda self: types.SimpleNamespace(layout=None))

    def to(self, dtype, bitcast: bool = False) -> Tensor:
        if isinstance(dtype, Pointee):
            return Tensor(self.numbers, dtype)
        return Tensor(np.ascontiguousarray(self.numbers).view(dtype) if bitcast else _cast(self.numbers, dtype))

    def reshape(self, shape) -> Tensor:
        return Tensor(self.numbers.reshape([int(size) for size in shape]), self.dtype)

    def permute(self, order) -> Tensor:
        return Tensor(self.numbers.transpose(order), self.dtype)

    def __getitem__(self, index) -> Tensor:
        return Tensor(self.numbers[index], self.dtype)

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def _with(self, other, function) -> Tensor:
        other = other.numbers if isinstance(other, Tensor) else other
        if isinstance(self.dtype, Pointee):
            return Tensor(self.numbers + np.asarray(other, np.int64) * self.dtype.element_ty.itemsize, self.dtype)
        return Tensor(function(self.numbers, other))

    __add__ = lambda self, other: self._with(other, np.add)  # noqa: E731
    __radd__ = __add__
    __sub__ = lambda self, other: self._with(other, np.subtract)  # noqa: E731
    __rsub__ = lambda self, other: self._with(other, lambda one, two: two - one)  # noqa: E731
    __mul__ = lambda self, other: self._with(other, np.multiply)  # noqa: E731
    __rmul__ = __mul__
    __truediv__ = lambda self, other: self._with(other, np.divide)  # noqa: E731
    __rtruediv__ = lambda self, other: self._with(other, lambda one, two: two / one)  # noqa: E731
    __floordiv__ = lambda self, other: self._with(other, np.floor_divide)  # noqa: E731
    __mod__ = lambda self, other: self._with(other, np.remainder)  # noqa: E731
    __neg__ = lambda self: Tensor(-self.numbers)  # noqa: E731
    __rshift__ = lambda self, other: self._with(other, np.right_shift)  # noqa: E731
    __lshift__ = lambda self, other: self._with(other, np.left_shift)  # noqa: E731
    __and__ = lambda self, other: self._with(other, np.bitwise_and)  # noqa: E731
    __or__ = lambda self, other: self._with(other, np.bitwise_or)  # noqa: E731
    __lt__ = lambda self, other: self._with(other, np.less)  # noqa: E731
    __ge__ = lambda self, other: self._with(other, np.greater_equal)  # noqa: E731
    __gt__ = lambda self, other: self._with(other, np.greater)  # noqa: E731
    __index__ = lambda self: int(self.numbers)  # noqa: E731
    __eq__ = lambda self, other: self._with(other, np.equal)  # noqa: E731
    __hash__ = None


def _cast(numbers: np.ndarray, dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(dtype)


class Shared:
    """A part of shared memory."""

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers

    def index(self, index) -> Shared:
        return Shared(self.numbers[int(index.numbers if isinstance(index, Tensor) else index)])

    def reshape(self, shape) -> Shared:
        return Shared(self.numbers.reshape(shape))

    def permute(self, order) -> Shared:
        return Shared(self.numbers.transpose(order))

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.numbers[start : start + length])

    def load(self, layout) -> Tensor:
        del layout
        return Tensor(self.numbers.copy())

    def store(self, tile: Tensor) -> None:
        self.numbers[...] = tile.numbers

    shape = property(lambda self: self.numbers.shape)


class Launch:
    """The memory of a launch, its program and the copies on their way."""

    def __init__(self, arrays):
        sizes = [-(-array.nbytes // 256) * 256 for array in arrays]
        self.starts = [256 + sum(sizes[:i]) for i in range(len(sizes))]  # address 0 is of no array
        self.memory = np.full(256 + sum(sizes), 255, np.uint8)
        for start, array in zip(self.starts, arrays, strict=True):
            self.memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.program, self.groups, self.open = (0, 0, 0), [], []

    def _bytes(self, pointers: Tensor):
        itemsize = pointers.dtype.element_ty.itemsize
        assert (pointers.numbers % itemsize == 0).all()
        return pointers.numbers[..., None] + np.arange(itemsize)

    def load(self, pointers, mask=None, other=0.0) -> Tensor:
        dtype = pointers.dtype.element_ty
        if mask is None:
            return Tensor(self.memory[self._bytes(pointers)].view(dtype)[..., 0])
        real = np.broadcast_to(mask.numbers, pointers.shape)
        safe = Tensor(np.where(real, pointers.numbers, 0), pointers.dtype)
        found = self.memory[self._bytes(safe)].view(dtype)[..., 0]
        return Tensor(np.where(real, found, np.asarray(other, dtype)))

    def store(self, pointers, values, mask=None) -> None:
        real = np.broadcast_to(True if mask is None else mask.numbers, pointers.shape)
        values = np.ascontiguousarray(np.broadcast_to(values.numbers, pointers.shape)[real])
        assert values.dtype == pointers.dtype.element_ty
        self.memory[self._bytes(pointers)[real]] = values.reshape(-1, 1).view(np.uint8)

    def copy(self, target: Shared, pointers, mask=None) -> None:
        self.open.append((target, pointers, mask))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, most: int) -> None:
        while len(self.groups) > most:
            for target, pointers, mask in self.groups.pop(0):
                target.numbers[...] = self.load(pointers, mask, 0).numbers


def _mma(left: Tensor, right: Tensor, sums: Tensor) -> Tensor:
    """One float32 sum over ascending columns, 16 at a time, of each pair of matrices."""
    a, b, total = left.numbers.astype(np.float64), right.numbers.astype(np.float64), sums.numbers
    for start in range(0, a.shape[-1], 16):
        total = (total + a[..., start : start + 16] @ b[..., start : start + 16, :]).astype(np.float32)
    return Tensor(total)


def _inline(ptx, constraints, arguments, dtype, is_pure, pack):
    del is_pure
    assert pack == 1
    outs = constraints.count("=")
    arrays = np.broadcast_arrays(*(argument.numbers for argument in arguments))
    operands = {f"${outs + i}": np.ascontiguousarray(array).view(np.uint32) for i, array in enumerate(arrays)}
    found = assembled(ptx, operands)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    results = [Tensor(found[f"${i}"].astype(np.uint32).view(kind)) for i, kind in enumerate(dtypes)]
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def _broadcast(one: Tensor, other: Tensor):
    return tuple(Tensor(array) for array in np.broadcast_arrays(one.numbers, other.numbers))


def _language(launch: Launch) -> types.SimpleNamespace:
    def where(condition, one, other):
        dtype = one.dtype if isinstance(one, Tensor) and isinstance(one.dtype, Pointee) else None
        numbers = [value.numbers if isinstance(value, Tensor) else value for value in (condition, one, other)]
        return Tensor(np.where(*numbers), dtype)

    def join(one, other):
        return Tensor(np.stack([one.numbers, other.numbers], -1))

    def split(tile):
        return Tensor(tile.numbers[..., 0]), Tensor(tile.numbers[..., 1])

    def full(shape, value, dtype, layout=None):
        return Tensor(np.full([int(size) for size in shape], value, dtype))

    def exp(x):
        with np.errstate(over="ignore"):
            return Tensor(np.exp(x.numbers))

    def larger(one, other):
        return Tensor(np.maximum(*(getattr(x, "numbers", x) for x in (one, other))))

    kinds = dict(int16=np.int16, int32=np.int32, int64=np.int64, float32=np.float32, bfloat16=jnp.bfloat16)
    kinds |= dict(float16=np.float16, float8e4nv=jnp.float8_e4m3fn)
    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout")
    layouts = (*layouts, "DistributedLinearLayout")
    return types.SimpleNamespace(
        constexpr=None,
        static_range=range,
        arange=lambda start, end, layout=None: Tensor(np.arange(start, end, dtype=np.int32)),
        program_id=lambda axis: Tensor(np.int32(launch.program[axis])),
        load=launch.load,
        store=launch.store,
        full=full,
        where=where,
        minimum=lambda one, other: Tensor(np.minimum(*(getattr(x, "numbers", x) for x in (one, other)))),
        join=join,
        split=split,
        broadcast=_broadcast,
        maximum=larger,
        max=lambda x, axis: Tensor(x.numbers.max(axis)),
        sum=lambda x, axis: Tensor(x.numbers.sum(axis, dtype=x.numbers.dtype)),
        exp2=lambda x: Tensor(np.exp2(x.numbers)),
        rsqrt=lambda x: Tensor((1 / np.sqrt(x.numbers)).astype(x.numbers.dtype)),
        debug_barrier=lambda: None,
        max_constancy=lambda x, sizes: x,
        div_rn=lambda one, other: one / other,
        exp=exp,
        convert_layout=lambda tile, layout, assert_trivial=False: tile,
        multiple_of=lambda x, sizes: x,
        max_contiguous=lambda x, sizes: x,
        inline_asm_elementwise=_inline,
        pointer_type=lambda dtype: Pointee(np.dtype(dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(np.zeros([int(n) for n in shape], dtype)),
        **{name: np.dtype(kind) for name, kind in kinds.items()},
        **{name: (lambda *arguments: None) for name in layouts},
    )


def _plain(function, names: dict[str, Any], found: dict) -> types.FunctionType:
    """The Python function of a jitted one, in a module whose languages are `names`; so are those that it calls."""
    python = function.fn
    if python not in found:
        module = dict(python.__globals__)
        found[python] = types.FunctionType(python.__code__, module, python.__name__, python.__defaults__)
        for name in python.__code__.co_names:
            value = module.get(name)
            if name in names:
                module[name] = names[name]
            elif hasattr(value, "fn") and hasattr(value.fn, "__code__"):
                module[name] = _plain(value, names, found)
            elif hasattr(value, "value"):  # a constexpr
                module[name] = value.value
    return found[python]


def call(kernel, arguments, out_types, grid, aliases=None, **constants) -> list:
    """compat.triton_graph_call. What the kernel leaves unwritten is NaN, or in an argument's memory that."""
    outputs = [np.full(t.shape, np.nan, t.dtype) for t in out_types]
    for argument, output in (aliases or {}).items():
        outputs[output] = np.array(arguments[argument])
    arrays = [*map(np.asarray, arguments), *outputs]
    launch = Launch(arrays)
    language = _language(launch)
    asynchronous = types.SimpleNamespace(commit_group=launch.commit_group, wait_group=launch.wait_group)
    names = dict(gl=language, tl=language, async_copy=asynchronous, mma_v2=_mma, _copy=launch.copy)
    names["_transposed"] = lambda tile, rows: tile  # which moves numbers between lanes
    function = _plain(kernel, names, {})
    pointers = iter(
        Tensor(np.int64(start), Pointee(np.dtype(array.dtype)))
        for start, array in zip(launch.starts, arrays, strict=True)
    )
    values = [constants[name] if name in constants else next(pointers) for name in kernel.arg_names]
    for program in itertools.product(*(range(size) for size in (*grid, 1, 1)[:3])):
        launch.program, launch.groups, launch.open = program, [], []
        function(*values)
    for start, output in zip(launch.starts[len(arguments) :], outputs, strict=True):
        output.reshape(-1).view(np.uint8)[:] = launch.memory[start : start + output.nbytes]
    return [jnp.asarray(output) for output in outputs]
