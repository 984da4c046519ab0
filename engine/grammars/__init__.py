"""Grammars of structured outputs: threads beside the step loop compile them and compute token masks."""
