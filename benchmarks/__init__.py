"""Benchmarks of FastSparse: ``python -m benchmarks --help``.

One loop (`runner`), one timer (`timing`), one record format (`record`), one suite of graphs (`suite`). Every
other module declares one benchmark: its options, its cases and the cells of a case. Results are in
``benchmarks/results/<machine>/<name>.json``; `tables` and `plots` read them from there.
"""
