"""What benchmarks say and keep: the machine, results, tables and pictures."""
