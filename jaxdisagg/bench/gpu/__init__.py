"""The parts of scripts/gpu_check.py: one prepared run that says what works on a GPU, and how fast.

Each part is a program of its own (`python -m jaxdisagg.bench.gpu.PART`) that prints its rows as
JSON, one a line, as it has them; so a part that fails, hangs or is ended in time leaves the rest.
"""
