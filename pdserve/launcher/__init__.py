"""``pdserve up``: start, watch and stop the processes of one machine."""
