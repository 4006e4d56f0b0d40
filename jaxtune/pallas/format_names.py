"""The names of the formats of quantised weights, such as "nf4", for configurations and commands, which need them before
JAX is imported: LOADED are those to which weights can be quantised on loading, READ those that only files have."""

# {name: file of jaxtune/pallas/formats whose FORMAT declares it}. LOADED are the formats that model.load_in accepts,
# READ those in which checkpoints are read or written but which no model keeps. Checkpoints are searched for them in
# this order.
LOADED = {"nf4": "four_bit", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8"}
READ = {"mxfp4": "mxfp4"}
