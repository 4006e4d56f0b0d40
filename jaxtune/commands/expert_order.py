"""The order of the columns of experts' lora_B in an adapter whose file does not say it, by the loss on rows."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxtune.models.adapters import trained_over
from jaxtune.models.adapters.adapter_config import CONFIG_NAME, base_of, read_adapter_config
from jaxtune.models.adapters.adapter_files import LAYOUT, LAYOUTS

_LEAST = 1e-3  # nats by which the better loss must be lower


@contextlib.contextmanager
def marked(folder: Path, layout: str) -> Iterator[Path]:
    """A folder of links to an adapter's files, but its config says the layout."""
    with tempfile.TemporaryDirectory() as place:
        for file in folder.iterdir():
            if file.name != CONFIG_NAME:
                os.symlink(file.resolve(), Path(place, file.name))
        config = read_adapter_config(folder) | {LAYOUT: layout}
        Path(place, CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        yield Path(place)


def is_open(folder: Path) -> bool:
    """Whether another program wrote an adapter of experts, and its config does not say their order."""
    config = read_adapter_config(folder)
    said = config.keys() & {LAYOUT, "unsloth_fused_expert_lora"}
    return bool(config.get("target_parameters")) and not said and trained_over.read(folder) is None


def losses(folder: Path, rows: str) -> dict[str, float]:
    """{layout: the loss of the adapter on rows of a file}"""
    from jaxtune.train.config.file import config_from_dict
    from jaxtune.train.scoring import evaluate

    found = {}
    for layout in LAYOUTS:
        with marked(folder, layout) as adapter, tempfile.TemporaryDirectory() as output:
            config = {"model": {"path": base_of(folder)}, "adapter": {"path": str(adapter)}, "output": output}
            scores = evaluate(config_from_dict(config | {"data": {"train": rows, "eval": rows}}))
        found[layout] = float(scores["eval_loss"])
    return found


def decided(found: dict[str, float], folder: Path) -> str:
    """The layout with the lower loss; ValueError if no loss is lower."""
    better, worse = sorted(found, key=found.__getitem__)
    if not found[worse] - found[better] >= _LEAST:
        raise ValueError(
            f"{folder}: losses in both orders of experts' columns are {found[better]:.4f} and {found[worse]:.4f}: give "
            "--rows on which the adapter was trained, or of the same kind"
        )
    return better
