"""The record of a run: the values in checkpoints, results and config.yaml by which a run recognises its own files.

`record_of` makes the record, `require_same_run` compares it with that of a checkpoint (`is_longer`: whether the run got
more steps), and `same_run` and `digest` make of it what results store (`is_digest_of` recognises it).
`require_same_settings` and `require_same_rows` compare the processes of a run, and `in_first_words` gives them one
config. `compare_meta` lists the differences of two records (each a `Difference`), `require_compatible` raises if one of
them forbids a resume, and `by_what_it_holds` leaves out keys that an older version did not record. `recorded_config`
makes the config that config.yaml has, `write_config` writes it, and `require_same_config` compares it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import types
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax

from jaxtune.conversations import dates
from jaxtune.models.components import common_format, followed
from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import INPUT_SCALES
from jaxtune.models.files.quant import computes_in_fp8
from jaxtune.models.lora import adapter_settings, gives_adapter
from jaxtune.pallas.format_names import KEPT
from jaxtune.system import processes
from jaxtune.system.files import atomic_write, fingerprints
from jaxtune.system.version import __version__
from jaxtune.train.config import ROW_OPTIONS, AdapterConfig, ConfigError, OptimConfig, ScheduleConfig, TrainConfig
from jaxtune.train.config.file import config_keys, config_to_dict, config_to_yaml, flat_keys, load_config
from jaxtune.train.config.sections import Unset
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.templates import writes_today
from jaxtune.train.folder.checkpoint import CheckpointError, saved_steps
from jaxtune.train.folder.run_folder import CHECKPOINTS, CONFIG, next_name

# The key of a checkpoint's meta that says where its rows continue (BatchSource.position), beside the record.
POSITION = "position"
# Keys of a record whose change makes it another run; all other changes are only reported. The places of model and rows
# may change, because their content is compared. So may the place of optimizer states.
_INCOMPATIBLE = (
    "trainable",
    "storage",
    "own",
    "data",
    "base_digest",
    "base_fingerprint",
    "teacher_digest",
    *(
        f"config.{key}"
        for key in (
            "model.from_config",
            "model.load_in",
            "model.compute",
            "model.rope_scaling",
            "model.max_position_embeddings",
            "adapter",
            "rows_per_step",
            "precision",
            "seed",
            "max_grad_norm",
            "neftune_noise_alpha",
            "objective",
            "router_aux_loss_coef",
            "router_z_loss_coef",
            *(f"schedule.{field.name}" for field in dataclasses.fields(ScheduleConfig) if field.name != "warmup_steps"),
            "qat",
            *(f"optim.{field.name}" for field in dataclasses.fields(OptimConfig) if field.name != "offload"),
        )
    ),
    *(f"config.data.{key}" for key in (*ROW_OPTIONS, "template_arguments", "max_rows", "eval_rows")),
)
# Keys that records of older versions lack; such records are compared by the keys they have. Their base_fingerprint is
# computed from a sample of the weights, without config.json.
_NOT_ALWAYS = ("base_digest", "data.columns_crc32")
# Keys that set how long a run is; see _of_any_length.
_LENGTH = ("config.steps", "config.epochs")
# Keys that may change when a run is made longer. The steps of a warm-up are among them, because a script of
# jaxtune.compat derives them from the number of all steps.
LENGTHENED = (*_LENGTH, "config.schedule.warmup_steps")
# Digests of the user's code, by name. A change is said, and refused where the run is complete.
_CODE = "code."
_EVALUATION = "evaluation "  # begins the names of functions that decide the result with checkpoint.best only
# After a change below this key the run is still valid, but not bit for bit the same.
_NUMERICS = "numerics"


def record_of(
    config: TrainConfig,
    *,
    trainable: Mapping[str, jax.Array],
    storage: Mapping[str, str],
    base: Decoder,
    teacher: str | None = None,
    data: Mapping[str, Any],
    total_steps: int,
    own: Mapping[str, Any],
    code: Mapping[str, str],
    numerics: Mapping[str, Any],
) -> dict[str, Any]:
    """The record that a checkpoint stores with its arrays, of values that JSON can express. When a run is resumed, its
    own record is compared with it, so that it does not continue another run (require_same_run). Its keys are the names
    of the arguments, with base_digest, base_fingerprint and teacher_digest in place of base and teacher. The last is
    left out if there is no teacher, and own if it is empty.

    Args:
      config: the run's.
      trainable: {name: array or jax.ShapeDtypeStruct} of the trainable tensors; shapes and dtypes are recorded.
      storage: {"weights", "optimizer": the format in which they are stored}.
      base: the model as it was given, of which base_digest (of all bytes) and base_fingerprint (of a sample, which
        older versions recorded alone) are recorded.
      teacher: the digest of the weights of the teacher of a distillation, or None.
      data: values that identify the rows.
      total_steps: the number of steps of the whole run.
      own: {what it is: values that identify it} of what the user's code gave, such as a reward function (own_parts.py).
      code: {name: digest} of the functions of the user's code (digests.code_of).
      numerics: values whose change leaves the run valid, but not bit for bit the same; the kind of device and JAX's
        version are added to them.
    """
    return {
        "config": config_to_dict(config),
        "trainable": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in trainable.items()},
        "storage": dict(storage),
        "base_digest": base.base_digest,
        "base_fingerprint": base.base_fingerprint,
        **({} if teacher is None else {"teacher_digest": teacher}),
        "data": dict(data),
        "total_steps": total_steps,
        **({"own": dict(own)} if own else {}),
        **({"code": dict(code)} if code else {}),
        "numerics": {**numerics, "device": jax.devices()[0].device_kind, "jax": jax.__version__},
    }


def require_same_run(saved: dict[str, Any], current: dict[str, Any], output: Path) -> list[str]:
    """Compares a checkpoint's record with that of the run that resumes from it or evaluates it, before its arrays are
    read. Returns the differences that do not forbid to continue, each as a line that begins with "changed", or with
    "not bit for bit the same run"; the Trainer prints them when it resumes. A run may be made longer (`is_longer`), and
    LENGTHENED keys may differ then. Otherwise they forbid to continue, except steps and epochs of a run whose learning
    rate is constant (`_of_any_length`).

    Args:
      saved: the checkpoint's record; entries POSITION (where its rows continue) and INPUT_SCALES (the scales of
        activations that QAT observed) are ignored.
      current: the record of this run.
      output: the run's folder, for messages.
    Raises:
      CheckpointError: the checkpoint is of another run; the message lists the differences.
    """
    saved = {key: value for key, value in saved.items() if key not in (POSITION, INPUT_SCALES)}
    keys = _INCOMPATIBLE
    if not is_longer(saved, current):
        keys = (*keys, "config.schedule.warmup_steps", *(() if _of_any_length(current) else _LENGTH))
    adapted = current["config"]["adapter"] is not None
    # In a recipe that sets an adapter's options, adapter.path replaces the whole section.
    result = f"'adapter={{path: {output / 'adapter'}}}'" if adapted else f"'model.path={output / 'merged'}'"
    elsewhere = f"output={next_name(output)}"
    shorter = (
        "A run can be made longer, not shorter, unless its learning rate is constant (schedule.name = constant, no "
        "schedule.warmup_ratio); the schedule of this one depends on the number of steps. To continue training with "
        f"another schedule, start a new run from its result, with {result} and {elsewhere}"
    )
    lanes = (
        "An older version gave each device shards of its own, so that files weighed by the number of devices; the rows "
        f"of such a run cannot be continued. Start a new run from its result, with {result} and {elsewhere}"
    )
    hints = dict.fromkeys(_LENGTH, shorter) | {"data.lanes": lanes}
    harmless = require_compatible(saved, current, keys, hints, output)
    return [
        f"changed: the code of {name}: the steps so far had the old one" for name in changed_code(saved, current)
    ] + [f"{'not bit for bit the same run' if _numeric(d) else 'changed'}: {d}" for d in harmless if not d.is_code]


def changed_code(saved: Mapping[str, object], current: Mapping[str, object], of_result: bool = False) -> list[str]:
    """The names of the user's functions whose code differs in two records (of `record_of` or `same_run`). of_result:
    only those that decide what the run leads to."""
    old, new = (
        {key: value for key, value in flat_keys(one).items() if key.startswith(_CODE)} for one in (saved, current)
    )
    names = [key.removeprefix(_CODE) for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]
    if of_result and flat_keys(current).get("config.checkpoint.best", "of same_run") is None:
        names = [name for name in names if not name.startswith(_EVALUATION)]
    return names


def require_same_code(saved: Mapping[str, object], current: Mapping[str, object], what: str) -> None:
    """Raises CheckpointError if a complete run would give an old result for changed code. what: "this run is complete
    (8 steps)"."""
    if names := changed_code(saved, current, of_result=True):
        raise CheckpointError(
            f"{what}, but the code of {', '.join(names)} has changed since: set it back, or name another output to "
            "train with it"
        )


