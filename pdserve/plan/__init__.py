"""``pdserve plan``: how many prefill and decode nodes a workload needs, from costs that were measured.

``costs.py`` what was measured, ``measured/`` of which GPUs; ``workload.py`` what is asked for; ``queues.py`` how long
who waits; ``nodes.py`` what the nodes of a role make of a load, ``sizing.py`` how many of them suffice; ``report.py``
what a person is told; ``flags.py``, ``command.py`` the command. Pure, but for files that are read.
"""
