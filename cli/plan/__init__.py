"""``pdserve plan``: how many prefill and decode nodes a workload needs, from measured costs.

``costs.py`` measured costs, in ``measured/`` by GPU; ``workload.py`` lengths and arrivals of requests; ``queues.py``
waiting times; ``node_load.py`` a load on the nodes of a role; ``sizing.py`` the fewest nodes that suffice;
``report.py`` output; ``flags.py``, ``command.py`` the command.
"""
