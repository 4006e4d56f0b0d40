"""How a kind of checkpoint stores weights of a format, as data: the tensors of a matrix by name, dtype and shape, what
config.json says of them, and how arrays become a weight and a weight arrays.

Reading and writing files is the caller's (jaxtune/models/files). A tensor is known by its key: what follows the name of
its module, such as `.weight_scale` of `model.layers.0.mlp.up_proj.weight_scale`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from jaxtune.pallas.fitted import Fitted
from jaxtune.pallas.formats.stored import Stored

FLOATS = ("BF16", "F16", "F32")  # dtypes of plain weights, by safetensors' names
# Linears that vLLM multiplies in 16 bits whatever a file says, or that have too few outputs for its kernels. Published
# models in few bits leave them in 16 bits.
SERVED_IN_16_BITS = ("shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")


Settings = Mapping[str, Any]  # quantization_config of a config.json
Config = dict[str, Any]  # the same, to be written
Arrays = Mapping[str, np.ndarray]  # the content of tensors, by key
Of = Callable[[Any], Any]  # gives an array of a weight
Read = Callable[[str], np.ndarray]  # gives the bytes of a tensor, by key


class Header(Protocol):
    """What a file's header says of one tensor. dtype: safetensors' name of it, such as F8_E4M3."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> Path: ...
    @property
    def size_bytes(self) -> int: ...


Headers = Mapping[str, Header]  # by key


