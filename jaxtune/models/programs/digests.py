"""Digests of traced programs: equal in every process for programs that compute the same in the same order, different
for others. They are of what was traced, so that it does not matter how anything came into it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import jax
import numpy as np
from jax.core import AbstractValue, Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtune.system.private_jax import mlir

# Packages of which versions tell what their functions do; of others a digest has the code.
_VERSIONED = frozenset({"jax", "jaxlib", "jax_triton", "triton", "numpy", "ml_dtypes", "flax", "builtins", "functools"})
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...)})
# Parameters that only transformations read, which are done.
_OF_TRANSFORMATIONS = {
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
    "remat2": {"policy"},
    "custom_vmap_call": {"rule", "in_tree", "out_tree"},
}
# Of a program's arguments, which are equal a thousand times.
_BY_VALUE = frozenset({NamedSharding, SingleDeviceSharding})
# Of kernels, constants and types of Triton. A kernel's own cache_key depends on which one was asked first.
_OF_TRITON = ("src", "fn", "value", "name")
_LONG = 64  # bytes


class Undescribed(TypeError):
    """A value that nothing tells from others, or code that runs on the host."""


class Digests:
    """Digests of values that do not change meanwhile; each object is read once."""

    def __init__(self):
        self._digests: dict[Hashable, tuple[bytes, object]] = {}  # the value is kept alive, as its id may be the key
        self._within: list[Hashable] = []

    def of(self, value: object) -> bytes:
        """At most 64 bytes for a jaxpr with its constants, or a value that one has as a parameter. `Undescribed` for
        what it does not know.
        """
        kind = type(value)
        if kind in _PLAIN:
            return _joined(kind.__name__, repr(value).encode())
        if isinstance(value, tuple) and kind is tuple and _PLAIN.issuperset(map(type, value)):
            return _joined("tuple", repr(value).encode())
        key = value if kind in _BY_VALUE else id(value)
        if key in self._digests:
            return self._digests[key][0]
        if key in self._within:  # such as a function that calls itself
            return _joined("within", b"%d" % (len(self._within) - self._within.index(key)))
        self._within.append(key)
        try:
            name, parts = self._described(value)
            digests = [self.of(part) for part in parts]
        finally:
            self._within.pop()
        if isinstance(value, set | frozenset):
            digests.sort()
        self._digests[key] = _joined(name, *digests), value
        return self._digests[key][0]

    def _described(self, value) -> tuple[str, Iterable]:
        """(the name of its kind, what tells it from others of that kind)."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if (describe := _describer(kind)) is not None:
            return name, describe(value)
        if isinstance(value, Jaxpr):
            return name, self._of_jaxpr(value)
        if isinstance(value, type):
            return "type", (value.__module__, value.__qualname__)
        if isinstance(value, Mapping):
            return name, (item for pair in value.items() for item in pair)
        if isinstance(value, tuple | list | set | frozenset):
            return name, value
        if dataclasses.is_dataclass(value):
            ours = name.startswith("jaxtune.")  # of which some have a field beside what they are
            fields = [field.name for field in dataclasses.fields(value) if field.compare or not ours]
            return name, [getattr(value, field) for field in fields]
        parts = [getattr(value, part) for part in _OF_TRITON if hasattr(value, part)]
        if parts and kind.__module__.partition(".")[0] == "triton":
            return name, parts
        if kind.__module__.partition(".")[0] == "jax":  # not jaxlib, of whose objects nobody sees the fields
            return name, _fields(value)
        raise Undescribed(f"a {name}")

    def _of_jaxpr(self, jaxpr: Jaxpr) -> Iterator:
        numbers: dict[Var, int] = {}

        def numbered(variables) -> list[bytes]:
            for variable in variables:
                numbers[variable] = len(numbers)
            return [self.of(variable.aval) for variable in variables]

        def read(variables) -> tuple:
            return tuple([self._of_literal(v) if isinstance(v, Literal) else numbers[v] for v in variables])

        yield from numbered([*jaxpr.constvars, *jaxpr.invars])
        yield from getattr(jaxpr, "consts", ())
        for equation in jaxpr.eqns:
            yield read(equation.invars)
            yield self._of_equation(equation)
            yield from numbered(equation.outvars)
        yield read(jaxpr.outvars)

    def _of_literal(self, literal: Literal) -> bytes:
        value = literal.val
        return self.of((self.of(value if type(value) in _PLAIN else np.asarray(value)), self.of(literal.aval)))

    def _of_equation(self, equation: JaxprEqn) -> bytes:
        """Of all but its variables."""
        name = equation.primitive.name
        if "callback" in name:
            raise Undescribed(f"{name}, which runs on the host")
        without = _OF_TRANSFORMATIONS.get(name, ())
        parameters = [self.of(value) for key, value in equation.params.items() if key not in without]
        return _joined(name, self.of(equation.primitive), self.of(equation.ctx), *parameters)


