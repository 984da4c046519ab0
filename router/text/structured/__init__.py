"""Structured outputs: outputs that follow a JSON schema, regex, choice or grammar.

request ──► structured_outputs.py   the fields as one grammar of llguidance
        ──► grammar_checker.py      compiles it in grammar_worker.py, a separate process; on failure: 400
        ──► nodes                   mask the tokens that it excludes (engine/scheduler/grammar_workers.py)
"""
