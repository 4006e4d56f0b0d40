"""Memory of transposed codes of frozen FP8 weights (models/placement/transposed_codes.py), which a plan keeps for all
layers or for none; results are bitwise equal.
"""

from __future__ import annotations

from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.pallas.formats import Stored
from jaxtune.train.config import TrainConfig
from jaxtune.train.planning.layer_costs import nbytes


def codes_bytes(model: Decoder, config: TrainConfig, shards: int, samples: bool) -> float:
    """Bytes of the transposed codes that a plan may keep, one for each frozen FP8 weight that is multiplied without
    decoding. 0 with QAT, which multiplies by rounded weights, with weights divided over `shards` > 1 devices, and if
    the run generates, where memory is better spent on more answers.
    """
    if shards > 1 or config.qat is not None or samples or config.evaluation.asking:
        return 0.0
    matrices = (matrix for layer in model.layers for *_, matrix in layer.matrices())
    frozen = (m.stored_weight for m in matrices if m.fp8 and not isinstance(m.weight, nnx.Param))
    # A copy is as large as its codes, which may be shapes here.
    return nbytes([w.with_transposed(lambda codes: codes).transposed for w in frozen if isinstance(w, Stored)])
