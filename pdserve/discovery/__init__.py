"""Where nodes are: a list, a name in DNS, or a service of Kubernetes, behind one interface (places.py)."""
