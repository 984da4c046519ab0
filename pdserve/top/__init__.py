"""``pdserve top``: the router's dashboard for terminals. ``command.py`` is its loop, ``screen.py`` its layout."""
