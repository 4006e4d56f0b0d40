"""A record of what made the lines of a file that a command continues: settings, prompts and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.adapters.adapter_files import adapter_content
from jaxtune.models.components import common_format
from jaxtune.models.lora import has_adapter
from jaxtune.system import files
from jaxtune.system.sealed import crc32

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder

_FORMAT = 1


def record_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.settings.json")


def agree(output: Path, settings: Mapping[str, object], prompts: Sequence[Sequence[object]], continues: bool) -> None:
    """Writes the record of a new file. If `continues`, raises ValueError unless the record has the same settings and
    its prompts are the first of these.

      output: the file of answers, beside which the record lies.
      settings: {name: JSON value} of all that the lines depend on, beside the prompts.
      prompts: JSON values of each, such as its token ids.
      continues: the file has answers already.
    """
    path, record = record_path(output), json.loads(json.dumps({"format": _FORMAT, **settings}))
    if continues:
        fix = "name another output, or remove it"
        try:
            recorded = dict(json.loads(path.read_text(encoding="utf-8")))
            count = int(recorded["prompts"])
        except FileNotFoundError:
            raise ValueError(f"{output} has lines already, and no {path.name} says what made them: {fix}") from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, which says what made {output}, cannot be read ({error}): {fix}") from None
        before = record | _prompts(prompts[:count])
        names = [name for name in sorted(recorded.keys() | before.keys()) if recorded.get(name) != before.get(name)]
        if names:
            differing = "; ".join(f"{name}: {recorded.get(name)!r}, now {before.get(name)!r}" for name in names)
            raise ValueError(f"{output} was started with other settings ({differing}): {fix}")
    files.atomic_write(path, json.dumps(record | _prompts(prompts), indent=1) + "\n")


def _prompts(prompts: Sequence[Sequence[object]]) -> dict[str, object]:
    return {"prompts": len(prompts), "tokens_crc32": crc32(json.dumps([*ids]).encode() for ids in prompts)}


def model_settings(model: Decoder) -> dict[str, object]:
    """What identifies a model's outputs: a digest of its weights and adapter, its dtype and format."""
    digest = hashlib.sha256(str(model.base_digest).encode())
    if has_adapter(model):
        config, arrays, _ = adapter_content(model)
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        leaves = sorted(arrays.items())
    else:
        paths = jax.tree_util.tree_leaves_with_path(nnx.state(model)) if model.base_digest is None else []
        leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
    for name, leaf in leaves:
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return {
        "weights": digest.hexdigest()[:16],
        "dtype": str(jnp.dtype(model.dtype)),
        "load_in": common_format(model),
    }
