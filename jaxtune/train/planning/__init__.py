"""The planner: what a training step costs (layer_costs.py, cost.py, sizes.py), a plan as a value and as text (plan.py),
the forecast of a step's memory and time under a plan (forecasts.py), the plans for one layer (layer_plans.py), the
place of the tables of embeddings (host_table.py), transposed codes of FP8 weights (kept_codes.py), what devices receive
from each other (exchange.py), the choice of the fastest plan that fits the device's memory (choice.py, search.py,
known.py, planner.py) and of a mesh (meshes.py), advice if none fits (fitting.py), plans of passes without a backward
(forward.py, teacher_pass.py), the memory of a run's other phases (phases.py), and the rates and memory of devices
(devices.py)."""
