"""The record of a run: values in checkpoints, results and config.yaml by which a run recognises its own files. It is
JSON with a version; translations.py reads those of older ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import jax

from jaxtune.conversations import dates
from jaxtune.models.components import format_and_followed
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import computes_in_fp8
from jaxtune.models.lora import adapter_settings, gives_adapter
from jaxtune.pallas.format_names import KEPT
from jaxtune.system import processes
from jaxtune.system.files import atomic_write
from jaxtune.system.sealed import fingerprints
from jaxtune.system.version import __version__
from jaxtune.train.config import (
    ROW_OPTIONS,
    AdapterConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
)
from jaxtune.train.config.file import config_from_dict, config_to_dict, config_to_yaml, flat_keys, read_values
from jaxtune.train.config.precision import REST, Precision
from jaxtune.train.config.sections import ENDLESS
from jaxtune.train.config.tower import left_out
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.rendering.templates import writes_today
from jaxtune.train.folder.checkpoint import CheckpointError, saved_steps
from jaxtune.train.folder.run_folder import CHECKPOINTS, CONFIG, next_name
from jaxtune.train.folder.translations import BESIDE, UNRECORDED, VERSION, digested, older_digested, with_defaults

type Settings = Mapping[str, Any]  # a configuration as nested JSON values (config_to_dict)

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
            "model.tower",
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
    *(f"config.data.{key}" for key in (*ROW_OPTIONS, "max_pixels", "template_arguments", "max_rows", "eval_rows")),
)
# Keys that set how long a run is; see _of_any_length.
_LENGTH = ("config.steps", "config.epochs")
# Keys that may change when a run is made longer. The steps of a warm-up are among them, because a script of
# jaxtune.compat derives them from the number of all steps.
LENGTHENED = (*_LENGTH, "config.schedule.warmup_steps")
# Keys of `same_run`.
_IDENTIFYING = ("version", *_INCOMPATIBLE, *LENGTHENED, "code")
# Digests of the user's code, by name. A change is said, and refused where the run is complete.
_CODE = "code."
_EVALUATION = "evaluation "  # begins the names of functions that decide the result with checkpoint.best only
# After a change below this key the run is still valid, but not bit for bit the same.
_NUMERICS = "numerics"


def record_of(
    settings: Settings,
    *,
    trainable: Mapping[str, jax.Array],
    storage: Mapping[str, str],
    base: Decoder,
    teacher: str | None = None,
    data: Mapping[str, Any],
    total_steps: int,
    user_parts: Mapping[str, Any],
    code: Mapping[str, str],
    numerics: Mapping[str, Any],
) -> dict[str, Any]:
    """The record that a checkpoint stores with its arrays, of JSON values; digests stand for base and teacher.

    trainable: {name: array or shape}.
    storage: {"weights", "optimizer": format}.
    base: the model as it was given.
    teacher: digest of a teacher's weights.
    data: values that identify the rows.
    user_parts: {what: values that identify it} of what the user's code gave (own_parts.py).
    code: {name: digest} of the user's functions (digests.code_of).
    numerics: values whose change leaves the run valid, but not bit for bit the same.
    total_steps: optimizer steps of the whole run.
    """
    return {
        "version": VERSION,
        "config": settings,
        "trainable": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in trainable.items()},
        "storage": dict(storage),
        "base_digest": base.base_digest,
        "base_fingerprint": base.base_fingerprint,
        **({} if teacher is None else {"teacher_digest": teacher}),
        "data": dict(data),
        "total_steps": total_steps,
        **({"own": dict(user_parts)} if user_parts else {}),
        **({"code": dict(code)} if code else {}),
        "numerics": {**numerics, "device": jax.devices()[0].device_kind, "jax": jax.__version__},
    }


def require_same_run(saved: dict[str, Any], current: dict[str, Any], output: Path) -> list[str]:
    """Compares a checkpoint's record with this run's before arrays are read, and returns the harmless differences as
    lines. A run may be made longer; steps and epochs may change in any way with a constant learning rate.
    CheckpointError lists what forbids to continue. output: the run's folder, for messages. saved: as `translated`.
    """
    saved = {key: value for key, value in saved.items() if key not in BESIDE}
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
    """Names of the user's functions whose code differs in two records. of_result: only those that decide the result.
    saved, current: records (`record_of`).
    """
    old, new = (
        {key: value for key, value in flat_keys(record).items() if key.startswith(_CODE)} for record in (saved, current)
    )
    names = [key.removeprefix(_CODE) for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]
    if of_result and flat_keys(current).get("config.checkpoint.best", "of same_run") is None:
        names = [name for name in names if not name.startswith(_EVALUATION)]
    return names


def require_same_code(saved: Mapping[str, object], current: Mapping[str, object], what: str) -> None:
    """CheckpointError if a complete run would give an old result for changed code. what: "this run is complete (8
    steps)". saved, current: records (`record_of`).
    """
    if names := changed_code(saved, current, of_result=True):
        raise CheckpointError(
            f"{what}, but the code of {', '.join(names)} has changed since: set it back, or name another output to "
            "train with it"
        )


def is_longer(saved: dict[str, Any], current: dict[str, Any]) -> bool:
    """Whether the run has more steps than the checkpoint's; LENGTHENED keys may then differ. False if that is not
    recorded.
    """
    return saved["total_steps"] != UNRECORDED and current["total_steps"] > saved["total_steps"]


def _numeric(difference: Difference) -> bool:
    return difference.key.startswith(_NUMERICS)


def _of_any_length(record: dict[str, Any]) -> bool:
    """Whether steps do not depend on the run's length: a constant schedule without warmup_ratio."""
    schedule = record["config"]["schedule"]
    return schedule["name"] == "constant" and schedule["warmup_ratio"] is None


