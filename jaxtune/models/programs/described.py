"""Digests of what decides a compiled program: equal in every process for equal values of this code, different for
others. What code of the user's could change is not described.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtune.system import invocation, private_jax

# Packages whose code a key has by its versions or sources.
PACKAGES = frozenset({"jaxtune", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes"})
_STANDARD = frozenset({"builtins", "collections", "functools", "math", "operator", "types", "typing"})
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...)})
# Equal layers have equal ones, which are read once.
_BY_VALUE = frozenset({jax.tree_util.PyTreeDef, jax.ShapeDtypeStruct, NamedSharding, SingleDeviceSharding})
_LONG = 64  # bytes
_INNER = ("func", "__func__", "fget", "__wrapped__")  # attributes with what a partial, method, property or wrapper runs
_WRAPPERS = 16  # around a function; more are no wrappers


class Undescribed(TypeError):
    """A value that nothing tells from others."""


class Digests:
    """Digests of values that do not change meanwhile; each object is read once."""

    def __init__(self):
        self._digests: dict[Hashable, tuple[bytes, object]] = {}  # the value is kept alive, as its id may be the key
        self._within: set[Hashable] = set()

    def of(self, value: object) -> bytes:
        """At most 64 bytes for a value: numbers, text, containers, arrays, shapes with shardings, trees, meshes,
        dataclasses, objects, and functions with what they close over. `Undescribed` for code of other packages, arrays
        on devices, cycles, and whatever else it does not know.
        """
        kind = type(value)
        if kind in _PLAIN:
            return _joined(kind.__name__, repr(value).encode())
        key = (kind, value) if kind in _BY_VALUE else id(value)
        if key in self._digests:
            return self._digests[key][0]
        if key in self._within:
            raise Undescribed(f"{kind.__name__} contains itself")
        self._within.add(key)
        try:
            name, parts = _described(value)
            described = [self.of(part) for part in parts]
        finally:
            self._within.remove(key)
        if isinstance(value, set | frozenset):
            described.sort()
        self._digests[key] = _joined(name, *described), value
        return self._digests[key][0]


def _described(value) -> tuple[str, Iterable]:
    """(the name of its kind, what tells it from others of that kind)."""
    kind = type(value)
    if (describe := _describer(kind)) is not None:
        return _name(kind), describe(value)
    if callable(value) and (name := _global_name(value)) is not None:
        return "global", (name,)
    if isinstance(value, type):
        return "type", (_name(value),)
    if isinstance(value, types.FunctionType):
        return "function", _of_function(value)
    if isinstance(value, Mapping):
        return _name(kind), (item for pair in value.items() for item in pair)
    if isinstance(value, tuple | list | set | frozenset):
        return _name(kind), value
    if dataclasses.is_dataclass(value):
        return _name(kind), [getattr(value, name) for name in _fields(kind)]
    names = [name for name in _slots(kind) if hasattr(value, name)]
    attributes = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    if not attributes and kind.__module__.split(".")[0] != "jaxtune":  # perhaps of C++, whose fields nobody sees
        raise Undescribed(f"a {kind.__module__}.{kind.__qualname__}")
    cached = {name for name in attributes if isinstance(getattr(kind, name, None), functools.cached_property)}
    return _name(kind), [item for pair in sorted(attributes.items()) if pair[0] not in cached for item in pair]


def _of_function(function: types.FunctionType) -> tuple:
    module = function.__globals__.get("__name__")  # __module__ is a wrapped function's
    if not _is_known(module):
        raise Undescribed(f"{module}.{function.__qualname__}")
    closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    code = _code(function.__code__)
    return code, module, function.__qualname__, function.__defaults__, function.__kwdefaults__, closed_over


def _joined(kind: str, *parts: bytes) -> bytes:
    """What nothing else gives: lengths are told, and what is long is hashed."""
    joined = b"".join([b"%d:%s" % (len(part), part) for part in (kind.encode(), *parts)])
    return joined if len(joined) < _LONG else b"#" + hashlib.sha256(joined).digest()


class _Known:  # never instantiated; a dictionary of the module would be looked through, too
    # What `replaced` found to run no code of the user's, by ids of the object and of the code that it runs; kept alive.
    safe: ClassVar[dict[tuple[int, ...], object]] = {}


def replaced(package: str) -> str | None:
    """Where a module, class or table of a package holds a function of the user's, whose code no digest tells; None:
    nowhere. The first look takes a fifth of a second for jax, later ones a tenth of that, and none in a command that
    has imported no code of the user's.
    """
    if not _has_code_of_user():
        return None
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != package:
            continue
        for label, item in list(vars(module).items()):
            table = isinstance(item, dict) and not label.startswith("__")
            own = isinstance(item, type) and item.__module__ == name
            for held in list((item if table else vars(item)).values()) if table or own else (item,):
                if not _is_called(type(held)):
                    continue
                runs = list(_runs(held))
                codes = [getattr(function, "__code__", function) for function in runs]
                if (key := (id(held), *map(id, codes))) in _Known.safe:
                    continue
                if any(_is_of_user(function, package) for function in runs):
                    return f"{name}.{label}"
                _Known.safe[key] = held, codes
    return None


def _has_code_of_user() -> bool:
    """Whether this process may have run a module that is neither installed nor jaxtune's, such as rewards."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None) or ""
    by_name = spec is not None and _top(spec.name) == "jaxtune"
    if not invocation.is_command() or not (by_name or Path(file).parent == Path(sys.executable).parent):
        return True
    tops = {_top(name) for name in list(sys.modules)} - PACKAGES - {"__main__"}
    return not all(map(_is_of_others, tops))


