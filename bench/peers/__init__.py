"""What the benchmarks share: servers, clients, measuring and the report."""
