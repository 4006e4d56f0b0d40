"""The names of quantised formats, such as "nf4", for configurations and commands, which need them before JAX is
imported.
"""

# {name: file of jaxtune/pallas/formats whose FORMAT declares it}. LOADED are the formats to which model.load_in can
# quantise weights. KEPT are formats that files have and to which loading quantises nothing: their weights are decoded
# when they are loaded, or stay as they are where model.load_in names the format and the layout of the files allows it.
# jaxtune.pallas.formats imports the files and makes its table FORMATS from both, in this order, in which checkpoints
# are searched for them.
LOADED = {"nf4": "four_bit", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8"}
KEPT = {"mxfp4": "mxfp4"}
LOAD_IN = (*LOADED, *KEPT)  # what model.load_in accepts

# {name of a format of quantisation-aware training (qat.format): the values that qat.group_size can have}, the default
# last. None: weights share scales in the way that the format itself says. models/fake_quant.py declares how they round.
QAT_GROUPS: dict[str, tuple[int | None, ...]] = {
    "int4": (32, 64, 128),
    "int8-int4": (32, 64, 128),
    "int8-int4-asymmetric": (32, 64, 128),
    "int8": (32, None),
    "fp8": (None,),
    "nvfp4": (None,),
    "nvfp4-nvfp4": (None,),
    "mxfp4": (None,),
    "mxfp4-mxfp4": (None,),
    "q4_0": (32,),
    "q8_0": (32,),
}


def qat_group_size(format: str, group_size: int | None) -> str | None:
    """Why a QAT format has no groups of this size, or None. None: the format's own, which some, such as int4, do not
    allow. An unknown format raises KeyError.
    """
    sizes = QAT_GROUPS[format]
    if group_size in sizes:
        return None
    numbers = [str(size) for size in sizes if size is not None]
    choices = " or ".join(filter(None, (", ".join(numbers[:-1]), *numbers[-1:])))
    if not numbers:
        return f"{format} has blocks of its own size: leave group_size out"
    return f"{format} has groups of {choices}" + (
        ", or a scale for each row without group_size" if None in sizes else ""
    )
