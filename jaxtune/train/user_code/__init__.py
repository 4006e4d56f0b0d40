"""The user's functions (rewards, tools, environments, rollout functions, metrics): their files, where they run, for how
long, and what is said if they fail. Modules that a function's process imports use the standard library alone."""