@functools.cache
def _is_of_others(top: str) -> bool:
    """Whether a module is installed, or came from no file, and is not where Python lets its users change others."""
    hooks = {"sitecustomize", "usercustomize"}
    return top not in hooks and (getattr(sys.modules.get(top), "__file__", None) is None or _is_installed(top))


@functools.cache
def _is_called(kind: type) -> bool:
    """Whether objects of this type, which are no classes, run code of Python."""
    called = Callable | classmethod | property | functools.cached_property
    return issubclass(kind, called) and not issubclass(kind, type | types.BuiltinFunctionType)


def _runs(held: object) -> Iterator[types.FunctionType | type]:
    """What calling an object runs: functions, through jax.jit and other wrappers, or the object's class."""
    for _ in range(_WRAPPERS):
        if isinstance(held, types.FunctionType):
            yield held
            held = vars(held).get("__wrapped__")
        elif not _is_called(type(held)):
            return
        else:
            yield type(held)
            inner = (getattr(held, name, None) for name in _INNER)
            held = next((function for function in inner if function is not None), None)


def _is_of_user(code: types.FunctionType | type, package: str) -> bool:
    if isinstance(code, type):
        top, generated = _top(code.__module__), code.__module__ not in sys.modules  # the latter: of C++
    else:
        top, generated = _top(code.__globals__.get("__name__")), code.__code__.co_filename.startswith("<")
    if top == "__main__" or top == package or generated:  # methods of dataclasses are generated
        return top == "__main__"
    return top not in PACKAGES and not _is_installed(top)  # jaxtune may be a clone


@functools.cache
def _top(module: object) -> str:
    return str(module).partition(".")[0]


@functools.cache
def _is_installed(top: str) -> bool:
    file = getattr(sys.modules.get(top), "__file__", None)
    if top in sys.stdlib_module_names or file is None:
        return top in sys.stdlib_module_names
    path = Path(file)
    libraries = {Path(module.__file__ or "").parents[level] for module, level in ((jax, 1), (enum, 0))}
    if libraries & set(path.parents) or {"site-packages", "dist-packages"} & set(path.parts):
        return True
    folder = path.parents[1] if path.stem == "__init__" else path.parent
    return any(folder.glob("*.dist-info"))  # of pip install --target


@functools.cache
def _is_known(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in PACKAGES | _STANDARD


@functools.cache
def _name(kind: type) -> str:
    if not _is_known(kind.__module__) or "<locals>" in kind.__qualname__:
        raise Undescribed(f"{kind.__module__}.{kind.__qualname__}")
    return f"{kind.__module__}.{kind.__qualname__}"


def _global_name(value: object) -> str | None:
    """Where a known module has this very object, such as a jitted function; None if none has."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(module, str) or not isinstance(name, str) or not _is_known(module):
        return None
    item: object = sys.modules.get(module)
    for part in name.split("."):
        item = getattr(item, part, None)
    return f"{module}.{name}" if item is value else None


@functools.cache
def _slots(kind: type) -> list[str]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    return [name for name in names if not name.startswith("__")]


@functools.cache
def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _code(code: types.CodeType) -> tuple:
    """Tells functions of one module apart; the module's version or source tells the rest."""
    constants = [_code(item) if isinstance(item, types.CodeType) else item for item in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_firstlineno


def _of_tree(tree) -> tuple:
    return tree.num_leaves, tree.node_data(), tree.children()


def _of_array(array: np.ndarray) -> tuple:
    if array.dtype.hasobject:
        raise Undescribed("an array of objects")
    return str(array.dtype), array.shape, array.tobytes()


def _of_mesh(mesh: Mesh) -> tuple:
    devices = [(device.id, device.device_kind) for device in mesh.devices.flat]
    return mesh.axis_names, mesh.devices.shape, str(mesh.axis_types), devices


def _undescribed(value: object) -> tuple:
    raise Undescribed(f"a {type(value).__name__}")


# {type: value -> what tells it from others}
_KINDS: dict[type, Callable[..., Iterable]] = {
    jax.Array: _undescribed,
    private_jax.core.Tracer: _undescribed,
    jax.ShapeDtypeStruct: lambda shape: (shape.shape, shape.dtype, shape.weak_type, shape.sharding),
    jax.tree_util.PyTreeDef: _of_tree,
    Mesh: _of_mesh,
    AbstractMesh: lambda mesh: (str(mesh), str(mesh.abstract_device)),
    PartitionSpec: lambda spec: (repr(spec),),
    NamedSharding: lambda sharding: (sharding.mesh, sharding.spec, sharding.memory_kind),
    SingleDeviceSharding: lambda sharding: ([device.id for device in sharding.device_set], sharding.memory_kind),
    np.dtype: lambda dtype: (str(dtype),),
    np.generic: lambda number: (str(number.dtype), number.tobytes()),
    np.ndarray: _of_array,
    enum.Enum: lambda member: (member.name,),
    functools.partial: lambda bound: (bound.func, bound.args, bound.keywords),
    types.MethodType: lambda method: (method.__self__, method.__func__.__qualname__),
}


@functools.cache
def _describer(kind: type) -> Callable[..., Iterable] | None:
    if kind.__module__.split(".")[0] == "jaxtune" and hasattr(kind, "described"):
        return kind.described
    return next((describe for known, describe in _KINDS.items() if issubclass(kind, known)), None)
