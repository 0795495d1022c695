"""Shared parts of the benchmarks: environments of peers, servers, processes, samples, tables."""
