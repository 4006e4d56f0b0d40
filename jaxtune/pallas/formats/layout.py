"""Layout, which says how one kind of checkpoint stores the quantised weights of a format, and Format, which lists what
jaxtune knows about a format.

A layout describes the tensors of a weight by name, dtype and shape, and the entry quantization_config of config.json;
it makes a weight from its tensors' arrays, and these arrays from a weight. It opens no file. It identifies a tensor by
its key, the end of its name after the module's name: `.weight_scale` is the key of
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
ArrayOf = Callable[[Any], Any]  # takes a weight and returns the array of one of its tensors
Read = Callable[[str], np.ndarray]  # takes a tensor's key and returns its bytes


class Header(Protocol):
    """A tensor's entry in the header of a safetensors file: all that a layout sees of the tensor before it is read."""

    @property
    def name(self) -> str:
        """The tensor's name in the file, for errors; layouts look tensors up by key."""
        ...

    @property
    def dtype(self) -> str:
        """By safetensors' name, such as F8_E4M3."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file stores it; packed codes have another shape than the weight."""
        ...

    @property
    def file(self) -> Path:
        """The path of the safetensors file."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        ...


Headers = Mapping[str, Header]  # by key


class FileTensor(NamedTuple):
    """A tensor to be written: the header needs its shape and dtype before `array_of` computes it. The dictionary that
    has it names it.
    """

    shape: tuple[int, ...]  # its dimensions
    dtype: np.dtype  # its dtype
    # takes the weight that the tensor stores, or helps to store (a quantised one, if Layout.tensors made this), and
    # returns the tensor's array
    array_of: ArrayOf

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def file_tensor(like: jax.Array | np.ndarray | None, array_of: ArrayOf) -> FileTensor:
    """The FileTensor with the shape and dtype of `like`: an array that is written as the weight has it, or its
    jax.ShapeDtypeStruct. None fails an assertion; the type allows it because optional fields of weights have it.

      array_of: takes the weight and returns this tensor's array.
    """
    assert like is not None
    return FileTensor(tuple(like.shape), np.dtype(like.dtype), array_of)


def check_weights(settings: Settings, supported: Mapping[str, object]) -> None:
    """Raises ValueError, with key and value, for a quantization_config of compressed-tensors whose groups store weights
    in another way than `supported` says, or with a quantised key/value cache. Settings of activations are not checked.

      supported: {key, such as "num_bits": the only supported value}, which a missing key is taken to have.
    """
    for name, group in (settings.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        for key, value in supported.items():
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
class FoundWeight:
    """A quantised weight in a checkpoint: only its tensors' headers have been read."""

    name: str  # the weight's name in the model
    tensors: Headers  # the headers of the tensors that store it, by key
    shape: tuple[int, ...]  # the decoded weight's shape in the model: [out, in], or [E, in, out] for gpt-oss's experts
    # what the same layout's `read` needs beside the arrays, such as the size of FP8's blocks; None: nothing
    details: object = None

    @property
    def where(self) -> str:
        """The beginning of error messages about the weight, "FILE: NAME"."""
        return f"{next(iter(self.tensors.values())).file}: {self.name}"


