"""Model definitions, shared by all runners: ``families/`` on ``decoder.py`` and ``layers/``."""
