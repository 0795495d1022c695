"""Benchmark of streams that go on at another worker: kills, cuts and silences."""
