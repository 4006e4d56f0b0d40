"""What a GGUF file has no place for: the parts of a model beside its text. What was trained there is refused by name;
the rest is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from jaxtune.models.adapters.trained_over import tower_of_run
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.passthrough import module_of
from jaxtune.models.lora import linears

_FIX = (
    "take merged, of which llama.cpp's convert_hf_to_gguf.py makes two files: the text model, and with --mmproj the "
    "tower"
)


def parts(model: Decoder) -> dict[str, int]:
    """{module, such as "model.visual" or "mtp": its tensors} of all that the model has beside its text."""
    names: list[str] = []
    if model.vision is not None:
        paths = (path for path, _ in nnx.to_flat_state(nnx.state(model.vision)) if "lora" not in path)
        names += map(model.vision.config.tensor_name, paths)
    if model.source is not None:
        names += model.source.dropped
        if model.source.passthrough is not None:
            names += [entry.name for entry in model.source.passthrough.tensors]
    return dict(Counter(map(module_of, names)))


def trained(model: Decoder) -> str | None:
    """The first name beside the text that was trained, as far as the model or the record of its run says; else None."""
    if model.vision is not None:
        tower = model.vision.config
        for name, linear in linears(model):
            if linear.lora is not None and name.startswith(tower.prefixes):
                return name
        for path, _ in nnx.to_flat_state(nnx.state(model.vision, nnx.Param)):
            return tower.tensor_name(path)
    if model.source is not None and parts(model):
        said = tower_of_run(Path(model.source.path).expanduser())
        if said not in (None, "frozen"):
            return f"the tower (model.tower = {said!r} in the run that wrote {model.source.path})"
    return None


def require_untrained(model: Decoder, to: str) -> None:
    """Raises ValueError if anything beside the text was trained. to: the format's word."""
    if (name := trained(model)) is not None:
        raise ValueError(
            f"export: to = {to!r}: {name} was trained, and the file would have the text model alone; {_FIX}"
        )


def note(model: Decoder) -> Sequence[str]:
    """[a note that names what is not in the file], or []."""
    left = parts(model)
    if not left:
        return []
    named = ", ".join(f"{name} ({count} tensor{'s' * (count > 1)})" for name, count in sorted(left.items()))
    towers = any(name != "mtp" for name in left)
    fix = f": it reads text only. For the rest {_FIX}" if towers else ", which llama.cpp can do without"
    return [f"the file has the text model alone, without {named}{fix}"]