class Layout:
    """How one kind of checkpoint stores weight matrices in one quantised format. A subclass sets the class attributes
    and implements `recognises`, `describe`, `read`, `tensors` and `config`; the other methods have defaults.

    To read, the loader asks `recognises` whether a config.json names this layout, and `check` whether its settings are
    supported. Whatever config.json names, it then searches the tensors for every layout's: it divides names into module
    and key (`key_of`), asks `claims` whether a module's tensors are a quantised weight, and makes the weight with
    `describe` and `read`.

    A checkpoint may store an experts' tensor [E, out, in] in pieces: separate matrices, one or more for each expert.
    """

    title: ClassVar[str]  # a phrase that names such checkpoints in errors, such as "bitsandbytes' in four bits"
    codes: ClassVar[str]  # the key of the tensor that has the weight's codes, such as ".weight"
    codes_dtype: ClassVar[str]  # the dtype of that tensor, by safetensors' name
    scale_keys: ClassVar[tuple[str, ...]] = ()  # the keys of the tensors that accompany the codes, such as scales
    # the keys of tensors that belong to no weight, such as scales of a key/value cache, which the loader leaves out
    # wherever they are, and no file is written with
    ignored_keys: ClassVar[tuple[str, ...]] = ()
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
        """Whether a config.json's quantization_config says that weights are stored in this layout. The first layout in
        the order of FORMATS decides; if none does, the checkpoint is refused.
        """
        raise NotImplementedError

    def check(self, settings: Settings) -> None:
        """Raises ValueError, with key and value, for a setting that is not supported. By default it accepts all."""

    def key_of(self, name: str) -> tuple[str, str] | None:
        """Divides a tensor's name in a file into (module, key), with the longest key that fits of `codes` and
        `scale_keys`; None if none fits.
        """
        keys = sorted((self.codes, *self.scale_keys), key=len, reverse=True)
        return next(((name.removesuffix(key), key) for key in keys if name.endswith(key)), None)

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, store a weight in this layout: by default, if the codes are there
        in `codes_dtype`. A layout whose codes could be another's also looks for the tensors beside them.
        """
        return self.codes in tensors and tensors[self.codes].dtype == self.codes_dtype

    def describe(self, name: str, tensors: Headers, read: Read) -> FoundWeight:
        """Describes the weight that a module's tensors store, before their content is read.

          name: the weight's name in the model.
          tensors: {key: header}, for which `claims` returned True.
          read: takes a tensor's key and returns its bytes, for a small tensor that says how the others are stored.
        Raises:
          ValueError: a tensor is missing, or its dtype or shape does not fit the others.
        """
        raise NotImplementedError

    def read(self, weight: FoundWeight, arrays: Arrays, dtype_name: str) -> Stored:
        """Makes the quantised weight, with numpy arrays as leaves.

          weight: what `describe` returned.
          arrays: {key: array}, the content of the tensors in `weight`.
          dtype_name: the compute dtype, to which the weight is decoded by default.
        Raises:
          ValueError: an array has values that cannot be right, such as a negative scale.
        """
        raise NotImplementedError

    def decoded(self, weight: Stored, dtype: str) -> jax.Array:
        """The decoded array of `weight`, as the model has it, for layouts that are `decoded_on_load`."""
        return weight.decode(dtype)

    def encode(self, array: jax.Array) -> Stored:
        """Quantises the model's array to what `read` makes of files. Only layouts with `kept_on_request` have it;
        others have Format.encode.
        """
        raise NotImplementedError

    def joining(self, pieces: Sequence[FoundWeight], per_expert: int) -> str | None:
        """The reason why separate matrices of experts cannot become one tensor [E, out, in] (Stored.joined), such as
        blocks that would cross from one matrix into the next; None, as by default, if they can.

          pieces: the matrices, in the order of their rows in the tensor.
          per_expert: consecutive matrices of one expert, such as 2 for gate and up.
        """
        del pieces, per_expert
        return None

    def digested(self, weight: FoundWeight) -> list[tuple[str, str]]:
        """(label, key) of each tensor of the weight, in the order of the base model's digest; the label enters the
        digest beside the content. Adapters record the digest to recognise their base, so a layout must never change it.
        """
        keys = [key for key in (self.codes, *self.scale_keys) if key in weight.tensors]
        return [(weight.tensors[key].name, key) for key in keys]

    # ---- writing

    def can_store(self, weight: Stored) -> bool:
        """Whether `weight` can be written in this layout; by default True. An override must not read numbers: the
        leaves may be jax.ShapeDtypeStruct.
        """
        del weight
        return True

    def differing(self, weights: Sequence[Stored]) -> str | None:
        """The reason why one quantization_config cannot describe all `weights` of a model, such as scales of different
        kinds; None, as by default, if it can. Leaves may be jax.ShapeDtypeStruct.
        """
        del weights

    def splitting(self, weight: Stored, rows: int) -> str | None:
        """The reason why `weight`, experts [E, out, in], cannot be written as matrices of `rows` rows each
        (Stored.piece), such as blocks that would be cut; None, as by default, if it can.
        """
        del weight, rows
        return None

    def header_number(self, weight: Stored, make: Callable[[], Stored]) -> float | None:
        """A number of the weight that is part of files' headers or sizes and must be known before weights are written,
        such as NF4's offset of double quantisation; None by default. For experts written in pieces, the first piece's
        number counts for all.

          weight: its leaves may be jax.ShapeDtypeStruct.
          make: quantises the weight, for experts the whole tensor; called only if `weight` has only shapes.
        """
        del weight, make

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """{key: FileTensor} of a file that stores `weight`, a matrix [out, in], or of gpt-oss experts [E, out, in],
        whose leaves may be jax.ShapeDtypeStruct. number: from `header_number`.
        """
        raise NotImplementedError

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """The entry quantization_config of a checkpoint in this layout.

        weights: all weights in this format; () from the export of gpt-oss.
        plain: names of the linears that are not quantised, the head's included.
        dtype: name of the compute dtype.
        """
        raise NotImplementedError

    def rounding_activations(self, config: Config) -> Config:
        """A copy of the entry `config` that makes servers round activations to the format too. Only MXFP4's
        CompressedTensors has it: FP8's entry says so always, and NVFP4 stores a scale beside each weight
        (Stored.with_input_scale).
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Export:
    """A format as a target of `jaxtune export`, for the linears and experts of the layers, except those that `keeps`
    names and matrices whose rows are not whole blocks. Of gpt-oss, MXFP4 stores the experts alone.
    """

    name: str  # the value of the command's option --to
    keeps: tuple[str, ...] = ()  # linears whose names end with one of these stay in the model's dtype
    # the reason with which a model with experts is refused; None: such a model is exported too
    without_experts: str | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """Everything that jaxtune knows about a format of quantised weights, except its kernels."""

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
        """Quantises a 16-bit or 32-bit array [..., out, in] with the defaults of the first class of `kinds`."""
        return self.kinds[0].encode(array)

    def layout(self, weight: Stored) -> Layout:
        """The first layout that `can_store` the weight, whose leaves may be jax.ShapeDtypeStruct. StopIteration if none
        can.
        """
        return next(layout for layout in self.layouts if layout.can_store(weight))
