"""Layouts: how one kind of checkpoint stores the weights of a format, as data.

A layout describes the tensors of a matrix by name, dtype and shape, the entry of config.json, and how arrays become a
weight and a weight becomes arrays. The caller reads and writes files (jaxtune/models/files). A tensor is identified by
its key, which follows the module's name: `.weight_scale` is the key of `model.layers.0.mlp.up_proj.weight_scale`.
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
# Linears that vLLM always multiplies in 16 bits, or that have too few outputs for its kernels. Published quantised
# models leave them in 16 bits.
SERVED_IN_16_BITS = ("shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")


Settings = Mapping[str, Any]  # quantization_config of a config.json
Config = dict[str, Any]  # the same, to be written
Arrays = Mapping[str, np.ndarray]  # the content of tensors, by key
Of = Callable[[Any], Any]  # takes a weight and returns the array of one of its tensors
Read = Callable[[str], np.ndarray]  # takes a tensor's key and returns its bytes


class Header(Protocol):
    """A tensor's entry in the header of a safetensors file (models/files/shards.TensorEntry is one): its name in the
    file, its dtype by safetensors' name, such as F8_E4M3, its shape, the path of the file, and the bytes of its
    data."""

    @property
    def name(self) -> str:
        """The tensor's name in the file."""
        ...

    @property
    def dtype(self) -> str:
        """Its dtype by safetensors' name, such as F8_E4M3."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes."""
        ...

    @property
    def file(self) -> Path:
        """The path of the safetensors file that has it."""
        ...

    @property
    def size_bytes(self) -> int:
        """The bytes of its data."""
        ...


Headers = Mapping[str, Header]  # by key


