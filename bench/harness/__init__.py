"""What benchmarks share: peers in venvs of their own, servers, processes, samples, tables."""