class FileTensor(NamedTuple):
    """A tensor to be written.

    Attributes:
      shape, dtype: the tensor's own.
      of: a function that gives its array; its argument is the weight that the tensor is a part of.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    of: Of

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def file_tensor(like: jax.Array | np.ndarray | None, of: Of) -> FileTensor:
    """The FileTensor whose shape and dtype are those of an array (or of its shape alone)."""
    assert like is not None
    return FileTensor(tuple(like.shape), np.dtype(like.dtype), of)


@dataclasses.dataclass(frozen=True)
class Found:
    """A weight in a checkpoint, of which the headers are read and no more.

    Attributes:
      name: of the weight in the model.
      tensors: the headers of its tensors by key.
      shape: of the weight [out, in].
      details: what else the layout found in the headers.
    """

    name: str
    tensors: Headers
    shape: tuple[int, ...]
    details: object = None

    @property
    def where(self) -> str:
        """The file and the name of the weight, with which an error begins."""
        return f"{next(iter(self.tensors.values())).file}: {self.name}"


class Layout:
    """How one kind of checkpoint stores matrices in one format. A subclass declares its names, and implements `says`,
    `describe`, `read`, `tensors` and `config`; the other methods have defaults.

    Attributes:
      title: which checkpoints these are, for errors: "bitsandbytes' in four bits".
      codes: the key of the tensor of codes. codes_dtype: that tensor's dtype, safetensors' name of it.
      others: the keys of the tensors beside it.
      weight: what follows the module's name in the name that the weight has in a model.
      raw: keys of tensors that are read as uint8[bytes], whatever dtype their header says.
      opens: weights are decoded when they are read (`open`), because no model keeps them in this format.
      families: the model types whose checkpoints are stored so; None: all.
      expert_note: what to say where experts are written in this layout; None: nothing.
      digests_pieces: the digest of experts is that of their pieces' digests, not of all tensors.
    """

    title: ClassVar[str]
    codes: ClassVar[str]
    codes_dtype: ClassVar[str]
    others: ClassVar[tuple[str, ...]] = ()
    weight: ClassVar[str] = ".weight"
    raw: ClassVar[tuple[str, ...]] = ()
    opens: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...] | None] = None
    expert_note: ClassVar[str | None] = None
    digests_pieces: ClassVar[bool] = False

    # ---- reading

    def says(self, settings: Settings) -> bool:
        """Whether quantization_config of a config.json says that the weights are stored in this layout."""
        raise NotImplementedError

    def check(self, settings: Settings) -> None:
        """Raises ValueError, with the key and the value, where a quantization_config for which `says` is true asks for
        something that is not supported. By default nothing is refused."""

    def key_of(self, name: str) -> tuple[str, str] | None:
        """(module, key) of a tensor's name; None for a tensor that is not of this layout."""
        keys = sorted((self.codes, *self.others), key=len, reverse=True)
        return next(((name.removesuffix(key), key) for key in keys if name.endswith(key)), None)

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors are a weight of this layout. By default: the codes are there, in their dtype."""
        return self.codes in tensors and tensors[self.codes].dtype == self.codes_dtype

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """The weight that these tensors are.

        Args:
          name: of the weight. tensors: those that `claims` accepted. read: gives the bytes of one by its key, for small
            tensors that say what the others are.
        Raises:
          ValueError: a tensor is missing, or does not fit the others.
        """
        raise NotImplementedError

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> Stored:
        """The weight, its leaves numpy arrays.

        Args:
          arrays: the content of found.tensors. dtype_name: the dtype that the model computes in.
        Raises:
          ValueError: values that cannot be right.
        """
        raise NotImplementedError

    def open(self, weight: Stored, dtype: str) -> jax.Array:
        """The array of a weight, where `opens`."""
        return weight.decode(dtype)

    def joining(self, pieces: Sequence[Found], per_expert: int) -> str | None:
        """Why experts' matrices, `per_expert` for each expert, cannot become one tensor; or None."""
        del pieces, per_expert
        return None

    def digested(self, found: Found) -> list[tuple[str, str]]:
        """(label, key) of each tensor in the order in which the base's digest takes them. Adapters record that digest:
        a layout never changes it."""
        keys = [key for key in (self.codes, *self.others) if key in found.tensors]
        return [(found.tensors[key].name, key) for key in keys]

    # ---- writing

    def holds(self, weight: Stored) -> bool:
        """Whether this weight is written in this layout; asked of a format's layouts in their order."""
        del weight
        return True

    def splitting(self, weight: Stored, rows: int) -> str | None:
        """Why experts [E, out, in] cannot be written in pieces [rows, in], or None."""
        del weight, rows
        return None

    def noted(self, weight: Stored, make: Callable[[], Stored]) -> float | None:
        """A number of the weight that headers of files hold, for `tensors`. weight: its shapes; make: gives it."""
        del weight, make

    def tensors(self, weight: Stored, noted: float | None) -> dict[str, FileTensor]:
        """{key: tensor} of what is written of a weight [out, in], of which no more than the shapes need be known."""
        raise NotImplementedError

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """quantization_config of config.json.

        Args:
          weights: all that are in this format. plain: names of the linears that are not quantised, the head's among
            them. dtype: that the model computes in.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Export:
    """A format as a target of `jaxtune export`: every matrix of the layers is written in it.

    Attributes:
      name: of --to. title: what it is, for the command's help.
      keeps: linears whose name ends so stay in 16 bits.
      without_experts: why models with experts are refused; None: they are not.
    """

    name: str
    title: str
    keeps: tuple[str, ...] = ()
    without_experts: str | None = None


_SLACK = Fitted({("H200", "xla"): (0.12, "FP8's, for formats that nobody has measured")})


@dataclasses.dataclass(frozen=True)
class Format:
    """All that jaxtune knows of a format of weights beside its kernels. The table is formats.FORMATS.

    Attributes:
      word: its name: the value of model.load_in, and what a checkpoint is said to be stored in.
      title: it in words: "in four bits (NF4)".
      kinds: its classes. The first one's `encode(array)` makes it of 16-bit weights.
      layouts: how checkpoints store it; a weight is written in the first that `holds` it.
      flag: the argument of Unsloth's from_pretrained that asks for it: "load_in_4bit".
      slack: the share of the weights' bytes that the device's allocator loses on them, because their 16-bit originals
        leave holes of other sizes; measured by loading an 8B model on a device.
      export: how it is exported; None: it is not.
    """

    word: str
    title: str
    kinds: tuple[type[Stored], ...]
    layouts: tuple[Layout, ...]
    flag: str | None = None
    slack: Fitted[float] = _SLACK
    export: Export | None = None

    def encode(self, array: jax.Array) -> Stored:
        """A weight [..., out, in] in this format."""
        return self.kinds[0].encode(array)

    def layout(self, weight: Stored) -> Layout:
        """The layout that a weight is written in."""
        return next(layout for layout in self.layouts if layout.holds(weight))
