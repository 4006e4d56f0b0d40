"""Sentences on the dtypes, formats and rounding of a run."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from jaxtune.models.components import followed
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import not_quantized, qat_spec
from jaxtune.models.precision import DTYPES
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.system.invocation import spelled
from jaxtune.train.config.precision import Precision
from jaxtune.train.objectives.loss import AuxLosses
from jaxtune.train.objectives.objective import Objective


def precision_notes(
    precision: Precision,
    storage: Mapping[str, str],
    offload: bool,
    gradients: str,
    aux_losses: AuxLosses,
    model: Decoder,
) -> list[str]:
    """Sentences on the dtypes of a run, and on what is added to its loss.

    storage: {"weights", "optimizer": dtype or format}.
    offload: the optimizer's states are in host memory.
    gradients: how they are summed and sent, in words.
    """
    rounding = ", matrices rounded stochastically and the rest in fp32" if storage["weights"] == "bf16" else ""
    host = ", in host memory" if offload else ""
    notes = [
        f"compute {precision.computes_in}; trainable weights {storage['weights']}{rounding}; gradients {gradients}; "
        f"optimizer state {storage['optimizer']}{host}"
    ]
    notes += _module_notes(followed(model, plain=bool(precision.components)), precision.computes_in)
    return [*notes, f"added to the loss: {aux_losses}"] if aux_losses else notes


def rounding_notes(model: Decoder, qat: FakeQuant | None, start: int) -> list[str]:
    """Sentences on QAT of this run, and of the one that trained the adapter.

    qat: how linears are rounded; None: not at all.
    start: steps before the first with rounded weights.
    """
    notes = []
    if qat is not None:
        skipped = not_quantized(model, qat)
        unrounded = f"; not rounded, as groups do not divide their input: {_last_parts(skipped)}" if skipped else ""
        operands = "weights and activations" if qat.rounds_inputs else "weights"
        groups = "" if qat.group_size is None else f", groups of {qat.group_size}"
        clipped = "; numbers outside the range of their scale get no gradient" if qat.clips else ""
        observed = "; activations under scales observed on the rows of the first step" if qat.observes else ""
        notes.append(
            f"QAT: {operands} rounded to {qat.format}{groups}, from step {start}{unrounded}{clipped}{observed}"
        )
    adapter_qat = qat_spec(model)
    if adapter_qat is not None and (qat is None or adapter_qat.grid != qat.grid):
        notes.append(
            f"the adapter was trained with merged weights rounded to {adapter_qat}, and this run "
            f"{'does not round them' if qat is None else 'rounds them in another way'}; the section qat sets how"
        )
    return notes


def reference_notes(objective: Objective, path: str | None) -> list[str]:
    """A sentence on the reference of a run that begins with the adapter `path`; [] without one."""
    if not path or not objective.reference_is_base:
        return []
    return [
        f"{objective.label}: the reference is the model without its adapter, and not the model with "
        f"adapter.path = {path!r}; to use that as reference, merge it first ({spelled(f'export {path} FOLDER')}), "
        "set model.path=FOLDER, adapter.path=null"
    ]


def _last_parts(names: list[str]) -> str:
    """ "q_proj (2), down_proj (2)" for dotted names of modules."""
    return ", ".join(
        f"{last_name} ({n})" for last_name, n in collections.Counter(n.rpartition(".")[2] for n in names).items()
    )


def _module_notes(words: Mapping[str, str], computes_in: str) -> list[str]:
    """A sentence on {module: dtype or format}; [] without any."""
    by_word: dict[str, list[str]] = {}
    for name, word in words.items():
        by_word.setdefault(word, []).append(name)
    clauses = [
        f"{'stored and computed' if word in DTYPES else 'stored'} in {word}: {_last_parts(names)}"
        for word, names in by_word.items()
    ]
    end = f"products are summed in fp32, and values between modules are in {computes_in}"
    return [f"precision by module: {'; '.join(clauses)}; {end}"] if clauses else []
