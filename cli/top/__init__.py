"""``pdserve top``: the dashboard for terminals. ``command.py``: loop; ``screen.py``: layout; ``live.py``: report."""
