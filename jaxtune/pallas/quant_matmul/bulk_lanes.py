"""Bulk copies to shared memory, and barriers that they report to; see lanes.py.

One lane asks for all parts of a chunk, by copies that know no shapes, with 64-bit addresses.
"""

# MLIR's Python bindings and Pallas' refs have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jaxtune.pallas.quant_matmul.lanes import SCALAR, _add, _const, _i32, _mul, _scalar, _thread


def _chunk(ref, number, size: int, element):
    """Pointer to chunk `number` of ref, of `size` elements of the MLIR type; in 64 bits."""
    return utils.getelementptr(utils.memref_ptr(ref), [number], ir.Type.parse(f"!llvm.array<{size} x {element}>"))


def _shared(ref, index, size: int):
    """32-bit address, in shared memory, of `index` times `size` bytes into ref."""
    return _add(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)), _mul(index, size))


def begin_barriers(full_smem):
    """Sets up barriers of one arrival each in full_smem, int32[2 barriers]; others see them after program_barrier."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def begin(_, full_smem):
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        (words,) = ir.MemRefType(full_smem.type).shape
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _const(0))):
            for number in range(words // 2):
                at = _shared(full_smem, _const(number), 8)
                utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", at, has_side_effects=True)
            utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

    begin(full_smem)


def program_barrier():
    """All that the program's threads wrote to shared memory is seen by all of them."""

    @plgpu.inline_mgpu()
    def wait(_):
        gpu.barrier()

    wait()


def copy_chunk(sources, slots, sizes, full_smem, number, slot):
    """Begins to copy chunk `number` of each of `sources`, of so many bytes, to number `slot` of `slots`; by one lane.

    Barrier `slot` of full_smem completes when all is there."""
    refs = (*sources, *slots, full_smem)

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, *(plgpu.RefType() for _ in refs)))
    def copy(_, number, slot, *refs):
        number, slot = _scalar(number), _scalar(slot)
        sources, slots = refs[: len(sizes)], refs[len(sizes) : -1]
        byte = ir.IntegerType.get_signless(8)
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, _thread(), _const(0))):
            full = _shared(refs[-1], slot, 8)
            expect = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {sum(sizes)};"
            utils.inline_ptx(expect, full, has_side_effects=True)
            for source, target, size in zip(sources, slots, sizes, strict=True):
                utils.inline_ptx(
                    f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];",
                    _shared(target, slot, size),
                    _chunk(source, number, size, byte),
                    full,
                    has_side_effects=True,
                )

    copy(number, slot, *refs)


def wait_for_chunk(full_smem, slot, parity):
    """Until a copy to the slot is there: the first, third, ... with parity 0, the second, fourth, ... with 1."""

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, plgpu.RefType()))
    def wait(_, slot, parity, full_smem):
        utils.inline_ptx(
            "{ .reg .pred there; again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 there, [$0], $1; "
            "@!there bra again_${:uid}; }",
            _shared(full_smem, _scalar(slot), 8),
            _scalar(parity),
            has_side_effects=True,
        )

    wait(slot, parity, full_smem)
