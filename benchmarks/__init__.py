"""Benchmarks of FastSparse: ``python -m benchmarks --help``.

One timer (`timing`), one record format (`record`), one suite of graphs (`suite`); every other module measures
one thing and can be run alone. Results lie in ``benchmarks/results/<machine>/<name>.json``; `tables` and
`plots` read them from there.
"""
