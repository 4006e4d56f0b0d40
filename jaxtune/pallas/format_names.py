"""The formats of weights by name, for configurations and commands, which know them before JAX is imported."""

# Name -> file of jaxtune/pallas/formats whose FORMAT declares it: those that model.load_in accepts, and those that
# checkpoints are read from or written in but no model keeps. What checkpoints hold is looked for in this order.
LOADED = {"nf4": "four_bit", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8"}
READ = {"mxfp4": "mxfp4"}