def _joined(kind: str, *parts: bytes) -> bytes:
    """What nothing else gives: lengths are told, and what is long is hashed."""
    joined = b"".join([b"%d:%s" % (len(part), part) for part in (kind.encode(), *parts)])
    return joined if len(joined) < _LONG else b"#" + hashlib.sha256(joined).digest()


def _of_primitive(primitive: Primitive) -> tuple:
    """With what lowers it, which another package may have registered."""
    tables = [mlir._lowerings, *(table for _, table in sorted(mlir._platform_specific_lowerings.items()))]
    rules = [getattr(table.get(primitive), "rule", None) for table in tables]
    return primitive.name, type(primitive), [rule for rule in rules if rule is not None]


def _of_function(function: types.FunctionType) -> tuple:
    """With what it closes over, and the globals that it may read."""
    module = str(function.__globals__.get("__name__"))  # __module__ is a wrapped function's
    code, versioned = function.__code__, module.partition(".")[0] in _VERSIONED
    closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    names = () if versioned else dict.fromkeys(_names(code))
    read = [(name, _global(function.__globals__[name], names)) for name in names if name in function.__globals__]
    told = (code.co_qualname, code.co_firstlineno) if versioned else _code(code)
    return module, told, function.__defaults__, function.__kwdefaults__, closed_over, read


def _code(code: types.CodeType) -> tuple:
    constants = [_code(item) if isinstance(item, types.CodeType) else item for item in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_freevars


def _names(code: types.CodeType) -> Iterator[str]:
    """Of the globals and attributes that a function and those in it read."""
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _names(item)


def _global(value: object, names: Iterable[str]):
    """What tells a global from others: of a module, what is read of it, as far as any is there."""
    if not isinstance(value, types.ModuleType):
        return value
    if value.__name__.partition(".")[0] in _VERSIONED:
        return value.__name__
    return value.__name__, [(name, _global(vars(value)[name], ())) for name in names if name in vars(value)]


def _of_array(array) -> tuple:
    array = np.asarray(array)
    if array.dtype.hasobject:
        raise Undescribed("an array of objects")
    return str(array.dtype), array.shape, array.tobytes()


def _of_constant(array: jax.Array) -> tuple:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return str(array.dtype), _of_array(jax.random.key_data(array))
    return *_of_array(array), array.weak_type, array.sharding


def _of_mesh(mesh: Mesh) -> tuple:
    if mesh.empty:
        return ()
    devices = [(device.id, device.device_kind) for device in mesh.devices.flat]
    return mesh.axis_names, mesh.devices.shape, str(mesh.axis_types), devices


def _fields(value) -> list[tuple[str, object]]:
    slots = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
    names = {name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)} - {"__weakref__"}
    names |= getattr(value, "__dict__", {}).keys()
    return [(name, getattr(value, name)) for name in sorted(names) if hasattr(value, name)]


def _public_fields(value) -> list[tuple[str, object]]:
    """Without what JAX's records remember."""
    return [field for field in _fields(value) if not field[0].startswith("_")]


def _of_tree(tree) -> tuple:
    return tree.num_leaves, tree.node_data(), tree.children()


# {type: value -> what tells it from others}
_KINDS: dict[type, Callable[..., Iterable]] = {
    Tracer: lambda tracer: (tracer.aval,),  # of a body of Pallas: its call's argument
    jax.Array: _of_constant,
    AbstractValue: _public_fields,
    Primitive: _of_primitive,
    jax.tree_util.PyTreeDef: _of_tree,
    Mesh: _of_mesh,
    AbstractMesh: lambda mesh: (str(mesh), str(mesh.abstract_device)),
    PartitionSpec: lambda spec: (repr(spec),),
    NamedSharding: lambda sharding: (sharding.mesh, sharding.spec, sharding.memory_kind),
    SingleDeviceSharding: lambda sharding: ([device.id for device in sharding.device_set], sharding.memory_kind),
    np.dtype: lambda dtype: (str(dtype),),
    np.generic: _of_array,
    np.ndarray: _of_array,
    enum.Enum: lambda member: (member.name,),
    functools.partial: lambda bound: (bound.func, bound.args, bound.keywords),
    types.MethodType: lambda method: (method.__self__, method.__func__),
    types.FunctionType: _of_function,
    types.BuiltinFunctionType: lambda function: (function.__module__, function.__qualname__),
}


@functools.cache
def _describer(kind: type) -> Callable[..., Iterable] | None:
    return next((describe for known, describe in _KINDS.items() if issubclass(kind, known)), None)
