"""The names of weight formats, for configurations and commands, which read them before JAX is imported."""

# {name: file of jaxtune/pallas/formats whose FORMAT declares it}. LOADED are the formats that model.load_in accepts,
# READ those in which checkpoints are read or written but which no model keeps. Checkpoints are searched for them in
# this order.
LOADED = {"nf4": "four_bit", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8"}
READ = {"mxfp4": "mxfp4"}
