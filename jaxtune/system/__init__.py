"""Basics that every package of jaxtune may import: files (files.py), what is printed (terminal.py), Ctrl-C
(interrupts.py), how the user started jaxtune (invocation.py), addresses of this machine (loopback.py), runs of several
processes (processes.py, shared_errors.py, shared_folders.py), garbage collection (heap.py), JAX's private parts
(private_jax.py, private_mlir.py), and the version (version.py). They import nothing of jaxtune but each other."""
