"""Trains the embedded model on conversations that it generates: ``scripts/train-embedded-model``."""