def is_longer(saved: dict[str, Any], current: dict[str, Any]) -> bool:
    """Whether the run with the record `current` has more steps than that of the checkpoint's record `saved`, as a run
    does whose steps or epochs were raised to train it further; the keys LENGTHENED may then differ, and the Trainer
    prints the new learning rate. False if `saved` does not say how many it has."""
    return current["total_steps"] > saved.get("total_steps", current["total_steps"])


def _numeric(difference: Difference) -> bool:
    """Whether a difference of two records is below the key "numerics": the run is valid after it, but not bit for bit
    the same, as with another GPU or JAX version. False for all other differences. It decides only with which words
    `require_same_run` begins the line that it returns for a difference."""
    return difference.key.startswith(_NUMERICS)


def _of_any_length(record: dict[str, Any]) -> bool:
    """Whether the steps of the run with this record are the same for any number of steps of the whole run. True if its
    schedule is constant, without a warmup_ratio (a warm-up of warmup_steps is allowed); such a run may also be made
    shorter: `require_same_run` then lets steps and epochs differ, and `same_run` leaves them out."""
    schedule = record["config"]["schedule"]
    return schedule["name"] == "constant" and schedule["warmup_ratio"] is None


def same_run(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a record by which a run's results are recognised as its own, {dotted key: value}, such as its seed,
    its optimizer and the digest of the base; everything else, such as how often it saves, may change within a run, and
    so may steps and epochs if its learning rate is constant (`_of_any_length`). A folder of results stores them
    (results.py; require_own compares them and names those that differ), and results.json their `digest`, so that a run
    that is started again, or an evaluation, recognises them. Checkpoints are compared by require_same_run."""
    keys = {
        key: value
        for key, value in flat_keys(json.loads(json.dumps(record))).items()
        if any(key == prefix or key.startswith(prefix + ".") for prefix in (*_INCOMPATIBLE, *LENGTHENED, "code"))
    }
    if record["config"]["checkpoint"]["best"] is None:
        keys = {key: value for key, value in keys.items() if not key.startswith(_CODE + _EVALUATION)}
    if _of_any_length(record):
        keys = {key: value for key, value in keys.items() if key not in _LENGTH}
    return keys


def is_digest_of(found: Any, run: dict[str, Any]) -> bool:
    """Whether `found`, a digest that was stored with a result, is that of the run `run` (as same_run returns it),
    computed as this version of jaxtune or an older one does. An evaluation, and a run that is started again, recognise
    the run's results.json by it."""
    run = {key: value for key, value in run.items() if not key.startswith(_CODE)}
    known = (run, by_what_it_holds({}, run))
    return found in [form(values) for form in (digest, _sha256) for values in known]


def digest(run: dict[str, Any]) -> str:
    """The SHA-256, as hexadecimal digits, of the values that identify a run (`run`, from same_run). results.json
    contains it, so that a run that is started again recognises the numbers of its earlier process. Steps, epochs and
    the steps of the warm-up (LENGTHENED) are left out, so that a run has the same digest after it is made longer."""
    return _sha256({key: value for key, value in run.items() if key not in LENGTHENED and not key.startswith(_CODE)})


def _sha256(run: dict[str, Any]) -> str:
    """SHA-256, as hexadecimal digits, of the JSON values in `run`, those that identify a run; the order of its keys has
    no effect. `digest` leaves keys out before it calls it; older versions stored it of all keys."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


# ---- several processes


# Keys that name places, which may differ between hosts. Their content is compared in place of their names: rows by
# require_same_rows, the base by its digest, and _FILES by their bytes.
_PLACES = ("model.path", "model.tokenizer", "data.train", "data.eval", "data.cache_dir", "output")
_FILES = ("data.template", "adapter.path")


def require_same_settings(config: TrainConfig) -> None:
    """Raises ValueError if the processes of a run have different configs (this one has `config`) or different versions
    of the packages that compute. Paths may differ between hosts; of a template and an adapter the files' content is
    compared. The train and evaluate commands call it before they read anything; a Trainer that is made in Python does
    not. A collective call."""
    settings = {key: value for key, value in flat_keys(config_to_dict(config)).items() if key not in _PLACES}
    settings |= {key: _content(settings[key]) for key in _FILES if settings.get(key) is not None}
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    processes.require_same({"jaxtune": __version__, **versions}, "install the same version for all of them")
    processes.require_same(settings, "start all of them with the same recipe and the same overrides")


def _content(place: str) -> Any:
    """What processes compare in place of `place`, a setting that may be a path and differ between hosts: the
    fingerprints (size and CRC-32) of the file, or of the adapter_* files in the folder. If it is neither, or a folder
    without such files, `place` itself, such as the name of a packaged template. `require_same_settings` asks for it,
    for data.template and adapter.path."""
    path = Path(place).expanduser()
    files = [path] if os.path.isfile(path) else sorted(path.glob("adapter_*")) if os.path.isdir(path) else []
    return list(fingerprints(files).values()) or place


def in_first_words(config: TrainConfig) -> TrainConfig:
    """The config that all processes of a run record: `config`, with data.template and adapter.path as the first process
    has them. Files with the same content may have other names on other hosts, and the config is in the records that are
    compared. The Trainer keeps the config that is returned. A collective call."""
    if processes.count() == 1:
        return config
    template, path = processes.of_first(lambda: [config.data.template, config.adapter and config.adapter.path])
    adapter = config.adapter and dataclasses.replace(config.adapter, path=path)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, template=template), adapter=adapter)


def with_today(config: TrainConfig, tokenizer: object) -> TrainConfig:
    """`config` with the day that its chat template writes into rows (data.today), if it writes one: the day that it
    names, or that config.yaml in the output folder records, or the current one of the first process. A collective
    call."""
    if config.data.today is not None or tokenizer is None or not writes_today(tokenizer, config.data.template):
        return config
    today = processes.of_first(lambda: _recorded_today(Path(config.output)) or dates.today())
    return dataclasses.replace(config, data=dataclasses.replace(config.data, today=today))


def _recorded_today(output: Path) -> str | None:
    """data.today of config.yaml in a run's folder; None if the file is missing or cannot be read."""
    try:
        return load_config(str(output / CONFIG)).data.today
    except (OSError, ConfigError):
        return None


def require_same_rows(sets: Mapping[str, TokenDataset | BatchSource | None]) -> None:
    """Raises ValueError if the processes of a run do not have the same rows of tokens. sets: {config key, such as
    "data.train": the rows, or their source, or None}. `run_rows` calls it when it has tokenised them. A collective
    call; a run of one process compares nothing."""
    if processes.count() == 1:
        return  # a single process need not compare, and reading every token takes time
    found = {
        key: None
        if data is None
        else data.identity()
        if isinstance(data, BatchSource)
        else f"{len(data.documents):,} documents, {int(data.documents.trained.sum()):,} trained tokens, CRC-32 of all "
        f"tokens {data.documents.tokens_crc32:08x}"
        for key, data in sets.items()
    }
    processes.require_same(found, "all of them need the same rows, the same tokenizer and the same template")


# ---- comparing records


@dataclasses.dataclass(frozen=True)
class Difference:
    """A key whose values in a stored record (of a checkpoint, or the part of it in a result) and in that of this run
    differ. Where the key is absent, its value is "(absent)". `compare_meta` makes it. str() gives the key and both
    values as text, for the errors that refuse a resume or a result, and for the lines about what changed."""

    key: str  # dotted, such as "config.optim.learning_rate"
    saved: Any  # its value in the stored record
    current: Any  # its value in this run

    @property
    def is_code(self) -> bool:
        return self.key.startswith(_CODE)

    def __str__(self) -> str:
        """The difference as a line of a message, such as "config.seed: saved 0, now 1"."""
        return f"{self.key}: saved {self.saved!r}, now {self.current!r}"


def by_what_it_holds(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """The record `current` without the keys of _NOT_ALWAYS (base_digest) that the record `saved` lacks because an older
    version of jaxtune wrote it. An equal copy if it lacks none; keys of the config that it lacks stay, because
    compare_meta reads them as defaults. compare_meta compares the result with `saved`; is_digest_of digests it."""
    return {key: value for key, value in current.items() if key in saved or key not in _NOT_ALWAYS}


def compare_meta(
    saved: Mapping[str, Any], current: Mapping[str, Any], incompatible: Iterable[str]
) -> tuple[list[Difference], list[Difference]]:
    """The differences of two records (as record_of makes them, or same_run of it), by dotted key. A config key that
    only one of them has, in a section that both have, is no difference if it has its default there: the other was
    written by a version without that key. Nor is a key of _NOT_ALWAYS that `saved` lacks. require_compatible compares
    checkpoints by it, and results.require_own results.

    Args:
      saved, current: the records, of the checkpoint or result and of this run.
      incompatible: dotted keys; each covers itself and everything below it ("config.lora" covers "config.lora.r").
    Returns:
      (differences that forbid a resume, because `incompatible` covers them; the others, harmless ones)
    """
    old = flat_keys(saved)
    new = by_what_it_holds(old, flat_keys(json.loads(json.dumps(current))))
    forbidding = tuple(incompatible)
    refused, harmless = [], []
    defaults = _defaults()
    in_both = {key.rpartition(".")[0] for key in old} & {key.rpartition(".")[0] for key in new}  # sections
    for key in sorted(old.keys() | new.keys()):
        lacking = (key in old) != (key in new) and key.rpartition(".")[0] in in_both
        if lacking and key in defaults and (old | new)[key] == defaults[key]:
            continue
        if key.startswith(_CODE) and (key in old) != (key in new):  # by an older version, or under another name
            continue
        difference = Difference(key, old.get(key, "(absent)"), new.get(key, "(absent)"))
        if json.dumps(difference.saved) == json.dumps(difference.current) or difference.saved == difference.current:
            continue
        covered = any(key == prefix or key.startswith(prefix + ".") for prefix in forbidding)
        (refused if covered else harmless).append(difference)
    return refused, harmless


@functools.cache
def _defaults() -> dict[str, Any]:
    """{"config." + key: its default} for all config keys; of a key without one, the text "required". A record without
    such a key was written by a version that did not have it, and is read as having the default: `compare_meta` compares
    by it."""
    found: dict[str, Any] = {}
    for key in config_keys():
        try:
            found[f"config.{key.name}"] = json.loads(key.default)
        except ValueError:  # a string, which has no quotes there
            found[f"config.{key.name}"] = key.default
    return found


def require_compatible(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    incompatible: Iterable[str],
    hints: Mapping[str, str] = types.MappingProxyType({}),
    output: Path | None = None,
) -> list[Difference]:
    """Compares the records of a checkpoint and of this run by `compare_meta`, and returns their harmless differences.

    Args:
      saved, current: the record of the checkpoint, and that of this run.
      incompatible: dotted keys whose difference forbids a resume, with those below them.
      hints: {dotted key: what else can be done}; if only such keys forbid a resume, the error's message ends with the
        hint of the one that is first by name.
      output: the run's folder, beside which the message names a new one.
    Raises:
      CheckpointError: some differences are not harmless; the message lists them.
    """
    refused, harmless = compare_meta(saved, current, incompatible)
    if refused:
        keys = {difference.key for difference in refused}
        hint = "\n" + hints[min(keys)] if keys <= hints.keys() else ""
        more = f"\n  and {len(refused) - 8} more" if len(refused) > 8 else ""
        lines = "\n".join(f"  {difference}" for difference in refused[:8]) + more
        new = "" if output is None else f", such as output={next_name(output)}"
        raise CheckpointError(
            f"this run cannot continue that checkpoint; set these back or start a new run{new}:\n{lines}{hint}"
        )
    return harmless


# ---- config.yaml


def recorded_config(config: TrainConfig, model: Decoder) -> TrainConfig:
    """The config that config.yaml and checkpoints record: `config`, with `adapter`, `model.load_in`, `model.compute`
    and `precision` after what the model really has, because the caller may have given a model that the config does not
    describe. The Trainer takes it as its config.

    `adapter` becomes None if the model has no adapters. If it already describes them, it stays as it was written
    ("all-linear" stays that), and one that was loaded from a folder stays named by the folder; otherwise it is made
    from the model. `model.compute` always becomes the model's. `model.load_in` becomes None if no weight is quantised,
    and the format of most quantised weights if `config` has neither it nor a precision map of modules, and loading the
    model's own files without it would not keep that format; else it stays. `precision` becomes a map if `config` has no
    map and single modules differ; else it stays.

    Args:
      config: the run's.
      model: the model that trains; its arrays may be jax.ShapeDtypeStruct.
    Raises:
      ValueError: the model has adapters that no config can describe, or a setting contradicts them.
    """
    adapter, settings = config.adapter, adapter_settings(model)
    if settings is None:
        adapter = None
    elif adapter is None or (adapter.path is None and not gives_adapter(model, adapter.settings)):
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
        adapter = AdapterConfig(**plain)
    stored_so = model.source is not None and "quantization_config" in json.loads(model.source.config)
    load_in, precision = config.model.load_in, config.precision
    usual = common_format(model)
    if usual is None:
        load_in = None
    elif load_in is None and (usual in KEPT or not stored_so) and not config.components:
        load_in = usual
    words = followed(model, plain=not stored_so)
    if not config.components and words:
        precision = words | {"*": config.computes_in}
    compute: Literal["fp8"] | None = "fp8" if computes_in_fp8(model) else None
    kept = dataclasses.replace(config.model, load_in=load_in, compute=compute)
    return dataclasses.replace(config, adapter=adapter, model=kept, precision=precision)


def write_config(output: Path, config: TrainConfig) -> None:
    """Writes `config` with every key to config.yaml in the run's folder `output`, in the first process only, so that
    the folder says which run it is of; a file that is there is replaced. `require_same_config` compares it before a run
    that begins at step 0 in the folder (one that resumes is compared with the checkpoint's record), and `jaxtune
    evaluate` can be given it as the recipe."""
    if processes.first():
        atomic_write(output / CONFIG, config_to_yaml(config))


def require_same_config(output: Path, config: TrainConfig) -> None:
    """Raises ValueError if the folder `output`, which has no checkpoint, belongs to another run: its config.yaml is
    neither that of `config`, nor a beginning of it (a full disk, a power failure), nor an older version's."""
    try:
        found, ours = (output / CONFIG).read_bytes(), config_to_yaml(config).encode()
    except FileNotFoundError:
        return
    if found != ours and not ours.startswith(found.rstrip(b"\0")) and not _reads_as(output / CONFIG, config):
        raise ValueError(
            f"output = {str(output)!r} belongs to another run (its config.yaml differs), which has no checkpoint to "
            f"continue from: choose another folder, such as output={next_name(output)}, or delete that config.yaml if "
            "you do not need that run"
        )


def require_own_folder(config: TrainConfig) -> None:
    """Raises ValueError or CheckpointError if the run in config.output is another one, as far as that shows before rows
    are read."""
    output = Path(config.output)
    if not saved_steps(output / CHECKPOINTS):
        return require_same_config(output, _as_long_as(config, output))
    try:
        found = load_config(str(output / CONFIG))
    except (OSError, ConfigError):  # the checkpoint's own record is compared later
        return None
    old, new = ({"config": config_to_dict(one)} for one in (found, _as_long_as(config, output)))
    require_compatible(old, new, _INCOMPATIBLE, output=output)


def _as_long_as(config: TrainConfig, output: Path) -> TrainConfig:
    """`config` with the row length that the folder's record has, if it is chosen only when rows are read."""
    if not isinstance(config.data.length, Unset):
        return config
    try:
        length = load_config(str(output / CONFIG)).data.length
    except (OSError, ConfigError):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, length=length))


def _reads_as(path: Path, config: TrainConfig) -> bool:
    """Whether the config.yaml at `path`, which an older version may have written without newer keys, is read as
    `config`, that of the run that is about to start in its folder, which has no checkpoint. True: the file is this
    run's own. False: it is another run's, or cannot be read. `require_same_config` asks it if the bytes differ."""
    try:
        return load_config(str(path)) == config
    except ConfigError:
        return False
