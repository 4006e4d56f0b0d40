"""The planner chooses how a step runs: placement of residuals by layer, micro-batches, tiles, host offload and mesh. It
forecasts memory and time of many plans from shapes and takes the fastest that fits; only that one is compiled.
"""
