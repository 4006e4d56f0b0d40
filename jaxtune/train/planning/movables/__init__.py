"""What a plan may have elsewhere: one file each, which declares a `Movable`; MOVABLES is the table of all."""

from jaxtune.train.config import AdapterConfig
from jaxtune.train.planning.movables.embeddings import Embeddings
from jaxtune.train.planning.movables.movable import Movable
from jaxtune.train.planning.movables.optimizer_states import OptimizerStates
from jaxtune.train.planning.movables.residuals import Residuals
from jaxtune.train.planning.movables.streamed import Streamed
from jaxtune.train.planning.movables.transposed_codes import TransposedCodes
from jaxtune.train.planning.movables.whole_weights import Resident, Whole

# {word: movable}, in the order in which they are tried and told.
MOVABLES: dict[str, type[Movable]] = {
    movable.word: movable
    for movable in (Embeddings, Residuals, OptimizerStates, Streamed, TransposedCodes, Whole, Resident)
}


def left_on_host(adapter: AdapterConfig | None, generates: bool, tied: bool) -> list[str]:
    """As Movable.left_on_host, of all."""
    return [name for movable in MOVABLES.values() for name in movable.left_on_host(adapter, generates, tied)]


def layers_on_host(plan: str) -> int:
    """As Movable.layers_on_host, of all."""
    return max(movable.layers_on_host(plan) for movable in MOVABLES.values())
