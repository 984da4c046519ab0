"""Decoder families, a file for each of config.json's model types; docs/adding-a-model.md shows one."""
