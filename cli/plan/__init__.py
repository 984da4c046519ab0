"""``pdserve plan``: how many prefill and decode nodes a workload needs, by simulation of virtual fleets.

``costs.py`` measured costs, in ``measured/`` by GPU; ``workload.py`` lengths and arrivals of requests;
``prediction.py`` a load on a virtual fleet; ``predictor.py`` several of them at once; ``sizing.py`` the fewest nodes
that suffice; ``report.py`` output; ``flags.py``, ``command.py`` the command.
"""
