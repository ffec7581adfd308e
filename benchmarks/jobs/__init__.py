"""What the benchmarks start, and how they read what came of it."""
