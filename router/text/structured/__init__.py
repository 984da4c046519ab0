"""Outputs that have to follow a schema, a regex, a choice or a grammar.

request ──► formats.py   what the fields ask for, as one grammar of llguidance
        ──► checker.py   asks worker.py, a process of its own, whether it compiles: else a 400 that names the field
        ──► nodes        mask what does not follow it (engine/scheduler/grammar_workers.py)
"""
