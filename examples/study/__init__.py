"""The study: every way to learn on the same traffic, with several seeds and a frozen control, on a CPU.

Each run is one of `examples.demo`. What a run measured is kept as JSON; the document is made from these alone.
"""
