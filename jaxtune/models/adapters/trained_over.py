"""The record of what an adapter was trained over: format and dtype of the base's weights, which the adapter depends on.

The record is JSON in the metadata of the adapter's safetensors file, which PEFT and servers ignore, whereas PEFT warns
of unknown keys in adapter_config.json. Folders that runs of older versions wrote have the same facts in the run's own
record, jaxtune_run.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jaxtune.models import values
from jaxtune.models.adapters.adapter_config import WEIGHTS_NAME
from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files.model_folder import read_json
from jaxtune.models.files.quant import computes_in_fp8, qat_spec, stored_in
from jaxtune.models.generation.ends import end_token_ids
from jaxtune.models.lora import matrices
from jaxtune.pallas.formats import FORMATS, Stored, load_in

METADATA = "jaxtune_trained_over"
RUN_RECORD = "jaxtune_run.json"  # in a folder that a run wrote; see train/folder/results.py
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # by the config key `precision` of a run


@dataclasses.dataclass(frozen=True)
class TrainedOver:
    """How the base was loaded when an adapter was trained; the defaults make no statement about it."""

    # the format (of model.load_in) in which the base's linears were; None: as the base's files store them
    load_in: str | None = None
    skip_modules: tuple[str, ...] = ()  # names of linears that were not in that format
    compute: str | None = None  # "fp8": FP8 weights were multiplied without decoding; None: they were decoded
    dtype: str | None = None  # of the model's weights; None: not recorded
    qat: FakeQuant | None = None  # the grid to which merged weights were rounded in quantisation-aware training
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text, with those that training added

    def to_text(self) -> str:
        """The record as JSON, for the metadata of the adapter's safetensors file."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def of_model(model: Decoder) -> TrainedOver:
    """The record for a model with an adapter, to be written to the adapter's file."""
    stored = stored_in(model)
    plain = [name for name, matrix in matrices(model) if not isinstance(matrix.stored_weight, Stored)]
    return TrainedOver(
        load_in=stored,
        skip_modules=() if stored is None or _stored_so(model) else tuple(plain),
        compute="fp8" if computes_in_fp8(model) else None,
        dtype=model.dtype,
        qat=qat_spec(model),
        eos_token_ids=tuple(end_token_ids(model)),
    )


def _stored_so(model: Decoder) -> bool:
    """Whether the weights are quantised in the files that the model was loaded from."""
    return model.source is not None and "quantization_config" in json.loads(model.source.config)


def read(folder: Path) -> TrainedOver | None:
    """The record in an adapter's folder; None if it has none.

    Raises:
      ValueError: a record that is not supported, with file and key.
    """
    weights = folder / WEIGHTS_NAME
    if weights.is_file():
        try:
            with safe_open(weights, framework="numpy") as file:
                text = (file.metadata() or {}).get(METADATA)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{weights}: cannot be read as safetensors: {error}") from None
        if text is not None:
            try:
                return _from_record(f"{weights}: {METADATA}", json.loads(text))
            except json.JSONDecodeError as error:
                raise ValueError(f"{weights}: {METADATA} is not JSON: {error}") from None
    return of_run(folder)


def _from_record(where: str, record: Any) -> TrainedOver:
    """Makes a TrainedOver from the JSON object `record` in an adapter's file; a key that is missing or null gets the
    field's default. where: the file and key, for errors.

    Raises:
      ValueError: `record` is no object, has a key that this version does not know, or a value that is not supported.
    """
    values.mapping(where, record)
    fields = {field.name for field in dataclasses.fields(TrainedOver)}
    if unknown := sorted(record.keys() - fields):
        raise ValueError(
            f"{where}: {unknown[0]} is unknown to this version of jaxtune: load it with the version that wrote it"
        )
    found = {key: value for key, value in record.items() if value is not None}
    _one_of(f"{where}: load_in", found.get("load_in"), load_in())
    _one_of(f"{where}: compute", found.get("compute"), ("fp8",))
    _one_of(f"{where}: dtype", found.get("dtype"), tuple(_DTYPES.values()))
    values.texts(f"{where}: skip_modules", found.get("skip_modules", []))
    values.items(f"{where}: eos_token_ids", found.get("eos_token_ids", []), values.token_ids)
    lists: dict[str, Any] = {key: tuple(found.get(key, ())) for key in ("skip_modules", "eos_token_ids")}
    names: dict[str, Any] = {key: found.get(key) for key in ("load_in", "compute", "dtype")}
    qat = FakeQuant.of_record(f"{where}: qat", found["qat"]) if "qat" in found else None
    return TrainedOver(qat=qat, **names, **lists)


def of_run(folder: Path) -> TrainedOver | None:
    """What the run that wrote a folder (an adapter's or a whole model's) trained over, from the config in its
    jaxtune_run.json: the format, compute dtype, precision and QAT grid. Older versions recorded these facts only
    there. None for any other folder.

    Raises:
      ValueError: a recorded format, compute dtype, precision or QAT grid that is not supported, with file and key.
    """
    file = folder / RUN_RECORD
    run = read_json(file).get("run") if file.is_file() else None
    if not isinstance(run, dict):
        return None
    where = f"{file}: run"
    stored, compute, precision = (run.get(f"config.{key}") for key in ("model.load_in", "model.compute", "precision"))
    _one_of(f"{where}: config.model.load_in", stored, load_in())
    _one_of(f"{where}: config.model.compute", compute, ("fp8",))
    _one_of(f"{where}: config.precision", precision, tuple(_DTYPES))
    dtype = None if precision is None else _DTYPES[precision]
    qat = None
    if run.get("config.qat.format") is not None:
        parts = {key: run.get(f"config.qat.{key}") for key in ("format", "group_size")}
        qat = FakeQuant.of_record(f"{where}: config.qat", parts | {"dtype": dtype})
    return TrainedOver(load_in=stored, compute=compute, dtype=dtype, qat=qat)


def _one_of(where: str, value: Any, known: Sequence[str]) -> None:
    """Raises ValueError unless `value`, read from a record, is None (not recorded) or one of `known`, the values that
    this version supports. where: the file and key, for the error."""
    if value is not None and value not in known:
        raise ValueError(f"{where} = {value!r} is unknown to this version of jaxtune; it knows {', '.join(known)}")


def difference(over: TrainedOver, base: Decoder) -> str | None:
    """How the format of a base's weights differs from the format that an adapter was trained over, as a phrase for a
    warning, such as "it was trained over weights not quantised, and this base's are ...". Only the formats are
    compared. None if both are quantised in the same format or both are not; also None if the record names no format
    and the base's own files store it quantised.

    over: the adapter's record. base: the model to which the adapter is added.
    """
    found = stored_in(base)
    if found == over.load_in or (over.load_in is None and _stored_so(base)):
        return None
    trained, here = ("not quantised" if word is None else FORMATS[word].title for word in (over.load_in, found))
    return f"it was trained over weights {trained}, and this base's are {here}"
