"""The jobs that the benchmarks start, and readers of what they record."""
