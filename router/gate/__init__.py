"""Clients, their API keys and rate limits, and admission to the nodes.

request ──► http/authentication.py              an API key, or 401           keys.py
        ──► AdmissionController.enter           the client's limits, or 429  rate_limits.py
        ──► RequestAdmission.wait_for_slot      a slot at the nodes, or 503  admission.py, admission_queue.py
"""
