"""``pdserve top``: a router's dashboard for terminals. ``command.py`` runs it, ``screen.py`` is what it looks like."""
