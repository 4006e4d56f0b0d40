"""The user's functions (rewards, tools, environments, metrics): their files, processes, limits and errors. Modules that
a function's process imports use the standard library alone.
"""
