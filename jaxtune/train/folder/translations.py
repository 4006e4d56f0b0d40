"""Older forms of what a run's folder records, and how each becomes the next.

Records without a version have any of the first forms, so their translations leave alone what has the newer keys. A new
key of the config or axis of the mesh needs none: a record that lacks it is read as having the default.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtune.models.qat.fake_quant import INPUT_SCALES
from jaxtune.train.config.file import config_keys, flat_keys

# The key of a checkpoint's meta that says where its rows continue (BatchSource.position), beside the record.
POSITION = "position"
BESIDE = (POSITION, INPUT_SCALES)  # keys of a checkpoint's meta that are no part of the record
UNRECORDED = "(not recorded)"  # a value that an older version did not write, and that equals any other
# What identifies a run, and was not recorded at first.
_LATER = ("base_digest", "data.columns_crc32", "total_steps")


class NewerVersion(ValueError):
    """A newer jaxtune wrote the record."""


type Flat = dict[str, Any]  # a record by dotted keys, and BESIDE


def _unrecorded(record: Flat) -> Flat:
    """A base was known by a fingerprint alone, rows by their tokens, and nothing said how long the run is."""
    return dict.fromkeys(_LATER, UNRECORDED) | record


def _per_layer_table(record: Flat) -> Flat:
    """Only tables of per-layer embeddings could be on the host."""
    old, new = "numerics.per_layer_embeddings", "numerics.embeddings"
    return {new if key == old else key: value for key, value in record.items()}


def _equal_steps(record: Flat) -> Flat:
    """int4 had equal steps, and kept no usual sizes of gradients."""
    if "sent in int4" in str(record.get("numerics.gradients")):
        return record | {"config.mesh.gradient_sync": "int4 of equal steps"}
    return record


def _lanes(record: Flat) -> Flat:
    """Each device had positions of its own in streamed rows; those of one device continue."""
    position = record.get(POSITION)
    return record | {POSITION: position["0"]} if isinstance(position, dict) and [*position] == ["0"] else record


TRANSLATIONS = (_unrecorded, _per_layer_table, _equal_steps, _lanes)
VERSION = len(TRANSLATIONS)


def translated(meta: Mapping[str, Any]) -> Flat:
    """A record of any version, nested or flat, by the dotted keys of this one; BESIDE stay as they are. ValueError for
    a version that is newer.
    """
    record = flat_keys({key: value for key, value in meta.items() if key not in BESIDE})
    record |= {key: meta[key] for key in BESIDE if key in meta}
    version = record.get("version", 0)
    if type(version) is not int or not 0 <= version <= VERSION:
        raise NewerVersion(
            f"the run's record has version {version!r}, and this jaxtune reads versions up to {VERSION}: continue with "
            "the jaxtune that wrote it, or name another output"
        )
    for translate in TRANSLATIONS[version:]:
        record = translate(record)
    return record | {"version": VERSION}


def section(record: Flat, name: str) -> Flat:
    """What stands below `name`, by keys without it."""
    return {key.removeprefix(f"{name}."): value for key, value in record.items() if key.startswith(f"{name}.")}


def with_defaults(record: Flat, keys: Iterable[str]) -> Flat:
    """`record` with the defaults of config keys among `keys` that it lacks in sections that it has."""
    sections = {key.rpartition(".")[0] for key in record}
    lacking = [key for key in keys if key not in record and key.rpartition(".")[0] in sections]
    return record | {key: _defaults()[key] for key in lacking if key in _defaults()}


@functools.cache
def _defaults() -> Flat:
    """{"config." + dotted key: default}, without keys that must be set."""
    defaults: Flat = {}
    for key in config_keys():
        if key.default != "required":
            try:
                defaults[f"config.{key.name}"] = json.loads(key.default)
            except ValueError:  # a string, which has no quotes there
                defaults[f"config.{key.name}"] = key.default
    return defaults


# Config keys that a run's digest had even at their defaults, by section ("": none): of the oldest version, then what
# each newer one added. It is closed: a key outside is in the digest only with another value than its default.
DIGESTED = (
    {
        "": "adapter epochs max_grad_norm precision qat router_aux_loss_coef router_z_loss_coef rows_per_step seed "
        "steps",
        "model": "from_config load_in",
        "adapter": "alpha_pattern lora_alpha lora_dropout modules_to_save path r rank_pattern target_modules "
        "target_parameters use_dora use_rslora",
        "data": "eval_rows format instruction_part last_response_only length max_rows on_bad_row overflow packing "
        "response_part template train_on",
        "optim": "beta1 beta2 eps learning_rate momentum name weight_decay weights",
        "schedule": "min_ratio name warmup_ratio warmup_steps",
        "qat": "format group_size start",
    },
    {"data": "mask_spans"},
    {"model": "compute"},
    {"objective": "beta label_smoothing loss_type name simpo_gamma"},
    {"objective": "desirable_weight precompute_ref_log_probs undesirable_weight"},
    {"": "neftune_noise_alpha", "schedule": "cycles"},
    {"objective": "center_rewards_coefficient"},
    {"schedule": "zero_start"},
    {
        "objective": "delta entropy_coef epsilon epsilon_high importance_sampling_clip_max "
        "importance_sampling_clip_min importance_sampling_correction importance_sampling_level "
        "importance_sampling_mode mask_truncated_completions max_completion_length min_p multi_objective_aggregation "
        "normalize_advantages num_generations num_iterations repetition_penalty reward_errors reward_funcs "
        "reward_timeout reward_weights sapo_temperature_neg sapo_temperature_pos scale_rewards slots "
        "steps_per_generation temperature top_entropy_quantile top_k top_p use_bias_correction_kl"
    },
    {"optim": "embedding_learning_rate"},
    {"data": "columns"},
    {"objective": "teacher teacher_load_in"},
    {"objective": "on_policy sampling_temperature"},
    {"objective": "environment_factory max_tool_calling_iterations rollout_func tool_timeout tools"},
    {"objective": "teacher_logprobs teacher_top_k"},
    {"qat": "gradients"},
    {"data": "template_arguments"},
    {"objective": "reward_isolation tool_isolation"},
    {"objective": "reset_timeout"},
    {"schedule": "decay decay_ratio decay_steps power stable_steps timescale warmup waves"},
    {"model": "max_position_embeddings rope_scaling"},
    {"objective": "json_schema regex"},
    {"objective": "exact"},
)


def digested(run: Flat, version: int = 0) -> Flat:
    """The values of same_run that a digest is of: of the versions of DIGESTED up to `version`, and others than their
    defaults. This version's is the oldest's.
    """
    return {
        key: value
        for key, value in run.items()
        if key not in _defaults() or key in _digested_at(version) or value != _defaults()[key]
    }


@functools.cache
def _digested_at(version: int) -> frozenset[str]:
    return frozenset(
        ".".join(filter(None, ("config", name, key)))
        for sections in DIGESTED[: version + 1]
        for name, keys in sections.items()
        for key in keys.split()
    )


def older_digested(run: Flat) -> Iterator[Flat]:
    """All values of same_run that a digest of this or an older version may be of."""
    for version in range(len(DIGESTED)):
        values = digested(run, version)
        yield values
        yield {key: value for key, value in values.items() if key not in _LATER}
