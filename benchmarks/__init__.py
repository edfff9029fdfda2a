"""Measurements, one file a question: `python -m benchmarks.NAME` writes `benchmarks/results/NAME.json`."""