def same_run(record: dict[str, Any]) -> dict[str, Any]:
    """{dotted key: value} by which a run's results are its own, such as seed, optimizer and the base's digest, and the
    record's version. What may change within a run is missing.
    """
    keys = {
        key: value
        for key, value in flat_keys(json.loads(json.dumps(record))).items()
        if any(key == prefix or key.startswith(prefix + ".") for prefix in _IDENTIFYING)
    }
    if record["config"]["checkpoint"]["best"] is None:
        keys = {key: value for key, value in keys.items() if not key.startswith(_CODE + _EVALUATION)}
    if _of_any_length(record):
        keys = {key: value for key, value in keys.items() if key not in _LENGTH}
    return keys


def is_digest_of(found: Any, run: dict[str, Any]) -> bool:
    """Whether a stored digest is this run's (`run`, from same_run), by this or an older version."""
    run = {key: value for key, value in run.items() if _is_digested(key) and value != UNRECORDED}
    forms = [form for values in older_digested(run) for form in (_of_any_steps(values), values)]
    return found in map(_sha256, forms)


def digest(run: dict[str, Any]) -> str:
    """SHA-256 of the values of same_run, without LENGTHENED keys, so that it stays when a run is made longer, and
    without newer keys at their defaults (`digested`).
    """
    return _sha256(_of_any_steps({key: value for key, value in digested(run).items() if _is_digested(key)}))


def _is_digested(key: str) -> bool:
    return key != "version" and not key.startswith(_CODE)


def _of_any_steps(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in LENGTHENED}