class FileTensor(NamedTuple):
    """A tensor that is to be written to a file."""

    shape: tuple[int, ...]  # its dimensions
    dtype: np.dtype  # its dtype
    of: Of  # takes the weight that the tensor is a part of, and returns the tensor's array

    @property
    def size_bytes(self) -> int:
        """The number of its bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def file_tensor(like: jax.Array | np.ndarray | None, of: Of) -> FileTensor:
    """The FileTensor whose shape and dtype are those of `like`, an array or its jax.ShapeDtypeStruct. of: takes the
    weight and returns the array that is written."""
    assert like is not None
    return FileTensor(tuple(like.shape), np.dtype(like.dtype), of)


@dataclasses.dataclass(frozen=True)
class Found:
    """A weight in a checkpoint of which only the headers have been read."""

    name: str  # of the weight in the model
    tensors: Headers  # the headers of its tensors by key
    shape: tuple[int, ...]  # of the weight, [out, in]
    details: object = None  # what else the layout read from the headers, for its `read`

    @property
    def where(self) -> str:
        """The file and the name of the weight, for the beginning of error messages."""
        return f"{next(iter(self.tensors.values())).file}: {self.name}"


class Layout:
    """How one kind of checkpoint stores matrices in one format, read and written by jaxtune/models/files.

    A subclass sets the class attributes and implements `recognises`, `describe`, `read`, `tensors` and `config`; the
    other methods have defaults. A checkpoint may store an experts' matrix [E, out, in] in pieces, one or more matrices
    for each expert: `joining` and `splitting` return the reason why pieces cannot be joined or written, or None if they
    can. `header_number` returns a number that must be known before a file's header is written.
    """

    title: ClassVar[str]  # which checkpoints these are, for errors, such as "bitsandbytes' in four bits"
    codes: ClassVar[str]  # the key of the tensor of codes
    codes_dtype: ClassVar[str]  # the dtype of that tensor, by safetensors' name
    others: ClassVar[tuple[str, ...]] = ()  # the keys of the tensors beside it
    weight: ClassVar[str] = ".weight"  # the end of the weight's name in a model, after the module's name
    # keys of tensors that are read as uint8[bytes], whatever dtype their header has
    raw: ClassVar[tuple[str, ...]] = ()
    # whether weights are decoded when they are read (`decoded`), because no model keeps this format
    decoded_on_load: ClassVar[bool] = False
    # the model types whose checkpoints are stored like this; None: all
    families: ClassVar[tuple[str, ...] | None] = None
    # a warning that is given when experts are written in this layout, such as who cannot load them; None: none
    expert_note: ClassVar[str | None] = None
    # whether the base model's digest, a checksum by which an adapter's file recognises the model that it was trained
    # over, includes one digest for each piece of an experts' matrix (True) or those of all tensors of all pieces, in
    # order (False); it must never change for an existing layout
    digests_pieces: ClassVar[bool] = False

    # ---- reading

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that the weights are stored in this
        layout. Each layout implements it."""
        raise NotImplementedError

    def check(self, settings: Settings) -> None:
        """Raises ValueError, with key and value, if a quantization_config (`settings`) that `recognises` accepts has
        an unsupported setting.

        By default every setting is accepted.
        """

    def key_of(self, name: str) -> tuple[str, str] | None:
        """(module, key) of a tensor's name; None for a name that no tensor of this layout has."""
        keys = sorted((self.codes, *self.others), key=len, reverse=True)
        return next(((name.removesuffix(key), key) for key in keys if name.endswith(key)), None)

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, given by their headers, are a weight of this layout. By default: there are codes,
        in the right dtype."""
        return self.codes in tensors and tensors[self.codes].dtype == self.codes_dtype

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the weight that a module's tensors store, before their content is read.

        Args:
          name: of the weight.
          tensors: {key: header}, which `claims` accepted.
          read: returns the bytes of a tensor by its key, for small tensors that describe the others.
        Returns:
          the weight's name, headers and shape, and in `details` whatever else `read` of the layout needs.
        Raises:
          ValueError: a tensor is missing, or does not fit the others.
        """
        raise NotImplementedError

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> Stored:
        """The weight, with numpy arrays as leaves.

        Args:
          found: from `describe`.
          arrays: the content of found.tensors.
          dtype_name: the dtype that the model computes in.
        Raises:
          ValueError: values that cannot be right.
        """
        raise NotImplementedError

    def decoded(self, weight: Stored, dtype: str) -> jax.Array:
        """The array of a weight in `dtype`, for layouts with `decoded_on_load`; in the model's order of axes, where the
        checkpoint has another."""
        return weight.decode(dtype)

    def joining(self, pieces: Sequence[Found], per_expert: int) -> str | None:
        """The reason why the matrices of a layer's experts, which a checkpoint stores one by one, cannot become one
        tensor [E, out, in] (Stored.joined), or None; by default they can. The loader then refuses the checkpoint with
        this reason.

        Args:
          pieces: the matrices as `describe` found them, in order.
          per_expert: how many of them are one expert's, such as 2 for gate and up.
        """
        del pieces, per_expert
        return None

    def digested(self, found: Found) -> list[tuple[str, str]]:
        """(label, key) of each tensor of the weight `found`, in the order in which the digest of the base model
        includes them. The label is the name that enters the digest beside the tensor's content.

        Adapters record that digest to recognise their base, so a layout must never change it.
        """
        keys = [key for key in (self.codes, *self.others) if key in found.tensors]
        return [(found.tensors[key].name, key) for key in keys]

    # ---- writing

    def can_store(self, weight: Stored) -> bool:
        """Whether this weight can be written in this layout, by default always. A format's layouts are asked in order,
        and the first that says yes is used."""
        del weight
        return True

    def splitting(self, weight: Stored, rows: int) -> str | None:
        """The reason why `weight`, experts [E, out, in], cannot be written as separate matrices of `rows` rows each,
        which Stored.piece would cut from it, or None. By default they can."""
        del weight, rows
        return None

    def header_number(self, weight: Stored, make: Callable[[], Stored]) -> float | None:
        """A number of the weight that is part of the files' headers or sizes, and must therefore be known before the
        weights are written; None if there is no such number. It is given to `tensors`.

        Args:
          weight: the weight, or only its shapes.
          make: computes the weight.
        """
        del weight, make

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """{key: tensor} of what is written for a weight [out, in], of which only the shapes need be known: headers are
        written before the weights are computed. Each layout implements it.

        number: from `header_number`; None if headers have no number.
        """
        raise NotImplementedError

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """The entry quantization_config of config.json.

        Args:
          weights: all weights in this format.
          plain: names of the linears that are not quantised, the head's among them.
          dtype: the dtype that the model computes in.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Export:
    """A format as a target of `jaxtune export`, in which every matrix of the layers is written."""

    name: str  # the value of --to
    title: str  # its description in the command's help
    keeps: tuple[str, ...] = ()  # ends of the names of linears that stay in 16 bits
    without_experts: str | None = None  # the reason why models with experts are refused; None: they are not


_SLACK = Fitted({("H200", "xla"): (0.12, "FP8's, for formats that have not been measured")})


@dataclasses.dataclass(frozen=True)
class Format:
    """Everything that jaxtune knows about a format of weights, except its kernels. The table is formats.FORMATS."""

    name: str  # the value of model.load_in, by which messages and records call the format
    title: str  # a phrase such as "in four bits (NF4)"
    kinds: tuple[type[Stored], ...]  # its classes; the `encode(array)` of the first one quantises 16-bit weights
    layouts: tuple[Layout, ...]  # how checkpoints store it; a weight is written in the first one that `can_store` it
    # the argument of Unsloth's from_pretrained that asks for it, such as "load_in_4bit", or None
    flag: str | None = None
    # the share of the weights' bytes that the device's allocator loses, because the 16-bit originals leave holes of
    # other sizes; measured by loading an 8B model
    slack: Fitted[float] = _SLACK
    export: Export | None = None  # how it is exported; None: it is not

    def encode(self, array: jax.Array) -> Stored:
        """Quantises a weight, `array` [..., out, in], to this format: a Stored of the first of `kinds`."""
        return self.kinds[0].encode(array)

    def layout(self, weight: Stored) -> Layout:
        """The layout in which a weight is written: the first that can store it."""
        return next(layout for layout in self.layouts if layout.can_store(weight))
