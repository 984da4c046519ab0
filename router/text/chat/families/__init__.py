"""Formats of calls and reasoning of single families: arguments between tags, and messages in harmony's channels."""
