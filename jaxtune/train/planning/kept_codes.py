"""The transposed codes of frozen FP8 weights that a plan may keep on the device, so that no step copies the codes
transposed (models/placement/transposed_codes.py): their bytes (`codes_bytes`). A plan keeps those of all layers where
memory is left (forecasts.with_codes), or none; results are the same in every bit."""

from __future__ import annotations

from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.pallas.formats import Stored
from jaxtune.train.config import TrainConfig
from jaxtune.train.planning.sizes import nbytes


def codes_bytes(model: Decoder, config: TrainConfig, parts: int) -> float:
    """Bytes of the transposed codes that a plan may keep, for StepCost: one for each number of the layers' frozen FP8
    weights that a run of `config` multiplies without decoding. It is 0 with quantisation-aware training, which
    multiplies by rounded weights; where weights are divided over devices (`parts`, the number of these, is above 1);
    and if the model answers questions during the run, because there memory has more answers sampled at a time."""
    if parts > 1 or config.qat is not None or config.objective.samples or config.evaluation.asking:
        return 0.0
    matrices = (matrix for layer in model.layers for *_, matrix in layer.matrices())
    frozen = (m.stored_weight for m in matrices if m.fp8 and not isinstance(m.weight, nnx.Param))
    # A copy is as large as its codes, which may be shapes here.
    return nbytes([w.with_transposed(lambda codes: codes).transposed for w in frozen if isinstance(w, Stored)])
