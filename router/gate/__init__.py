"""Who may ask, how much, and in which order.

request ──► door.py        a key, or 401                            keys.py, key_file.py: whose it is
        ──► Gate.enter     a client's own limits, or 429            allowance.py, bucket.py
        ──► Visit.admit    a place at the nodes: at once, in the line, or 503
                                                                    admission.py, line.py
"""
