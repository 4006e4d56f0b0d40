"""The record of what an adapter was trained over: format and dtype of the base's weights, the grid of QAT, on which the
adapter depends, and the tokens that end its texts. It is JSON in the safetensors metadata, because PEFT warns of
unknown keys in adapter_config.json. Folders of older versions have most of it in jaxtune_run.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jaxtune.models import values
from jaxtune.models.adapters.adapter_config import WEIGHTS_NAME
from jaxtune.models.components import format_and_followed
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import end_token_ids
from jaxtune.models.files import model_card
from jaxtune.models.files.model_folder import read_json
from jaxtune.models.files.quant import computes_in_fp8, qat_spec
from jaxtune.models.observed_inputs import recorded
from jaxtune.models.precision import DTYPES, WORDS, check_words
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.pallas.format_names import KEPT
from jaxtune.pallas.formats import FORMATS, load_in

METADATA = "jaxtune_trained_over"
RUN_RECORD = model_card.RECORD  # in a folder that a run wrote; see train/folder/results.py


@dataclasses.dataclass(frozen=True)
class TrainedOver:
    """How the base was loaded when an adapter was trained, and the tokens that end its texts. By default the base was
    loaded in the format of its own files.
    """

    # the format (of model.load_in) in which most of the base's quantised weights were, also if its files store them so;
    # None: none was quantised on loading
    load_in: str | None = None
    # {module's name: word} of the modules that were stored or computed in another way than load_in and dtype say, as a
    # precision map has it (models/precision.py)
    precision: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compute: str | None = None  # "fp8": FP8 weights were multiplied without decoding; None: no weight was
    dtype: str | None = None  # of the model's weights; None: not recorded
    qat: FakeQuant | None = None  # the grid to which merged weights were rounded in quantisation-aware training
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text, with those that training added
    # rope_scaling and max_position_embeddings in place of those of the base's files; {}: those of the files
    positions: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_text(self) -> str:
        """The record as JSON, without the keys that older versions do not know where they are empty."""
        record = dataclasses.asdict(self) | {"qat": None if self.qat is None else self.qat.record()}
        for key in ("precision", "positions"):  # which older versions do not know
            if not record[key]:
                del record[key]
        return json.dumps(record, sort_keys=True)

    def words(self, dtype: str, load_in: str | None) -> dict[str, str]:
        """The precision map {module's name: word} for loading the base in `dtype` and the format `load_in`, so that
        single modules are as in training. Modules in another dtype than the model's keep it. Modules in a further
        format, or in the model's dtype beside the format, count only if `load_in` is that of training; the latter get
        `dtype`.
        """
        training_word, words = WORDS.get(self.dtype or ""), {}
        for name, word in self.precision.items():
            if word in DTYPES and word != training_word:
                words[name] = word
            elif load_in == self.load_in:
                words[name] = WORDS[dtype] if word == training_word else word
        return words


def of_model(model: Decoder) -> TrainedOver:
    load_in, precision = format_and_followed(model, plain=not _stored_so(model))
    return TrainedOver(
        load_in=load_in,
        precision=precision,
        compute="fp8" if computes_in_fp8(model) else None,
        dtype=model.dtype,
        qat=None if (spec := qat_spec(model)) is None else recorded(model, spec),
        eos_token_ids=tuple(end_token_ids(model)),
        positions=json.loads((model.source and model.source.positions) or "{}"),
    )


def _stored_so(model: Decoder) -> bool:
    """Whether the model's files store its weights quantised."""
    return model.source is not None and "quantization_config" in json.loads(model.source.config)


def read(folder: Path) -> TrainedOver | None:
    """The record in an adapter's file, else in the jaxtune_run.json of older versions; None if there is neither. Raises
    ValueError for an unsupported record, or a file that is not safetensors.
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
    """A TrainedOver of the JSON object `record`. Raises ValueError for an unknown key, or an unsupported value."""
    values.mapping(where, record)
    fields = {field.name for field in dataclasses.fields(TrainedOver)} | {"skip_modules"}
    if unknown := sorted(record.keys() - fields):
        raise ValueError(
            f"{where}: {unknown[0]} is unknown to this version of jaxtune: load it with the version that wrote it"
        )
    entries = {key: value for key, value in record.items() if value is not None}
    _one_of(f"{where}: load_in", entries.get("load_in"), load_in())
    _one_of(f"{where}: compute", entries.get("compute"), ("fp8",))
    _one_of(f"{where}: dtype", entries.get("dtype"), tuple(WORDS))
    skipped = entries.get("skip_modules", [])  # older versions recorded the linears in 16 bits so
    values.texts(f"{where}: skip_modules", skipped)
    words = entries.get("precision", {})
    values.mapping(f"{where}: precision", words)
    check_words(f"{where}: precision", words)
    words = words | dict.fromkeys(skipped, WORDS.get(entries.get("dtype", ""), "bf16"))
    values.items(f"{where}: eos_token_ids", entries.get("eos_token_ids", []), values.token_ids)
    ends = tuple(entries.get("eos_token_ids", ()))
    names: dict[str, Any] = {key: entries.get(key) for key in ("load_in", "compute", "dtype")}
    qat = FakeQuant.of_record(f"{where}: qat", entries["qat"]) if "qat" in entries else None
    positions = entries.get("positions", {})
    values.mapping(f"{where}: positions", positions)
    return TrainedOver(qat=qat, precision=words, eos_token_ids=ends, positions=positions, **names)


def of_run(folder: Path) -> TrainedOver | None:
    """What a run's jaxtune_run.json says that it trained over, without a map's entries for single modules; None for any
    other folder. Raises ValueError for a damaged file or an unsupported value.
    """
    file = folder / RUN_RECORD
    run = read_json(file).get("run") if file.is_file() else None
    if not isinstance(run, dict):
        return None
    where = f"{file}: run"
    stored, compute, precision = (run.get(f"config.{key}") for key in ("model.load_in", "model.compute", "precision"))
    precision = run.get("config.precision.*", precision)  # of a run whose precision is a map
    _one_of(f"{where}: config.model.load_in", stored, load_in())
    _one_of(f"{where}: config.model.compute", compute, ("fp8",))
    _one_of(f"{where}: config.precision", precision, tuple(DTYPES))
    dtype = None if precision is None else DTYPES[precision]
    qat = None
    if run.get("config.qat.format") is not None:
        grid = {key: run.get(f"config.qat.{key}") for key in ("format", "group_size")}
        qat = FakeQuant.of_record(f"{where}: config.qat", grid | {"dtype": dtype})
    return TrainedOver(load_in=stored, compute=compute, dtype=dtype, qat=qat)


def tower_of_run(folder: Path) -> str | None:
    """model.tower of the run that wrote a folder, which says what of the tower trained; None: no run, or not said."""
    file = folder / RUN_RECORD
    run = read_json(file).get("run") if file.is_file() else None
    return run.get("config.model.tower") if isinstance(run, dict) else None


def _one_of(where: str, value: Any, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        raise ValueError(f"{where} = {value!r} is unknown to this version of jaxtune; it knows {', '.join(choices)}")


def difference(over: TrainedOver, base: Decoder) -> str | None:
    """How the precision of a base differs from that over which an adapter was trained, as a phrase for a warning; None
    if it does not. FP8 products and the grid of QAT are not compared.
    """
    if over.positions and over.positions != json.loads((base.source and base.source.positions) or "{}"):
        positions_text = ", ".join(f"{key} = {value}" for key, value in over.positions.items())
        return f"it was trained with {positions_text}, and this base has other positions"
    base_format, base_words = format_and_followed(base, plain=not _stored_so(base))
    compatible = over.load_in is None or (over.load_in in KEPT and base_format is None)  # decoded from the same codes
    if base_format != over.load_in and not (compatible and _stored_so(base)):
        recorded_form, base_form = (
            "not quantised" if word is None else FORMATS[word].title for word in (over.load_in, base_format)
        )
        return f"it was trained over weights {recorded_form}, and this base's are {base_form}"
    recorded_words = over.words(base.dtype, base_format)
    names = sorted(
        name for name in recorded_words.keys() | base_words.keys() if recorded_words.get(name) != base_words.get(name)
    )
    if not names or over.dtype is None:
        return None
    recorded_form, base_form = (words.get(names[0], "as the other weights") for words in (recorded_words, base_words))
    suffix = f", and {len(names) - 1} more differ" if len(names) > 1 else ""
    return f"it was trained over {names[0]} in {recorded_form}, which is here {base_form}{suffix}"
