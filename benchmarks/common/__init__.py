"""What several benchmarks use, and parts of single ones: measuring, tables, inputs, and components for recipes."""
