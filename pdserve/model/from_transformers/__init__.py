"""Models that run through transformers, read from config.json and the library's source: it is not imported."""
