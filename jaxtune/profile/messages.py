"""Protobuf messages of XPlane and HLO files, with the fields that are read.

Names and numbers are those of tsl/profiler/protobuf/xplane.proto, xla/service/hlo.proto and xla/xla_data.proto. A map
is a repeated message with a key and a value, which is its encoding. protobuf is installed with orbax.

A field that is added to HloInstruction or removed changes hlo.py's fingerprints, which take all fields up to number 63
that are not declared here. control_predecessor_ids is declared for this reason only.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# {message: {field: (number, type)}}; a type that ends with a star is repeated.
_MESSAGES = {
    "XSpace": {"planes": (1, "XPlane*")},
    "XPlane": {
        "name": (2, "string"),
        "event_metadata": (4, "EventMetadataEntry*"),
        "stat_metadata": (5, "StatMetadataEntry*"),
        "stats": (6, "Stat*"),
    },
    "EventMetadataEntry": {"key": (1, "int64"), "value": (2, "EventMetadata")},
    "EventMetadata": {"name": (2, "string"), "stats": (5, "Stat*")},
    "StatMetadataEntry": {"key": (1, "int64"), "value": (2, "StatMetadata")},
    "StatMetadata": {"name": (2, "string")},
    "Stat": {"metadata_id": (1, "int64"), "str_value": (5, "string"), "bytes_value": (6, "bytes")},
    "HloProto": {"hlo_module": (1, "HloModule"), "buffer_assignment": (3, "BufferAssignment")},
    "HloModule": {
        "name": (1, "string"),
        "entry_computation_name": (2, "string"),
        "computations": (3, "HloComputation*"),
        "entry_computation_id": (6, "int64"),
        "schedule": (7, "HloSchedule"),
    },
    "HloSchedule": {"sequences": (1, "SequenceEntry*")},
    "SequenceEntry": {"key": (1, "int64"), "value": (2, "Sequence")},
    "Sequence": {"instruction_ids": (1, "int64*")},
    "HloComputation": {"name": (1, "string"), "instructions": (2, "HloInstruction*"), "id": (5, "int64")},
    "HloInstruction": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "Shape"),
        "metadata": (7, "OpMetadata"),
        "parameter_number": (9, "int64"),
        "custom_call_target": (28, "string"),
        "dot_dimension_numbers": (30, "DotDimensionNumbers"),
        "id": (35, "int64"),
        "operand_ids": (36, "int64*"),
        "control_predecessor_ids": (37, "int64*"),
        "called_computation_ids": (38, "int64*"),
        "backend_config": (43, "bytes"),
    },
    "OpMetadata": {"op_name": (2, "string")},
    "DotDimensionNumbers": {"lhs_contracting_dimensions": (1, "int64*")},
    "Shape": {"element_type": (2, "int32"), "dimensions": (3, "int64*"), "tuple_shapes": (4, "Shape*")},
    "BufferAssignment": {
        "logical_buffers": (1, "LogicalBuffer*"),
        "buffer_allocations": (3, "BufferAllocation*"),
        "heap_simulator_traces": (4, "HeapSimulatorTrace*"),
    },
    "LogicalBuffer": {"id": (1, "int64"), "size": (2, "int64"), "defined_at": (3, "BufferLocation")},
    "BufferLocation": {"instruction_id": (4, "int64")},
    "BufferAllocation": {
        "size": (2, "int64"),
        "is_entry_computation_parameter": (5, "bool"),
        "color": (8, "int64"),
        "assigned": (9, "AssignedBuffer*"),
        "maybe_live_out": (10, "bool"),
        "is_constant": (12, "bool"),
    },
    "AssignedBuffer": {"logical_buffer_id": (1, "int64")},
    "HeapSimulatorTrace": {"events": (1, "HeapEvent*")},
    "HeapEvent": {"kind": (1, "int32"), "buffer_id": (2, "int64"), "share_with_canonical_id": (5, "int64")},
}


def _pool() -> descriptor_pool.DescriptorPool:
    """The descriptors of all messages, in place of code that protoc would generate."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="jaxtune/profile.proto", package="jaxtune")
    for message, fields in _MESSAGES.items():
        message_type = file.message_type.add(name=message)
        for name, (number, declared) in fields.items():
            kind = declared.removesuffix("*")
            label = kinds.LABEL_OPTIONAL if kind == declared else kinds.LABEL_REPEATED
            field = message_type.field.add(name=name, number=number, label=label)
            if kind in _MESSAGES:
                field.type_name = f".jaxtune.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()
XSpace: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("jaxtune.XSpace"))
HloProto: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("jaxtune.HloProto"))
