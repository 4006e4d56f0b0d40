"""The interface Layout, which says how one kind of checkpoint stores the quantised weights of a format, and Format,
which lists what jaxtune knows about a format.

A layout describes the tensors that store a weight by name, dtype and shape, and the entry quantization_config of
config.json; it makes a weight from the arrays of its tensors, and these arrays from a weight. It opens no file:
jaxtune/models/files reads and writes them. Header is what a layout sees of a tensor before the tensor is read, Found a
weight of which only the headers were read, and FileTensor a tensor to be written (`file_tensor` makes one);
`check_weights` checks what two layouts of compressed-tensors have in common. Export is a format as a target of `jaxtune
export`. A tensor is identified by its key, the end of its name after the module's name: `.weight_scale` is the key of
`model.layers.0.mlp.up_proj.weight_scale`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np

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
    """A tensor's entry in the header of a safetensors file (models/files/headers.TensorEntry is one): its name in the
    file, its dtype by safetensors' name, such as F8_E4M3, its shape, the path of the file, and the number of bytes of
    its data. A layout sees of a tensor no more than this before it is read."""

    @property
    def name(self) -> str:
        """The tensor's name in the file, which errors name; layouts look tensors up by the keys of Headers."""
        ...

    @property
    def dtype(self) -> str:
        """The tensor's dtype by safetensors' name, such as F8_E4M3, by which a layout checks that the tensor is one
        that it reads."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which the file stores the tensor: that of packed codes is not the weight's."""
        ...

    @property
    def file(self) -> Path:
        """The path of the safetensors file that contains the tensor, with which errors begin."""
        ...

    @property
    def size_bytes(self) -> int:
        """The number of bytes that the tensor's data has in the file; with the dtype it tells whether a tensor has the
        number of elements that a layout expects."""
        ...


Headers = Mapping[str, Header]  # by key


class FileTensor(NamedTuple):
    """A tensor that is to be written to a file: its shape and dtype, which the file's header needs before the values
    have been computed, and the function `of`, which returns the tensor's array later. Layout.tensors makes those of
    quantised weights, jaxtune/models/files those of plain ones, and jaxtune/export/w4a16.py those of its int4 codes and
    scales. It has no name: the key of the dictionary that has it names it."""

    shape: tuple[int, ...]  # its dimensions
    dtype: np.dtype  # its dtype
    # takes the weight that the tensor stores, or helps to store (a quantised one, if Layout.tensors made this), and
    # returns the tensor's array
    of: Of

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the tensor's data, from its shape and dtype. Sums of it decide how a checkpoint is
        divided into files and whether the disk has room; the offsets in a file's header are computed without it."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def file_tensor(like: jax.Array | np.ndarray | None, of: Of) -> FileTensor:
    """Makes the FileTensor whose shape and dtype are those of `like`, an array that is written as the weight has it, or
    its jax.ShapeDtypeStruct while the weight has not been computed. of: takes the quantised weight and returns the
    array that is written. The type of `like` allows None only because optional fields of weights have it; None fails an
    assertion. Layout.tensors of most layouts makes its FileTensors by it."""
    assert like is not None
    return FileTensor(tuple(like.shape), np.dtype(like.dtype), of)


