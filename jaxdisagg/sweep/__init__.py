"""Sweeps over pairs of meshes: what a request would move, how long that takes, and a run of it.

`shapes` finds a model's config, `compute` estimates a layer's work, `nics` deals page-writes to
NICs, `overlap` sets transfer beside compute, `predict` puts a pair's row together, `execute` runs
pairs on CPU meshes, `domains` says what their NICs carried; `words`, `tables` and `plot` show it.
Meshes, layouts and plans are the serving nodes' own: this package counts what `transfer_plan` says
and never lists a write itself.
"""
