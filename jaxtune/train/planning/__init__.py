"""The planner: what a training step costs, and the fastest way to run it that fits the device's memory."""
