"""Diagnosis commands: ``pdserve doctor``, ``explain`` and ``probe``."""
