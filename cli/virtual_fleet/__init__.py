"""A virtual fleet: the real scheduler, routing policy and moves on simulated nodes, in virtual time, in one thread.

``pdserve plan`` predicts with it. ``cards.py`` has costs of steps and messages, ``jobs.py`` requests and their
outcomes, ``node.py`` a node, ``fleet.py`` the routers and all nodes. It needs no torch, and equal jobs give equal
results.
"""
