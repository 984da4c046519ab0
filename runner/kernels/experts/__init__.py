"""Products of a mixture of experts: rows are grouped by their expert; with references in plain torch."""
