"""Node discovery: fixed addresses, DNS names, Kubernetes services and files behind one interface (sources.py)."""