def check_weights(settings: Settings, wanted: Mapping[str, object]) -> None:
    """Raises ValueError, with key and value, if a quantization_config of compressed-tensors (`settings`) has a group
    whose weights are stored in another way than a layout reads, or a quantised key/value cache. The layouts
    CompressedTensors of MXFP4 and of NVFP4 call it in `check`.

    wanted: {key, such as "num_bits": the only value that is supported}; a key that a group lacks is taken to have that
    value. Only the weights' settings of a group are checked, not those of activations."""
    for name, group in (settings.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        for key, value in wanted.items():
            if weights.get(key, value) != value:
                raise ValueError(
                    f"config.json: quantization_config.config_groups.{name}.weights.{key} = {weights[key]!r}: of "
                    f"{settings['format']} only {value!r} is supported; use the 16-bit original"
                )
    if settings.get("kv_cache_scheme") is not None:
        raise ValueError(
            f"config.json: quantization_config.kv_cache_scheme = {settings['kv_cache_scheme']!r}: only null is "
            "supported; use the 16-bit original"
        )


@dataclasses.dataclass(frozen=True)
class Found:
    """A quantised weight in a checkpoint of which only the headers have been read: what Layout.describe returns, and
    Layout.read takes with the content of the tensors."""

    name: str  # the weight's name in the model
    tensors: Headers  # the headers of the tensors that store it, by key
    shape: tuple[int, ...]  # the decoded weight's shape in the model: [out, in], or [E, in, out] for gpt-oss's experts
    # what the same layout's `read` needs beside the arrays, such as the size of FP8's blocks; None: nothing
    details: object = None

    @property
    def where(self) -> str:
        """The beginning of error messages about the weight, "FILE: NAME": the path of the file that contains the first
        of its tensors, and its name in the model."""
        return f"{next(iter(self.tensors.values())).file}: {self.name}"


class Layout:
    """How one kind of checkpoint stores weight matrices in one quantised format. jaxtune/models/files reads and writes
    checkpoints by it. A subclass sets the class attributes and implements `recognises`, `describe`, `read`, `tensors`
    and `config`; the other methods have defaults.

    To read, the loader asks `recognises` whether a config.json names this layout, and `check` whether its settings are
    supported. Whatever config.json names, it then searches the tensors for those of every layout: it divides their
    names into module and key (`key_of`), asks `claims` whether a module's tensors are a quantised weight, and makes the
    weight with `describe` (from headers) and `read` (from arrays); `decoded` returns its array if the layout is
    `decoded_on_load`. `digested` lists the tensors that enter the base model's checksum. To write, it uses the first
    layout of a format that `can_store` the weight, and `tensors` and `config`; `header_number` returns a number that
    must be known before a file's header is written.

    A checkpoint may store an experts' matrix [E, out, in] in pieces, which are separate matrices, one or more for each
    expert. `joining` and `splitting` return the reason why pieces cannot be joined to one tensor, or cut from it, or
    None if they can.
    """

    title: ClassVar[str]  # a phrase that names such checkpoints in errors, such as "bitsandbytes' in four bits"
    codes: ClassVar[str]  # the key of the tensor that has the weight's codes, such as ".weight"
    codes_dtype: ClassVar[str]  # the dtype of that tensor, by safetensors' name
    others: ClassVar[tuple[str, ...]] = ()  # the keys of the tensors that accompany the codes, such as scales
    # the keys of tensors that belong to no weight, such as scales of a key/value cache, which the loader leaves out
    # wherever they are, and no file is written with
    left_out: ClassVar[tuple[str, ...]] = ()
    weight: ClassVar[str] = ".weight"  # what follows the module's name in the weight's name in the model
    # keys of tensors that are read as uint8[bytes], whatever dtype their header has
    raw: ClassVar[tuple[str, ...]] = ()
    # True: the loader decodes weights when it reads them (`decoded`), unless `kept_on_request`; False: the model keeps
    # them quantised
    decoded_on_load: ClassVar[bool] = False
    # of a layout that is `decoded_on_load`: True: weights stay quantised after all if model.load_in names their format.
    # The layout then has `encode`
    kept_on_request: ClassVar[bool] = False
    # True: files store the matrices of all experts of a layer as one weight; False: as one weight for each of them
    whole_experts: ClassVar[bool] = False
    # the model types whose checkpoints are stored like this; None: all
    families: ClassVar[tuple[str, ...] | None] = None
    # a warning that is given when experts are written in this layout, such as which programs cannot load them; None: no
    # warning
    expert_note: ClassVar[str | None] = None
    # whether the base model's digest, a checksum by which an adapter's file recognises the model that it was trained
    # over, includes one digest for each piece of an experts' matrix (True) or those of all tensors of all pieces, in
    # order (False); it must never change for an existing layout
    digests_pieces: ClassVar[bool] = False

    # ---- reading

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a checkpoint's config.json, says that the weights are stored
        in this layout. registry.weights_stored_in asks the layouts in the order of FORMATS, leaving out those whose
        `families` lack the model type, and takes the first that returns True; if none does, the checkpoint is refused.
        The planner learns a checkpoint's format by that. The loader finds the tensors, and so their format, by `claims`
        alone, and only compares the two (quant.check_stored). Each layout implements it."""
        raise NotImplementedError

    def check(self, settings: Settings) -> None:
        """Checks `settings`, a quantization_config that `recognises` accepts. It raises ValueError, whose message names
        the key and its value, for a setting that is not supported. registry.stated_layout calls it, for plans and
        before a checkpoint's tensors are read. This method accepts every setting; layouts override it."""

    def key_of(self, name: str) -> tuple[str, str] | None:
        """Divides the name of a tensor in a file into (module, key): the key is the longest of `codes` and `others`
        with which the name ends, and the module is what precedes it. Returns None for a name that ends with none of
        them. The loader collects the tensors of one weight with it."""
        keys = sorted((self.codes, *self.others), key=len, reverse=True)
        return next(((name.removesuffix(key), key) for key in keys if name.endswith(key)), None)

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, store a weight in this layout. By default they do if they include
        the codes, in the dtype `codes_dtype`. A layout whose codes could be those of another one also looks for the
        tensors beside them."""
        return self.codes in tensors and tensors[self.codes].dtype == self.codes_dtype

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the weight that a module's tensors store, before their content is read. Each layout implements it.
        The loader of checkpoints calls it.

        Args:
          name: the weight's name in the model.
          tensors: {key: header}, for which `claims` returned True.
          read: a function that takes a tensor's key and returns its bytes, for a small tensor that says how the others
            are stored.
        Returns:
          the weight's name, headers and shape, and in `details` what this layout's `read` needs besides.
        Raises:
          ValueError: a tensor is missing, or its dtype or shape does not fit the others.
        """
        raise NotImplementedError

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> Stored:
        """Makes the quantised weight, with numpy arrays as leaves, from the content of its tensors. Each layout
        implements it. The loader of checkpoints calls it.

        Args:
          found: what `describe` returned for the weight.
          arrays: {key: array}, the content of the tensors in `found`.
          dtype_name: the dtype that the model computes in, to which the weight is decoded by default.
        Raises:
          ValueError: an array has values that cannot be right, such as a negative scale.
        """
        raise NotImplementedError

    def decoded(self, weight: Stored, dtype: str) -> jax.Array:
        """The decoded array of `weight` in the dtype `dtype`, as the model has it. The loader calls it if the layout is
        `decoded_on_load`, or a router that files have quantised."""
        return weight.decode(dtype)

    def encode(self, array: jax.Array) -> Stored:
        """Quantises a weight that the model has, `array`, to what `read` makes of files in this layout. Plans of models
        that are not loaded take the shapes from it, and exports in the layout the numbers. A layout with
        `kept_on_request` implements it; for others Format.encode is the function."""
        raise NotImplementedError

    def joining(self, pieces: Sequence[Found], per_expert: int) -> str | None:
        """The reason why the matrices of a layer's experts, which a checkpoint stores one by one, cannot become one
        tensor [E, out, in] (Stored.joined), such as blocks that would cross from one matrix into the next; None if they
        can, as by default. The loader refuses the checkpoint with a reason.

        Args:
          pieces: the matrices, as `describe` found them, in the order of their rows in the tensor.
          per_expert: how many consecutive ones are the rows of one expert, such as 2 for gate and up.
        """
        del pieces, per_expert
        return None

    def digested(self, found: Found) -> list[tuple[str, str]]:
        """(label, key) of each tensor of the weight `found`, in the order in which the digest of the base model
        includes them. The label is the name that enters the digest beside the tensor's content, by default the tensor's
        name in the file. By default the codes come first, and then those of `others` that the weight has.

        Adapters record that digest to recognise their base, so a layout must never change it.
        """
        keys = [key for key in (self.codes, *self.others) if key in found.tensors]
        return [(found.tensors[key].name, key) for key in keys]

    # ---- writing

    def can_store(self, weight: Stored) -> bool:
        """Whether `weight` can be written in this layout; by default True. A format may have several layouts, such as
        one for each program that writes it; Format.layout asks them in order and takes the first that returns True; if
        none does, it raises StopIteration. The layouts of NVFP4 and that of gpt-oss override it. `weight` may have
        shapes (jax.ShapeDtypeStruct) in place of its arrays, because files' headers are planned so; an override must
        not read their numbers."""
        del weight
        return True

    def differing(self, weights: Sequence[Stored]) -> str | None:
        """The reason why a single quantization_config cannot describe all of `weights`, the weights of a model that are
        written in this layout, such as scales of different kinds; None if it can, as by default. Saving and exporting a
        model fails with a reason (quant.check_written). `weights` may have shapes (jax.ShapeDtypeStruct) in place of
        their arrays."""
        del weights

    def splitting(self, weight: Stored, rows: int) -> str | None:
        """The reason why `weight`, experts [E, out, in], cannot be written as separate matrices, such as blocks that
        would be cut, or None if it can, as by default. rows: the number of rows of each matrix, which Stored.piece cuts
        from the tensor. Writing a checkpoint fails with a reason."""
        del weight, rows
        return None

    def header_number(self, weight: Stored, make: Callable[[], Stored]) -> float | None:
        """Returns a number of the weight that is part of the files' headers or sizes, and must therefore be known
        before the weights are written, such as NF4's offset of double quantisation; None, as by default, if the layout
        has no such number. It is passed to `tensors`. For experts that are written in pieces it is asked for once, of
        the first piece, and the number is passed for all.

        Args:
          weight: the weight, or the same object with shapes (jax.ShapeDtypeStruct) in place of its arrays.
          make: a function without arguments that quantises the weight and returns it with its arrays, for experts the
            whole tensor; it is called only if the number is needed and `weight` has only shapes.
        """
        del weight, make

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """Describes the tensors of a file that store `weight`, a matrix [out, in], or of gpt-oss experts [E, out, in]:
        {key: FileTensor}. A FileTensor has a shape, a dtype, and a function that later takes the same weight with its
        arrays and returns the array to write. A file's header is written before the weights have been quantised, so
        `weight` may contain shapes and dtypes (jax.ShapeDtypeStruct) instead of arrays. Each layout implements it. The
        code that writes checkpoints calls it.

        number: what `header_number` returned; None if the layout has no such number.
        """
        raise NotImplementedError

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """Returns the entry quantization_config of the config.json of a checkpoint whose weights are stored in this
        layout. Each layout implements it. The entry is written with a model that is saved or exported.

        Args:
          weights: all weights in this format; () from the export of gpt-oss.
          plain: the names of the linears that are not quantised, including the head's.
          dtype: the name of the dtype that the model computes in.
        """
        raise NotImplementedError

    def rounding_activations(self, config: Config) -> Config:
        """Returns a copy of `config`, the entry quantization_config that the method `config` returned, with what makes
        servers round activations to the format too. The export mxfp4-mxfp4 calls it. The layout CompressedTensors of
        MXFP4 implements it; others raise NotImplementedError: FP8's entry says so always, and NVFP4 stores a scale
        beside each weight instead (Stored.with_input_scale)."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Export:
    """A format as a target of `jaxtune export`, a command that writes a checkpoint for servers, with the linears and
    experts of the layers in this format, except the linears that `keeps` names and matrices whose rows are not whole
    blocks. Of gpt-oss, MXFP4 stores the experts alone."""

    name: str  # the value of the command's option --to
    keeps: tuple[str, ...] = ()  # linears whose names end with one of these stay in the model's dtype
    # the reason with which a model with experts is refused; None: such a model is exported too
    without_experts: str | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """Everything that jaxtune knows about a format of quantised weights, except its kernels: its classes, its layouts
    in checkpoints, and how options and messages call it. The table of all formats is formats.FORMATS."""

    # the key of FORMATS, by which messages and records call the format; a value of model.load_in
    name: str
    title: str  # a phrase such as "in four bits (NF4)"
    kinds: tuple[type[Stored], ...]  # the classes of its weights; that of the first one quantises 16-bit weights
    layouts: tuple[Layout, ...]  # how checkpoints store it; a weight is written in the first one that `can_store` it
    # the argument of Unsloth's from_pretrained that asks for it, such as "load_in_4bit", which jaxtune.compat accepts;
    # None: Unsloth has none
    flag: str | None = None
    export: Export | None = None  # how `jaxtune export` writes it; None: it cannot be exported

    def encode(self, array: jax.Array) -> Stored:
        """Quantises a 16-bit or 32-bit weight, `array` [..., out, in], to this format. Returns a Stored of the first
        class of `kinds`. Its options are that class's defaults. Loading with model.load_in or a precision map, exports,
        quantisation-aware training and `jaxtune sensitivity` call it."""
        return self.kinds[0].encode(array)

    def layout(self, weight: Stored) -> Layout:
        """The layout in which `weight`, a weight in this format, is written to a checkpoint: the first of `layouts`
        whose `can_store` returns True. It raises StopIteration if there is none. The functions of jaxtune/models/files
        that write checkpoints call it; `weight` may have shapes (jax.ShapeDtypeStruct) in place of its arrays."""
        return next(layout for layout in self.layouts if layout.can_store(weight))
