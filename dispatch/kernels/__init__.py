"""The int8 matrix products: `reference` defines the arithmetic; `cpu` (C) and `grouped_gemm` (Triton) compute the same bits."""
