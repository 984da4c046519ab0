"""Structured outputs: outputs that follow a JSON schema, regex, choice or grammar.

request ──► structured_outputs.py   the fields as one grammar of llguidance
              normalized_schemas.py  schemas of generators in keywords that llguidance knows
              closed_schemas.py      no properties but declared ones
              work_budget.py         bounds the work of all of these; conversion.py runs them, the long ones on a thread
        ──► grammar_checker.py      compiles it in grammar_worker.py, a separate process; on failure: 400
              schema_problems.py     with the keyword and its place
        ──► nodes                   mask the tokens that it excludes (engine/grammars/workers.py)
"""