def _sha256(run: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


# ---- several processes


# Keys that name places, which may differ between hosts. Their content is compared in place of their names: rows by
# require_same_rows, the base by its digest, and _FILES by their bytes.
_PLACES = ("model.path", "model.tokenizer", "data.train", "data.eval", "data.cache_dir", "output")
_FILES = ("data.template", "adapter.path")


def require_same_settings(settings: Settings) -> None:
    """ValueError if processes have different configs or versions of the packages that compute. Paths may differ between
    hosts; a template and an adapter are compared by content. Collective.
    """
    values = {key: value for key, value in flat_keys(settings).items() if not key.startswith("metrics.")}
    compared = {key: value for key, value in values.items() if key not in _PLACES}
    compared |= {key: _content(compared[key]) for key in _FILES if compared.get(key) is not None}
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    processes.require_same({"jaxtune": __version__, **versions}, "install the same version for all of them")
    processes.require_same(compared, "start all of them with the same recipe and the same overrides")


def _content(setting: str) -> Any:
    """Fingerprints of the file, or of a folder's adapter_* files; else the setting, such as a packaged template."""
    path = Path(setting).expanduser()
    files = [path] if os.path.isfile(path) else sorted(path.glob("adapter_*")) if os.path.isdir(path) else []
    return list(fingerprints(files).values()) or setting


class FirstWords(TypedDict):
    """Sections of the config that name files."""

    data: DataConfig
    adapter: AdapterConfig | None


def in_first_words(data: DataConfig, adapter: AdapterConfig | None) -> FirstWords:
    """data.template and adapter.path as the first process names them, because records are compared. Collective."""
    if processes.count() > 1:
        template, path = processes.of_first(lambda: [data.template, adapter and adapter.path])
        data = dataclasses.replace(data, template=template)
        adapter = adapter and dataclasses.replace(adapter, path=path)
    return FirstWords(data=data, adapter=adapter)


def with_today(data: DataConfig, output: Path, tokenizer: object) -> DataConfig:
    """The section with the day that its chat template writes (data.today), if it writes one: its own, the one in
    config.yaml, or the first process's today. Collective.
    """
    if data.today is not None or tokenizer is None or not writes_today(tokenizer, data.template):
        return data
    return dataclasses.replace(data, today=processes.of_first(lambda: _recorded_today(output) or dates.today()))


def _recorded_today(output: Path) -> str | None:
    settings = _recorded_settings(output)
    return None if settings is None else settings["data"]["today"]


def require_same_rows(sets: Mapping[str, TokenDataset | BatchSource | None]) -> None:
    """ValueError if processes have different rows. sets: {config key: rows or their source}. Collective."""
    if processes.count() == 1:
        return  # a single process need not compare, and reading every token takes time
    identities = {
        key: None
        if data is None
        else data.identity()
        if isinstance(data, BatchSource)
        else f"{len(data.documents):,} documents, {int(data.documents.trained.sum()):,} trained tokens, CRC-32 of all "
        f"tokens {data.documents.tokens_crc32:08x}"
        for key, data in sets.items()
    }
    processes.require_same(identities, "all of them need the same rows, the same tokenizer and the same template")


# ---- comparing records


@dataclasses.dataclass(frozen=True)
class Difference:
    """A dotted key whose values in a stored record and in this run's differ; "(absent)" where it is missing."""

    key: str  # dotted, such as "config.optim.learning_rate"
    saved: Any  # its value in the stored record
    current: Any  # its value in this run

    @property
    def is_code(self) -> bool:
        return self.key.startswith(_CODE)

    def __str__(self) -> str:
        return f"{self.key}: saved {self.saved!r}, now {self.current!r}"


def compare_meta(
    saved: Mapping[str, Any], current: Mapping[str, Any], incompatible: Iterable[str]
) -> tuple[list[Difference], list[Difference]]:
    """(differences that forbid a resume, harmless ones) of two records. A config key that one lacks has its default
    there. incompatible: dotted keys, each with all below it. saved, current: mappings of JSON values, nested or flat.
    """
    recorded, values = flat_keys(saved), flat_keys(json.loads(json.dumps(current)))
    if recorded.get("config.schedule.name") in ENDLESS:  # which 0.2.0 let stand beside a rate that it never had
        recorded.pop("config.schedule.min_ratio", None)
    old, new = with_defaults(recorded, values), with_defaults(values, recorded)
    forbidding = tuple(incompatible)
    refused, harmless = [], []
    for key in sorted(old.keys() | new.keys()):
        if key.startswith(_CODE) and (key in old) != (key in new):  # by an older version, or under another name
            continue
        difference = Difference(key, old.get(key, "(absent)"), new.get(key, "(absent)"))
        if difference.saved in (UNRECORDED, difference.current):
            continue
        if json.dumps(difference.saved) == json.dumps(difference.current):
            continue
        covered = any(key == prefix or key.startswith(prefix + ".") for prefix in forbidding)
        (refused if covered else harmless).append(difference)
    return refused, harmless


def require_compatible(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    incompatible: Iterable[str],
    hints: Mapping[str, str] = types.MappingProxyType({}),
    output: Path | None = None,
) -> list[Difference]:
    """The harmless differences; CheckpointError lists the others. hints: {dotted key: what else can be done}, shown if
    only such keys forbid a resume. output: names a new folder in the message. saved, current, incompatible: as for
    `compare_meta`.
    """
    refused, harmless = compare_meta(saved, current, incompatible)
    if refused:
        keys = {difference.key for difference in refused}
        hint = "\n" + hints[min(keys)] if keys <= hints.keys() else ""
        omitted = f"\n  and {len(refused) - 8} more" if len(refused) > 8 else ""
        lines = "\n".join(f"  {difference}" for difference in refused[:8]) + omitted
        new = "" if output is None else f", such as output={next_name(output)}"
        raise CheckpointError(
            f"this run cannot continue that checkpoint; set these back or start a new run{new}:\n{lines}{hint}"
        )
    return harmless


# ---- config.yaml


class ModelSections(TypedDict):
    """Sections of the config that describe the model that trains."""

    model: ModelConfig
    adapter: AdapterConfig | None
    precision: NotRequired[dict[str, str]]


def model_sections(
    model: Decoder, model_config: ModelConfig, adapter: AdapterConfig | None, precision: Precision
) -> ModelSections:
    """adapter, model.load_in, model.compute and, if it is another, precision as the model really has them: the caller
    may have given another model than the config describes. What describes it already stays as it was written.

    ValueError if no config can describe the adapters, or a setting contradicts them.
    """
    settings, excluded = adapter_settings(model), {"exclude_modules": left_out(model, model_config.tower)}
    if settings is None:
        adapter = None
    elif adapter is None or (adapter.path is None and not gives_adapter(model, adapter.settings | excluded)):
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
        adapter = AdapterConfig(**plain)
    stored_so = model.source is not None and "quantization_config" in json.loads(model.source.config)
    load_in, (usual, words) = model_config.load_in, format_and_followed(model, plain=not stored_so)
    if usual is None:
        load_in = None
    elif load_in is None and (usual in KEPT or not stored_so) and not precision.components:
        load_in = usual
    compute: Literal["fp8"] | None = "fp8" if computes_in_fp8(model) else None
    sections = ModelSections(model=dataclasses.replace(model_config, load_in=load_in, compute=compute), adapter=adapter)
    if not precision.components and words:
        sections["precision"] = words | {REST: precision.computes_in}
    return sections


def write_config(output: Path, settings: Settings) -> None:
    """Writes config.yaml with every key, in the first process; replaces an old one."""
    if processes.first():
        atomic_write(output / CONFIG, config_to_yaml(settings))


def require_same_config(output: Path, settings: Settings) -> None:
    """ValueError if a folder without a checkpoint belongs to another run, by its config.yaml. A beginning of ours (a
    full disk, a power failure) or an older version's is ours.
    """
    try:
        recorded, ours = (output / CONFIG).read_bytes(), config_to_yaml(settings).encode()
    except FileNotFoundError:
        return
    is_ours = recorded == ours or ours.startswith(recorded.rstrip(b"\0")) or _recorded_settings(output) == settings
    if not is_ours:
        raise ValueError(
            f"output = {str(output)!r} belongs to another run (its config.yaml differs), which has no checkpoint to "
            f"continue from: choose another folder, such as output={next_name(output)}, or delete that config.yaml if "
            "you do not need that run"
        )


def require_own_folder(settings: Settings, length_is_open: bool = False) -> None:
    """ValueError or CheckpointError if the output has another run, as far as that shows before rows are read.

    length_is_open: data.length is chosen only then.
    """
    output = Path(settings["output"])
    recorded = _recorded_settings(output)
    if recorded is not None and length_is_open:
        settings = {**settings, "data": {**settings["data"], "length": recorded["data"]["length"]}}
    if not saved_steps(output / CHECKPOINTS):
        require_same_config(output, settings)
    elif recorded is not None:  # else the checkpoint's own record is compared later
        require_compatible({"config": recorded}, {"config": settings}, _INCOMPATIBLE, output=output)


def _recorded_settings(output: Path) -> Settings | None:
    """A folder's config.yaml, with the defaults of keys that an older version lacked; None if it cannot be read."""
    try:
        values = read_values(output / CONFIG)
        schedule = values.get("schedule")
        if isinstance(schedule, dict) and schedule.get("name") in ENDLESS:
            schedule.pop("min_ratio", None)  # 0.2.0 let it stand
        return config_to_dict(config_from_dict(values))
    except (OSError, ConfigError):
        return None
