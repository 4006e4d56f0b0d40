"""The planner: what a training step costs (cost.py), the forecast of its memory and time under a plan (forecasts.py),
the choice of the fastest plan that fits the device's memory (choice.py, search.py, planner.py) and of a mesh
(meshes.py), and the memory of a run's other phases (phases.py)."""
